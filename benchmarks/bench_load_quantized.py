"""Measures loading a quantized checkpoint, relative to copying its file into new pages with as many threads.

    bench_load_quantized.py [--schemes gptq-4,awq,...] [--threads N] [--rounds N] [--layers N] [--folder /dev/shm]
                            [--weight-dtype auto]

Layers of hidden size 2,048 and inner size 8,192 with random weights, packed by tests/support/quantized_checkpoints.py
and tests/support/gguf_files.py; all layers have the same weights. The scheme fp8-experts has Qwen3.6-35B-A3B's layers
with 256 experts in FP8 blocks (qwen36.py). Two measurements run in turn, each of which
maps the file and allocates its memory itself: memcpy of the file into huge pages, and loading the checkpoint. The file
is in the page cache. Seconds are the best of the rounds, ratios the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from bench_load import LIBC, PIECE, timed
from qwen36 import Shape, write_checkpoint

from allspark_client.config import AsModelConfig
from allspark_server import _native
from allspark_server.weights.checkpoint import open_model
from allspark_server.weights.formats import wanted_formats
from allspark_server.weights.loader import Loader, unquantized_type
from support.gemma4 import VOCAB
from support.gguf_files import gguf_name, random_blocks, tokens_of, write_gguf
from support.quantized_checkpoints import SCHEMES, awq, compressed, float4, gptq, nf4, write_safetensors

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 2048, 8192, 16, 4, 128
SHAPES = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
          "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
          "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
GROUPS_OF_128 = {"gptq-4": gptq(4, 128), "gptq-4-symmetric": gptq(4, 128, symmetric=True),
                 "gptq-4-order": gptq(4, 128, order=True), "gptq-8": gptq(8, 128), "awq": awq(128),
                 "ct-packed-4": compressed("pack-quantized", 4, "group", 128), "nf4": nf4(64, False),
                 "nf4-nested": nf4(64, True), "mxfp4": float4("mxfp4-pack-quantized", 32)}
BLOCKS = ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
DEFAULT = "gptq-4,gptq-4-symmetric,gptq-8,awq,ct-packed-4,ct-w8a8,fp8,mxfp4,nf4,nf4-nested,llm-int8," + ",".join(BLOCKS)


def write_model(folder: Path, scheme: str, layers: int) -> Path:
    """Writes the model as one file; returns its path."""
    if scheme == "fp8-experts":
        write_checkpoint(folder, Shape(layers, vocab=8192, interval=2), fp8=True)
        return folder
    rng = np.random.default_rng(0)
    ends = {"model.embed_tokens.weight": rng.normal(size=(VOCAB, HIDDEN)).astype(np.float32),
            "lm_head.weight": rng.normal(size=(VOCAB, HIDDEN)).astype(np.float32),
            "model.norm.weight": np.ones(HIDDEN, np.float32)}
    norms = {name: np.ones(HIDDEN, np.float32) for name in NORMS}
    if scheme in BLOCKS:
        one = {name + ".weight": (scheme, random_blocks(scheme, n, k, rng)) for name, (n, k) in SHAPES.items()}
        every = {name: ("F32", values) for name, values in ends.items()}
        for layer in range(layers):
            every |= {f"model.layers.{layer}.{name}": value
                      for name, value in {**one, **{n: ("F32", v) for n, v in norms.items()}}.items()}
        own = {"block_count": layers, "context_length": 2048, "embedding_length": HIDDEN, "feed_forward_length": INNER,
               "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD_DIM,
               "attention.layer_norm_rms_epsilon": 1e-6, "attention.value_length": HEAD_DIM, "rope.freq_base": 1e6,
               "rope.dimension_count": HEAD_DIM}
        metadata = {"general.architecture": "qwen2", "general.name": "random", **tokens_of(),
                    **{f"qwen2.{key}": value for key, value in own.items()}}
        biases = {f"blk.{layer}.attn_{x}.bias": ("F32", np.zeros(n, np.float32))
                  for layer in range(layers) for x, n in (("q", HIDDEN), ("k", 512), ("v", 512))}
        return write_gguf(folder / "model.gguf", metadata, {gguf_name(n): v for n, v in every.items()} | biases)
    make, quantization = GROUPS_OF_128.get(scheme) or SCHEMES[scheme][1]
    one = {name + suffix: value for name, (n, k) in SHAPES.items() for suffix, value in make(n, k, rng, 0)[0].items()}
    for name, n in (("q", HIDDEN), ("k", 512), ("v", 512)):
        one[f"self_attn.{name}_proj.bias"] = np.zeros(n, np.float32)
    tensors = dict(ends)
    for layer in range(layers):
        tensors |= {f"model.layers.{layer}.{name}": value for name, value in {**one, **norms}.items()}
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": HIDDEN, "vocab_size": VOCAB,
              "intermediate_size": INNER, "num_hidden_layers": layers, "num_attention_heads": HEADS,
              "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048,
              "rope_theta": 1e6, "tie_word_embeddings": False, "eos_token_id": 2, "torch_dtype": "float32",
              "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def copy(path: Path, threads: int) -> None:
    with open(path, "rb") as file, ThreadPoolExecutor(threads) as pool:
        source = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        target = mmap.mmap(-1, len(source), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # of shared memory small pages
        target.madvise(mmap.MADV_HUGEPAGE)
        begin, into = (np.frombuffer(memory, np.uint8).ctypes.data for memory in (source, target))

        def work(index: int) -> None:
            first, last = (len(source) * i // threads for i in (index, index + 1))
            for at in range(first, last, PIECE):
                LIBC.memcpy(into + at, begin + at, min(PIECE, last - at))

        list(pool.map(work, range(threads)))


def load(path: Path, threads: int, weight_dtype: str) -> None:
    """Loads the weights as a rank does."""
    model = open_model(str(path))
    formats = wanted_formats(model.graph, AsModelConfig(weight_dtype=weight_dtype),
                             unquantized_type(model.graph, model.source))
    executor = _native.Executor(num_threads=threads)
    Loader(model.graph, model.source, executor, 0, 1, formats).load()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", default=DEFAULT, help="default %(default)s")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="where files are written; a temporary one by default")
    parser.add_argument("--weight-dtype", default="auto", help="auto, or bfloat16: FP8 is dequantized")
    options = parser.parse_args(arguments)
    print(f"{'scheme':<18}{'MB':>7}{'copy: s, CPU':>16}{'load: s, CPU':>16}{'copy / load':>13}{'of CPU':>8}")
    for scheme in options.schemes.split(","):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            path = write_model(Path(folder), scheme, options.layers)
            file = path if path.is_file() else path / "model.safetensors"
            dtype = options.weight_dtype
            load(path, options.threads, dtype)
            times = np.array([[timed(lambda: copy(file, options.threads)),
                               timed(lambda: load(path, options.threads, dtype))] for _ in range(options.rounds)])
            ratio = np.median(times[:, 0] / times[:, 1], axis=0)
            (copied, copied_cpu), (took, took_cpu) = times.min(axis=0)
            print(f"{scheme:<18}{file.stat().st_size / 1e6:>7,.0f}{f'{copied:.3f}, {copied_cpu:.3f}':>16}"
                  f"{f'{took:.3f}, {took_cpu:.3f}':>16}{ratio[0]:>13.2f}{ratio[1]:>8.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
