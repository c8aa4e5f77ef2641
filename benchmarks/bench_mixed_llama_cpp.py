"""Measures llama.cpp with routed experts on CPUs and the rest on a GPU, on the shapes of bench_mixed.py.

    bench_mixed_llama_cpp.py [gpt-oss-120b|30b-a3b] --programs FOLDER [--layers 12] [--threads 14] [--requests 1,8]
                             [--prompt 2048] [--micro-batches 512,2048] [--modes none] [--repeats 3] [--folder /dev/shm]

FOLDER: has llama-bench and llama-batched-bench of a CUDA build. A GGUF file of the model's shape is written, with fewer
layers and random weights in the formats of real files: gpt-oss' experts in MXFP4 and the rest in Q8_0; Qwen3's layers
in Q4_0. All layers' experts are on the CPU (--n-cpu-moe), all else on the GPU, with flash attention.

Decode: llama-batched-bench, 200 tokens each after 32, no sampling. Prompts: llama-bench, for each number of rows that
it computes at a time (-ub). Both for each of --modes: how weights are loaded (--load-mode), with "-repacked": not in
memory that a GPU can copy from, so that CPUs have their own layout.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bench_gpt_oss
import numpy as np
from bench_mixed import SHAPES, Shape

TYPES = {"F32": (0, 1, 4), "Q4_0": (2, 32, 18), "Q8_0": (8, 32, 34), "MXFP4": (39, 32, 17)}    # number, values, bytes
ALIGNMENT = 32


def gpt_oss(shape: Shape, layers: int) -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...]]]]:
    """Metadata, and type and sizes of each tensor, the row's first."""
    hidden, inner, heads, kv = shape.hidden, shape.inner, bench_gpt_oss.HEADS, bench_gpt_oss.KV_HEADS
    dim, experts = bench_gpt_oss.HEAD, shape.experts
    facts = {"context_length": 131072, "feed_forward_length": inner, "attention.head_count": heads,
             "attention.head_count_kv": kv, "attention.key_length": dim, "attention.value_length": dim,
             "attention.layer_norm_rms_epsilon": 1e-5, "attention.sliding_window": 128, "rope.freq_base": 150000.0,
             "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4096}
    layer = {"attn_norm.weight": ("F32", (hidden,)), "post_attention_norm.weight": ("F32", (hidden,)),
             "attn_sinks.weight": ("F32", (heads,)), "ffn_gate_inp.weight": ("F32", (hidden, experts)),
             "ffn_gate_inp.bias": ("F32", (experts,))}
    for name, n, k in (("attn_q", heads * dim, hidden), ("attn_k", kv * dim, hidden), ("attn_v", kv * dim, hidden),
                       ("attn_output", hidden, heads * dim)):
        layer |= {f"{name}.weight": ("Q8_0", (k, n)), f"{name}.bias": ("F32", (n,))}
    for name, n, k in (("ffn_gate_exps", inner, hidden), ("ffn_up_exps", inner, hidden),
                       ("ffn_down_exps", hidden, inner)):
        layer |= {f"{name}.weight": ("MXFP4", (k, n, experts)), f"{name}.bias": ("F32", (n, experts))}
    return with_layers("gpt-oss", shape, layers, bench_gpt_oss.VOCAB, facts, layer)


def qwen3_moe(shape: Shape, layers: int) -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...]]]]:
    """Metadata, and type and sizes of each tensor, the row's first."""
    hidden, inner, heads, kv, dim, experts = shape.hidden, shape.inner, 32, 4, 128, shape.experts
    facts = {"context_length": 40960, "feed_forward_length": 6144, "attention.head_count": heads,
             "attention.head_count_kv": kv, "attention.key_length": dim, "attention.value_length": dim,
             "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6}
    layer = {"attn_norm.weight": ("F32", (hidden,)), "ffn_norm.weight": ("F32", (hidden,)),
             "attn_q_norm.weight": ("F32", (dim,)), "attn_k_norm.weight": ("F32", (dim,)),
             "ffn_gate_inp.weight": ("F32", (hidden, experts))}
    for name, sizes in {"attn_q": (hidden, heads * dim), "attn_k": (hidden, kv * dim), "attn_v": (hidden, kv * dim),
                        "attn_output": (heads * dim, hidden), "ffn_gate_exps": (hidden, inner, experts),
                        "ffn_up_exps": (hidden, inner, experts), "ffn_down_exps": (inner, hidden, experts)}.items():
        layer[f"{name}.weight"] = "Q4_0", sizes
    return with_layers("qwen3moe", shape, layers, 151936, facts, layer)


def with_layers(architecture: str, shape: Shape, layers: int, vocab: int, facts: dict[str, Any],
                layer: dict[str, tuple[str, tuple[int, ...]]]
                ) -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...]]]]:
    """A model of these layers, without a tokenizer: programs that measure make up tokens."""
    facts |= {"vocab_size": vocab, "block_count": layers, "embedding_length": shape.hidden,
              "expert_count": shape.experts, "expert_used_count": shape.top, "expert_feed_forward_length": shape.inner}
    metadata = {"general.architecture": architecture, "tokenizer.ggml.model": "none"}
    metadata |= {f"{architecture}.{name}": value for name, value in facts.items()}
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {"token_embd.weight": ("Q8_0", (shape.hidden, vocab)),
                                                       "output.weight": ("Q8_0", (shape.hidden, vocab)),
                                                       "output_norm.weight": ("F32", (shape.hidden,))}
    for i in range(layers):
        tensors |= {f"blk.{i}.{name}": tensor for name, tensor in layer.items()}
    return metadata, tensors


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[str, tuple[int, ...]]]) -> int:
    """Writes random tensors of these types and sizes; returns their bytes. ggml/include/gguf.h has the format."""
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def typed(value: Any) -> bytes:
        if isinstance(value, str):
            return struct.pack("<I", 8) + text(value)
        return struct.pack("<II", 4, value) if isinstance(value, int) else struct.pack("<If", 6, value)

    rng, count = np.random.default_rng(0), 1 << 20
    blocks = {"F32": (rng.normal(size=count) * 0.02).astype(np.float32).tobytes(),
              "norm": np.ones(1 << 16, np.float32).tobytes()}
    for kind, least, most in (("Q4_0", 0.003, 0.006), ("Q8_0", 0.0002, 0.0004)):
        values = rng.integers(0, 256, (count, TYPES[kind][2]), np.uint8)
        values[:, :2] = rng.uniform(least, most, (count, 1)).astype(np.float16).view(np.uint8)
        blocks[kind] = values.tobytes()
    values = rng.integers(0, 256, (count, TYPES["MXFP4"][2]), np.uint8)
    values[:, 0] = rng.integers(117, 121, count)
    blocks["MXFP4"] = values.tobytes()

    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(text(key) + typed(value) for key, value in metadata.items())
    at, sizes = 0, {}
    for name, (kind, shape) in tensors.items():
        number, length, size = TYPES[kind]
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, number, at)
        sizes[name] = math.prod(shape) // length * size
        at += -(-sizes[name] // ALIGNMENT) * ALIGNMENT
    with path.open("wb") as file:
        file.write(head + bytes(-len(head) % ALIGNMENT))
        for name, left in sizes.items():
            data = memoryview(blocks["norm" if "norm" in name else tensors[name][0]])
            padding = -left % ALIGNMENT
            while left:
                left -= file.write(data[:left])
            file.write(bytes(padding))
    return at


def answers(command: list[str]) -> list[dict[str, Any]]:
    """The lines of a program's output that are JSON. Ends this one with the program's last words if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", choices=SHAPES, default="gpt-oss-120b")
    parser.add_argument("--programs", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--gpu-layers", type=int, default=99, help="0: all on the CPU")
    parser.add_argument("--threads", type=int, default=14)
    parser.add_argument("--requests", default="1,8")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--prompt", type=int, default=2048, help="0: no prompts")
    parser.add_argument("--micro-batches", default="512,2048")
    parser.add_argument("--modes", default="none", help="any of auto, none, mmap, mlock, dio and these with -repacked")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", default="/dev/shm")
    given = parser.parse_args()
    shape = SHAPES[given.shape]
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        began, path = time.perf_counter(), Path(folder) / "model.gguf"
        metadata, tensors = (gpt_oss if given.shape.startswith("gpt-oss") else qwen3_moe)(shape, given.layers)
        size = write_gguf(path, metadata, tensors)
        print(f"llama.cpp, {given.shape}, {given.layers} of {shape.layers} layers: {size / 1e9:.1f} GB, written in "
              f"{time.perf_counter() - began:.0f} s; {given.threads} threads", flush=True)
        requests = [int(n) for n in given.requests.split(",") if n]
        for mode in given.modes.split(","):
            load, repacked = mode.removesuffix("-repacked"), mode.endswith("-repacked")
            common = ["-m", str(path), "-ngl", str(given.gpu_layers), "-ncmoe", str(given.layers), "-t",
                      str(given.threads), "-fa", "on", "-lm", load]
            room = max(requests, default=0) * (32 + given.tokens + 32)
            command = [str(given.programs / "llama-batched-bench"), *common, "-npp", "32", "-ntg", str(given.tokens),
                       "-npl", given.requests, "-c", str(room), "--output-format", "jsonl",
                       *["--no-host"] * repacked]
            found: dict[int, list[float]] = {}
            for _ in range(given.repeats if requests else 0):
                for answer in answers(command):
                    found.setdefault(answer["pl"], []).append(answer["t_tg"] / given.tokens)
            for number, steps in found.items():
                step = sorted(steps)[len(steps) // 2]
                print(f"{mode}: {number} requests: step {1e3 * step:.2f} ms ({1e3 * min(steps):.2f} to "
                      f"{1e3 * max(steps):.2f}), {number / step:.0f} tokens/s", flush=True)
            if not given.prompt:
                continue
            for answer in answers([str(given.programs / "llama-bench"), *common, "-p", str(given.prompt), "-n", "0",
                                   "-b", str(given.prompt), "-ub", given.micro_batches, "-r", str(given.repeats), "-o",
                                   "jsonl", *["--no-host", "1"] * repacked]):
                print(f"{mode}: prompt {given.prompt}, {answer['n_ubatch']} rows at a time: "
                      f"{1e3 * given.prompt / answer['avg_ts']:.0f} ms, {answer['avg_ts']:.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
