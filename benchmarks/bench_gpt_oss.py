"""Measures loading and serving a checkpoint of gpt-oss' shape with random weights in MXFP4.

    bench_gpt_oss.py [--layers 24] [--experts 32] [--requests 1,32,256] [--prompt 1024] [--tokens 1024]
                     [--weight-dtype auto] [--folder /dev/shm]

The checkpoint lies in the page cache or in memory (--folder). It prints the seconds until start_model() has loaded it,
the GPU's memory for weights, and for each number of requests, which begin together and are greedy, output tokens/s
through Engine from the first request on, prompts included.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from pathlib import Path

import numpy as np

HIDDEN, INNER, HEADS, KV_HEADS, HEAD, VOCAB = 2880, 2880, 64, 8, 64, 201088


def tensors_of(layers: int, experts: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of each tensor."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}.{name}.weight"] = "BF16", (HIDDEN,)
        for name, n, k in (("q", HEADS * HEAD, HIDDEN), ("k", KV_HEADS * HEAD, HIDDEN), ("v", KV_HEADS * HEAD, HIDDEN),
                           ("o", HIDDEN, HEADS * HEAD)):
            found[f"{prefix}.self_attn.{name}_proj.weight"] = "BF16", (n, k)
            found[f"{prefix}.self_attn.{name}_proj.bias"] = "BF16", (n,)
        found[f"{prefix}.self_attn.sinks"] = "BF16", (HEADS,)
        found[f"{prefix}.mlp.router.weight"] = "BF16", (experts, HIDDEN)
        found[f"{prefix}.mlp.router.bias"] = "BF16", (experts,)
        for name, n, k in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
            found[f"{prefix}.mlp.experts.{name}_blocks"] = "U8", (experts, n, k // 32, 16)
            found[f"{prefix}.mlp.experts.{name}_scales"] = "U8", (experts, n, k // 32)
            found[f"{prefix}.mlp.experts.{name}_bias"] = "BF16", (experts, n)
    return found | {"model.embed_tokens.weight": ("BF16", (VOCAB, HIDDEN)), "model.norm.weight": ("BF16", (HIDDEN,)),
                    "lm_head.weight": ("BF16", (VOCAB, HIDDEN))}


def write_tensors(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> int:
    """Writes random tensors of these types and shapes; returns their bytes."""
    rng, header, at = np.random.default_rng(0), {}, 0
    for name, (dtype, shape) in tensors.items():
        size = int(np.prod(shape)) * (2 if dtype == "BF16" else 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    noise = (rng.normal(size=1 << 24) * 0.02).astype(np.float32).view(np.uint32) >> 16
    kinds = {"plain": noise.astype(np.uint16).tobytes(), "norm": np.full(1 << 16, 0x3F80, np.uint16).tobytes(),
             "blocks": rng.integers(0, 256, 1 << 25, np.uint8).tobytes(),
             "scales": rng.integers(117, 121, 1 << 22, np.uint8).tobytes()}
    with open(path, "wb") as file:
        text = json.dumps(header).encode()
        file.write(len(text).to_bytes(8, "little") + text)
        for name, entry in header.items():
            left = entry["data_offsets"][1] - entry["data_offsets"][0]
            data = memoryview(kinds[next((kind for kind in ("norm", "blocks", "scales") if kind in name), "plain")])
            while left:
                left -= file.write(data[:left])
    return at


def write_checkpoint(directory: Path, layers: int, experts: int) -> int:
    """Writes it; returns its bytes."""
    (directory / "config.json").write_text(json.dumps({
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_hidden_layers": layers,
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS, "head_dim": HEAD,
        "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB, "num_local_experts": experts, "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5, "sliding_window": 128, "attention_bias": True, "tie_word_embeddings": False,
        "max_position_embeddings": 131072, "hidden_act": "silu", "rope_theta": 150000.0, "swiglu_limit": 7.0,
        "eos_token_id": 200002, "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                         "original_max_position_embeddings": 4096},
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}}))
    return write_tensors(directory / "model.safetensors", tensors_of(layers, experts))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("layers", 24), ("experts", 32), ("prompt", 1024), ("tokens", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--requests", default="1,32,256")
    parser.add_argument("--weight-dtype", default="auto")
    parser.add_argument("--folder", default="/dev/shm")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    from allspark_client import AsModelConfig
    from allspark_server import Engine

    numbers, rng = [int(n) for n in given.requests.split(",")], np.random.default_rng(1)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        began = time.perf_counter()
        size = write_checkpoint(Path(folder), given.layers, given.experts)
        print(f"{size / 1e9:.1f} GB, written in {time.perf_counter() - began:.1f} s", flush=True)
        engine, began = Engine(), time.perf_counter()
        engine.install_model(AsModelConfig(
            model_name="m", model_path=folder, compute_unit="CUDA:0", weight_dtype=given.weight_dtype,
            engine_max_length=given.prompt + given.tokens + 16, engine_max_batch=max(numbers),
            enable_prefix_cache=False))
        installed = time.perf_counter()
        engine.start_model("m")
        print(f"installed after {installed - began:.1f} s, ready after {time.perf_counter() - began:.1f} s", flush=True)
        for number in numbers:
            config = {"max_new_tokens": given.tokens, "eos_token_id": -1, "do_sample": False}
            prompts = rng.integers(300, 200000, (number, given.prompt)).tolist()
            began, count, first = time.perf_counter(), 0, 0.0
            queues = [engine.start_request("m", {"input_ids": ids}, config)[2] for ids in prompts]
            for queue in queues:
                for elements in queue:
                    first = first or time.perf_counter() - began
                    count += len(elements.ids_from_generate)
            took = time.perf_counter() - began
            print(f"{number} requests: {count / took:,.0f} tokens/s, first token after {1e3 * first:.0f} ms",
                  flush=True)
        engine.close()


if __name__ == "__main__":
    main()
