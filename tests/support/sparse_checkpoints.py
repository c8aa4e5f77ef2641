"""Checkpoints of published shapes without their values: safetensors files that are holes, and take no disk."""
from __future__ import annotations

import json
import math
from pathlib import Path

QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "intermediate_size": 6144, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "norm_topk_prob": True, "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False,
    "torch_dtype": "bfloat16", "bos_token_id": 151643, "eos_token_id": 151645}


def qwen3_moe(folder: Path, config: dict = QWEN3_30B_A3B) -> Path:
    """Writes a checkpoint of this config to `folder`."""
    hidden, dim, inner = config["hidden_size"], config["head_dim"], config["moe_intermediate_size"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], hidden], "model.norm.weight": [hidden],
              "lm_head.weight": [config["vocab_size"], hidden]}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in {
            "input_layernorm": [hidden], "post_attention_layernorm": [hidden],
            "self_attn.q_proj": [queries, hidden], "self_attn.k_proj": [keys, hidden],
            "self_attn.v_proj": [keys, hidden], "self_attn.o_proj": [hidden, queries],
            "self_attn.q_norm": [dim], "self_attn.k_norm": [dim], "mlp.gate": [config["num_experts"], hidden],
            **{f"mlp.experts.{expert}.{name}": shape for expert in range(config["num_experts"])
               for name, shape in {"gate_proj": [inner, hidden], "up_proj": [inner, hidden],
                                   "down_proj": [hidden, inner]}.items()}}.items()}
    return write(folder, config, shapes)


def write(folder: Path, config: dict, shapes: dict[str, list[int]]) -> Path:
    """Writes a checkpoint with bfloat16 tensors of these shapes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder
