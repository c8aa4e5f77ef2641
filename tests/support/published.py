"""Families that transformers does not have, computed in float64 from their published architectures, and tiny random
checkpoints of them.

Everything here is written from the papers and from the code that comes with the checkpoints. It shares nothing with the
engine: whole sequences, no cache, one head after the other. `twin()` is one of transformers' own models with the same
numbers, for settings with which such a model exists.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from support.gemma4 import VOCAB
from support.greedy import Greedy

_QWEN = {"architectures": ["QWenLMHeadModel"], "model_type": "qwen", "no_bias": True, "rotary_pct": 1.0,
         "rotary_emb_base": 10000, "layer_norm_epsilon": 1e-6, "vocab_size": VOCAB, "num_hidden_layers": 3,
         "max_position_embeddings": 2048}
_GLM = {"architectures": ["ChatGLMModel"], "model_type": "chatglm", "add_bias_linear": False, "num_layers": 3,
        "multi_query_attention": True, "padded_vocab_size": VOCAB, "post_layer_norm": True, "rmsnorm": True,
        "layernorm_epsilon": 1e-5, "seq_length": 2048, "original_rope": True, "add_qkv_bias": True}
_BAICHUAN = {"model_type": "baichuan", "rms_norm_eps": 1e-6, "vocab_size": VOCAB, "num_hidden_layers": 3,
             "hidden_act": "silu"}

PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen": {**_QWEN, "hidden_size": 72, "num_attention_heads": 6, "kv_channels": 12, "intermediate_size": 302,
             "seq_length": 2048, "use_dynamic_ntk": False, "use_logn_attn": False},
    # Prompts of 300 and 700 tokens exceed the length that the model was trained for.
    "qwen-long": {**_QWEN, "hidden_size": 96, "num_attention_heads": 6, "kv_channels": 16, "intermediate_size": 262,
                  "seq_length": 96, "use_dynamic_ntk": True, "use_logn_attn": True},
    "chatglm3": {**_GLM, "hidden_size": 72, "num_attention_heads": 6, "kv_channels": 20, "multi_query_group_num": 2,
                 "ffn_hidden_size": 151},
    "glm-4-9b-chat": {**_GLM, "architectures": ["ChatGLMForConditionalGeneration"], "hidden_size": 96,
                      "num_attention_heads": 8, "kv_channels": 16, "multi_query_group_num": 4, "ffn_hidden_size": 137,
                      "rope_ratio": 500, "layernorm_epsilon": 1.5625e-07},
    "baichuan-7b": {**_BAICHUAN, "architectures": ["BaiChuanForCausalLM"], "hidden_size": 96,
                    "num_attention_heads": 6, "intermediate_size": 151, "max_position_embeddings": 2048},
    "baichuan-13b": {**_BAICHUAN, "architectures": ["BaichuanForCausalLM"], "hidden_size": 80,
                     "num_attention_heads": 5, "intermediate_size": 137, "model_max_length": 2048},
    "baichuan2-7b": {**_BAICHUAN, "architectures": ["BaichuanForCausalLM"], "hidden_size": 72,
                     "num_attention_heads": 6, "intermediate_size": 131, "max_position_embeddings": 2048,
                     "model_max_length": 2048, "z_loss_weight": 0},
    "baichuan2-13b": {**_BAICHUAN, "architectures": ["BaichuanForCausalLM"], "hidden_size": 112,
                      "num_attention_heads": 14, "intermediate_size": 151, "model_max_length": 2048,
                      "z_loss_weight": 0},
}


@dataclass
class Names:
    """Names of a layer's tensors, and of the tensors before and after the layers."""

    embedding: str
    layer: str
    norms: tuple[str, str]
    qkv: str
    out: str
    mlp: tuple[str, ...]  # gate, up, down; or gate and up as one, and down
    last_norm: str
    head: str = "lm_head"


NAMES = {
    "qwen": Names("transformer.wte", "transformer.h.{}.", ("ln_1", "ln_2"), "attn.c_attn", "attn.c_proj",
                  ("mlp.w2", "mlp.w1", "mlp.c_proj"), "transformer.ln_f"),
    "chatglm": Names("transformer.embedding.word_embeddings", "transformer.encoder.layers.{}.",
                     ("input_layernorm", "post_attention_layernorm"), "self_attention.query_key_value",
                     "self_attention.dense", ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
                     "transformer.encoder.final_layernorm", "transformer.output_layer"),
    "baichuan": Names("model.embed_tokens", "model.layers.{}.", ("input_layernorm", "post_attention_layernorm"),
                      "self_attn.W_pack", "self_attn.o_proj", ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
                      "model.norm"),
}


@dataclass
class Sizes:
    """Sizes that the families' config.json give under different names."""

    config: dict[str, Any]
    kind: str = field(init=False)

    def __post_init__(self):
        c, self.kind = self.config, self.config["model_type"]
        self.hidden, self.heads = c["hidden_size"], c["num_attention_heads"]
        self.layers = c.get("num_layers", c.get("num_hidden_layers"))
        self.dim = c.get("kv_channels", self.hidden // self.heads)
        self.kv = c.get("multi_query_group_num", self.heads)
        self.inner = c["ffn_hidden_size"] if self.kind == "chatglm" else (
            c["intermediate_size"] // (2 if self.kind == "qwen" else 1))
        self.eps = c.get("layer_norm_epsilon", c.get("layernorm_epsilon", c.get("rms_norm_eps")))
        self.alibi = self.kind == "baichuan" and "max_position_embeddings" not in c
        self.biases = self.kind == "qwen" or bool(c.get("add_qkv_bias"))


def write(directory: Path, config: dict[str, Any], seed: int = 0, dtype=torch.float32) -> Path:
    """Writes a checkpoint of random weights, scaled so that logits depend on the whole context."""
    s, names = Sizes(config), NAMES[config["model_type"]]
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float | None = None, mean: float = 0.0) -> torch.Tensor:
        std = 1.3 * shape[-1] ** -0.5 if std is None else std
        return (mean + std * torch.randn(shape, generator=generator)).to(dtype)

    tensors = {f"{names.embedding}.weight": normal(VOCAB, s.hidden, std=0.5),
               f"{names.last_norm}.weight": normal(s.hidden, std=0.2, mean=1.0),
               f"{names.head}.weight": normal(VOCAB, s.hidden)}
    of_q, of_kv = s.heads * s.dim, s.kv * s.dim
    for i in range(s.layers):
        prefix = names.layer.format(i)
        tensors |= {f"{prefix}{norm}.weight": normal(s.hidden, std=0.2, mean=1.0) for norm in names.norms}
        tensors[f"{prefix}{names.qkv}.weight"] = normal(of_q + 2 * of_kv, s.hidden)
        if s.biases:
            tensors[f"{prefix}{names.qkv}.bias"] = normal(of_q + 2 * of_kv, std=0.3)
        tensors[f"{prefix}{names.out}.weight"] = normal(s.hidden, of_q)
        for name in names.mlp[:-1]:
            tensors[f"{prefix}{name}.weight"] = normal((2 if len(names.mlp) == 2 else 1) * s.inner, s.hidden)
        tensors[f"{prefix}{names.mlp[-1]}.weight"] = normal(s.hidden, s.inner)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({**config, "eos_token_id": 2}))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


# -- float64 -----------------------------------------------------------------------------------------------------------
def _frequencies(s: Sizes, prompt_len: int) -> np.ndarray:
    """Rotary frequencies in float32, as all of these families compute them."""
    config, dim, base = s.config, s.dim, 10000.0
    if s.kind == "chatglm":
        dim, base = s.dim // 2, 10000.0 * config.get("rope_ratio", 1)
    if config.get("use_dynamic_ntk"):
        alpha = max(2 ** math.ceil(math.log(prompt_len / config["seq_length"], 2) + 1) - 1, 1)
        base = config["rotary_emb_base"] * alpha ** (dim / (dim - 2))
    exponents = (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)).astype(float)
    return np.float32(1) / (base**exponents).astype(np.float32)


def _rotated(x: np.ndarray, angles: np.ndarray, adjacent: bool) -> np.ndarray:
    """`x` [positions, heads, dim]; angles [positions, pairs]."""
    pairs = angles.shape[1]
    rotated, cos, sin = x.copy(), np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if adjacent else (
        slice(0, pairs), slice(pairs, 2 * pairs))
    rotated[..., first] = x[..., first] * cos - x[..., second] * sin
    rotated[..., second] = x[..., second] * cos + x[..., first] * sin
    return rotated


def _slopes(heads: int) -> list[float]:
    def powers(n: int) -> list[float]:
        start = 2 ** -(2 ** -(math.log2(n) - 3))
        return [start * start**i for i in range(n)]

    if math.log2(heads).is_integer():
        return powers(heads)
    n = 2 ** math.floor(math.log2(heads))
    return powers(n) + _slopes(2 * n)[0::2][: heads - n]


class Published:
    """A checkpoint, computed in float64."""

    def __init__(self, directory: Path):
        self.config = json.loads((directory / "config.json").read_text())
        self.tensors = {n: t.double().numpy() for n, t in load_file(directory / "model.safetensors").items()}

    def logits(self, ids: list[int], prompt_len: int | None = None) -> np.ndarray:
        """Logits [positions, vocabulary]. `prompt_len` of the ids are the prompt; by default all are."""
        s, names, t = Sizes(self.config), NAMES[self.config["model_type"]], self.tensors
        count = len(ids)

        def norm(x: np.ndarray, name: str) -> np.ndarray:
            return x / np.sqrt((x * x).mean(-1, keepdims=True) + s.eps) * t[f"{name}.weight"]

        angles = None
        if not s.alibi:
            positions = np.arange(count, dtype=np.float32)[:, None]
            angles = (positions * _frequencies(s, prompt_len or count)).astype(float)
        x = t[f"{names.embedding}.weight"][ids]
        for i in range(s.layers):
            prefix = names.layer.format(i)
            h = norm(x, prefix + names.norms[0])
            qkv = h @ t[f"{prefix}{names.qkv}.weight"].T + t.get(f"{prefix}{names.qkv}.bias", 0.0)
            x = x + self._attention(s, qkv, angles) @ t[f"{prefix}{names.out}.weight"].T
            h = norm(x, prefix + names.norms[1])
            both = np.concatenate([h @ t[f"{prefix}{name}.weight"].T for name in names.mlp[:-1]], 1)
            gate, up = np.split(both, 2, axis=1)
            x = x + (gate / (1 + np.exp(-gate)) * up) @ t[f"{prefix}{names.mlp[-1]}.weight"].T
        head = t[f"{names.head}.weight"]
        if "z_loss_weight" in self.config:
            head = head / np.linalg.norm(head, axis=1, keepdims=True)
        return norm(x, names.last_norm) @ head.T

    def _attention(self, s: Sizes, qkv: np.ndarray, angles: np.ndarray | None) -> np.ndarray:
        count = len(qkv)
        q, k, v = (part.reshape(count, -1, s.dim) for part in
                   np.split(qkv, [s.heads * s.dim, (s.heads + s.kv) * s.dim], axis=1))
        if angles is not None:
            q, k = (_rotated(part, angles, s.kind == "chatglm") for part in (q, k))
        if self.config.get("use_logn_attn"):
            own = np.arange(1, count + 1) / self.config["seq_length"]
            length = math.log(self.config["seq_length"])
            q = q * np.where(own > 1, np.log(np.arange(1, count + 1)) / length, 1.0)[:, None, None]
        distance = np.arange(count)[None, :] - np.arange(count)[:, None]
        slopes = _slopes(s.heads) if s.alibi else [0.0] * s.heads
        out = np.empty((count, s.heads, s.dim))
        for head in range(s.heads):
            kv = head // (s.heads // s.kv)
            scores = q[:, head] @ k[:, kv].T * s.dim**-0.5 + slopes[head] * distance
            scores = np.where(distance > 0, -np.inf, scores)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            out[:, head] = weights / weights.sum(1, keepdims=True) @ v[:, kv]
        return out.reshape(count, -1)

    def greedy(self, prompt: list[int], n: int) -> Greedy:
        """Like greedy.reference_greedy."""
        ids, gaps = list(prompt), []
        for _ in range(n):
            row = self.logits(ids, len(prompt))[-1]
            best = np.sort(row)[-2:]
            gaps.append(float((best[1] - best[0]) / row.std()))
            ids.append(int(row.argmax()))
        return Greedy(ids[len(prompt):], gaps)


# -- transformers' models with the same numbers ------------------------------------------------------------------------
def twin(directory: Path):
    """Transformers' Qwen2, GLM or Llama with a checkpoint's numbers, in float32; None if none of them fits."""
    config = json.loads((directory / "config.json").read_text())
    s, names, t = Sizes(config), NAMES[config["model_type"]], load_file(directory / "model.safetensors")
    if s.alibi or config.get("use_logn_attn") or config.get("use_dynamic_ntk"):
        return None
    family = {"qwen": "Qwen2", "chatglm": "Glm", "baichuan": "Llama"}[s.kind]
    rope = {"rope_type": "default", "rope_theta": 10000.0 * config.get("rope_ratio", 1)}
    own = getattr(transformers, f"{family}Config")(
        hidden_size=s.hidden, num_attention_heads=s.heads, num_key_value_heads=s.kv, head_dim=s.dim,
        intermediate_size=s.inner, num_hidden_layers=s.layers, vocab_size=VOCAB, max_position_embeddings=2048,
        rms_norm_eps=s.eps, attention_bias=s.biases, tie_word_embeddings=False, pad_token_id=0,
        rope_parameters=rope | ({"partial_rotary_factor": 0.5} if s.kind == "chatglm" else {}))
    own._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(own).eval()
    head = t[f"{names.head}.weight"]
    state = {"model.embed_tokens.weight": t[f"{names.embedding}.weight"],
             "model.norm.weight": t[f"{names.last_norm}.weight"],
             "lm_head.weight": torch.nn.functional.normalize(head) if "z_loss_weight" in config else head}
    for i in range(s.layers):
        old, new = names.layer.format(i), f"model.layers.{i}."
        state |= {f"{new}{name}.weight": t[f"{old}{norm}.weight"]
                  for name, norm in zip(("input_layernorm", "post_attention_layernorm"), names.norms)}
        for suffix in ("weight", "bias") if s.biases else ("weight",):
            parts = t[f"{old}{names.qkv}.{suffix}"].split([s.heads * s.dim, s.kv * s.dim, s.kv * s.dim])
            state |= {f"{new}self_attn.{n}_proj.{suffix}": part for n, part in zip("qkv", parts)}
        state[f"{new}self_attn.o_proj.weight"] = t[f"{old}{names.out}.weight"]
        state[f"{new}mlp.down_proj.weight"] = t[f"{old}{names.mlp[-1]}.weight"]
        kinds = ("gate_up_proj",) if len(names.mlp) == 2 else ("gate_proj", "up_proj")
        state |= {f"{new}mlp.{kind}.weight": t[f"{old}{name}.weight"] for kind, name in zip(kinds, names.mlp)}
    model.load_state_dict(state)
    return model
