"""Compares layers of experts with llama.cpp: tokens/s of the same shape with random weights, in turn, and their ratios.

    bench_experts.py LLAMA_BATCHED_BENCH [--threads 2] [--layers 2] [--formats bfloat16:0=BF16 w8a8:0=Q8_0 w4a8:32=Q4_0]
                     [--rounds 3]

The layers have Qwen3-30B-A3B's shape (128 experts of 768 features, 8 per token) and a vocabulary of 8,192, so that
experts take most of the time. This project's native executor runs as in bench_shape.py, llama.cpp as
llama-batched-bench on a GGUF file that is written here. Decode is at context 128, prefill of 1,024 tokens. To compare
instruction sets, set $ALLSPARK_ISA and use a llama.cpp built for the same one. Figures are the best of the rounds,
ratios the median of the rounds' ratios. For decode it also prints the fraction of the read bandwidth that reading a
step's experts takes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from bench_shape import SHAPES, Model, Shape

from allspark_server import _native
from support.gguf_files import random_blocks, tokens_of, write_gguf

CONTEXT, PROMPT, STEPS = 128, 1024, 16


def write_model(path: Path, shape: Shape, kind: str) -> Path:
    """Writes a GGUF file whose experts have the same random values, each in memory of its own."""
    rng = np.random.default_rng(0)

    def matrix(n: int, k: int, experts: int = 0) -> tuple[str, np.ndarray]:
        if kind == "BF16":
            one = (rng.normal(size=(n, k)) * k**-0.5).astype(np.float32).view(np.uint32) >> 16
            one = one.astype(np.uint16)
        else:
            one = random_blocks(kind, n, k, rng)
        return kind, np.broadcast_to(one, (experts, *one.shape)) if experts else one

    def ones(n: int) -> tuple[str, np.ndarray]:
        return "F32", np.ones(n, np.float32)

    width, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors = {"token_embd.weight": matrix(shape.vocab, shape.hidden), "output_norm.weight": ones(shape.hidden),
               "output.weight": matrix(shape.vocab, shape.hidden)}
    for layer in range(shape.layers):
        router = rng.normal(size=(shape.experts, shape.hidden)).astype(np.float32)
        own = {"attn_q": matrix(width, shape.hidden), "attn_k": matrix(kv, shape.hidden),
               "attn_v": matrix(kv, shape.hidden), "attn_output": matrix(shape.hidden, width),
               "attn_norm": ones(shape.hidden), "attn_q_norm": ones(shape.head_dim),
               "attn_k_norm": ones(shape.head_dim), "ffn_norm": ones(shape.hidden), "ffn_gate_inp": ("F32", router),
               "ffn_gate_exps": matrix(shape.inner, shape.hidden, shape.experts),
               "ffn_up_exps": matrix(shape.inner, shape.hidden, shape.experts),
               "ffn_down_exps": matrix(shape.hidden, shape.inner, shape.experts)}
        tensors |= {f"blk.{layer}.{name}.weight": tensor for name, tensor in own.items()}
    own = {"block_count": shape.layers, "context_length": 4096, "embedding_length": shape.hidden,
           "feed_forward_length": shape.inner, "attention.head_count": shape.heads,
           "attention.head_count_kv": shape.kv_heads, "attention.layer_norm_rms_epsilon": 1e-6,
           "attention.key_length": shape.head_dim, "attention.value_length": shape.head_dim, "rope.freq_base": 1e6,
           "expert_count": shape.experts, "expert_used_count": shape.top, "expert_feed_forward_length": shape.inner}
    metadata = {"general.architecture": "qwen3moe", "general.name": "random", **tokens_of(shape.vocab),
                **{f"qwen3moe.{key}": value for key, value in own.items()}}
    return write_gguf(path, metadata, tensors)


def llama(program: str, model: Path, threads: int, batches: list[int]) -> dict[str, float]:
    """llama.cpp's tokens/s by what is measured."""
    found = {}
    for prompt, steps, counts in ((CONTEXT, STEPS, batches), (PROMPT, 1, [1])):
        length = max(counts) * (prompt + steps)
        done = subprocess.run(
            [program, "-m", str(model), "-t", str(threads), "-tb", str(threads), "-c", str(-(-length // 256) * 256),
             "-b", "2048", "-ub", "512", "-npp", str(prompt), "-ntg", str(steps), "-npl", ",".join(map(str, counts)),
             "-fa", "on", "--output-format", "jsonl"], capture_output=True, text=True, timeout=600)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if len(lines) != len(counts):
            raise SystemExit(f"{program} ended with {done.returncode}: {done.stderr[-800:]}")
        if prompt == PROMPT:
            found["prefill"] = lines[0]["speed_pp"]
        else:
            found |= {f"batch {line['pl']}": line["speed_tg"] for line in lines}
    return found


def ours(model: Model, batches: list[int]) -> dict[str, float]:
    found = {f"batch {batch}": batch / model.decode(batch, STEPS) for batch in batches}
    return found | {"prefill": PROMPT / model.prefill(PROMPT)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="llama-batched-bench")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=SHAPES["30b-a3b"].layers)
    parser.add_argument("--formats", nargs="+", default=["bfloat16:0=BF16", "w8a8:0=Q8_0", "w4a8:32=Q4_0"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    shape = replace(SHAPES["30b-a3b"], vocab=8192, layers=options.layers)
    bandwidth, _ = _native.measure_roofline(list(range(options.threads)), options.threads, 5, 1024)
    print(f"{_native.isa()}, {options.threads} threads, {shape.layers} layers, read {bandwidth / 1e9:.1f} GB/s; "
          "tokens/s here, there, median ratio, of the bandwidth here", flush=True)
    for text in options.formats:
        form, kind = text.split("=")
        dtype, group = form.split(":")
        with tempfile.TemporaryDirectory() as folder:
            path = write_model(Path(folder) / "model.gguf", shape, kind)
            model = Model(shape, options.threads, dtype, int(group), PROMPT, max(options.batches), CONTEXT, "bfloat16")
            ours(model, options.batches)  # llama-batched-bench warms itself up
            rounds = [(ours(model, options.batches), llama(options.program, path, options.threads, options.batches))
                      for _ in range(options.rounds)]
        for what in rounds[0][0]:
            ratio = float(np.median([here[what] / there[what] for here, there in rounds]))
            best = [max(pair[i][what] for pair in rounds) for i in (0, 1)]
            batch = 0 if what == "prefill" else int(what.split()[1])
            part = f"{model.bytes(batch) * best[0] / batch / bandwidth:>7.2f}" if batch else ""
            print(f"{form:>12} {kind:<5}{what:<10}{best[0]:>9.1f}{best[1]:>9.1f}{ratio:>7.2f}{part}", flush=True)
        del model  # frees its memory before the next one takes memory


if __name__ == "__main__":
    main()
