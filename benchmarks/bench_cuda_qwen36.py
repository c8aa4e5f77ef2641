"""Measures Qwen3.6-35B-A3B's shape on a GPU, in bfloat16 with random weights, through the engine in one process.

    bench_cuda_qwen36.py FOLDER [--layers 20] [--batch 1,8,32] [--prompts 8x1024,1x32768] [--compute-unit CUDA:0]
                         [--step-tokens 8192] [--profile] [--kernels 14]

Decode: milliseconds of a step, and the part of the roofline of `allspark bench static`: weights of the experts that its
rows choose (each row independently), all other weights, states, keys and values. Prompts: tokens/s until all of them
have their first token. The vocabulary shrinks with the layers, so the whole model's 40 layers take 40/layers of the
times.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import qwen36

from allspark_client.config import AsModelConfig
from allspark_launch.bench.roofline import Machine, Workload
from allspark_server import Engine, _cuda

TOKENS, SKIPPED, LAYERS = 300, 4, 40
PROMPT = 128    # tokens before those that are decoded
TRACED = 100    # tokens whose kernels are recorded
MODEL = "m"


def asked(engine: Engine, count: int, length: int, tokens: int, rng: np.random.Generator, vocab: int) -> list[float]:
    """Asks for so many tokens after each of so many prompts. Seconds from the beginning at which the first request's
    tokens came, and at last those until all requests had ended.
    """
    prompts = rng.integers(0, vocab - 1, (count, length)).tolist()
    config = {"max_new_tokens": tokens, "early_stopping": False, "do_sample": False, "eos_token_id": -1}
    began = time.perf_counter()
    handles = [engine.start_request(MODEL, {"input_ids": ids}, config)[1:] for ids in prompts]
    found: list[float] = []
    for number, (handle, queue) in enumerate(handles):
        for part in queue:
            if not number:
                found += [time.perf_counter() - began] * len(part.ids_from_generate)
        engine.release_request(MODEL, handle)
    return [*found, time.perf_counter() - began]


def main() -> None:
    """Reads the command line and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the checkpoint, such as /dev/shm (3.5 GB for 2 layers)")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--prompts", default="8x1024,1x32768")
    parser.add_argument("--compute-unit", default="CUDA:0")
    parser.add_argument("--step-tokens", type=int, default=0, help="max_step_tokens (default: the engine's choice)")
    parser.add_argument("--profile", action="store_true", help="print the ops' times")
    parser.add_argument("--kernels", type=int, default=0, help="print so many kernels of steps and prompts, by time")
    options = parser.parse_args()
    if options.kernels:
        sys.path.insert(0, str(Path(__file__).parent / "cuda"))
        from step_kernels import kernels_of, show_kernels
    shape, rng = qwen36.Shape(options.layers), np.random.default_rng(3)
    batches = [int(n) for n in options.batch.split(",") if n]
    prompts = [tuple(map(int, each.split("x"))) for each in options.prompts.split(",") if each]
    bandwidth, rate = _cuda.measure_roofline(0)
    began = time.perf_counter()
    written = options.folder / "model.safetensors"
    size = written.stat().st_size if written.exists() else qwen36.write_checkpoint(options.folder, shape)
    print(f"{options.layers} of {LAYERS} layers: {size / 1e9:.1f} GB, written in {time.perf_counter() - began:.0f} s; "
          f"the GPU reads {bandwidth / 1e12:.2f} TB/s, multiplies at {rate / 1e12:.0f} TFLOP/s", flush=True)
    with Engine() as engine:
        began = time.perf_counter()
        engine.install_model(AsModelConfig(
            MODEL, str(options.folder), weight_dtype="bfloat16", compute_unit=options.compute_unit,
            engine_max_batch=max(batches + [count for count, _ in prompts]), cache_memory=6 << 30,
            engine_max_length=max([PROMPT + TOKENS] + [length for _, length in prompts]) + 64,
            enable_prefix_cache=False, max_step_tokens=options.step_tokens))
        engine.start_model(MODEL)
        print(f"loaded in {time.perf_counter() - began:.1f} s", flush=True)
        workload, weight_bytes = Workload.of(options.folder), engine.get_model_info(MODEL).weight_bytes
        for rows in batches:
            steps = []
            for _ in range(3):
                came = asked(engine, rows, PROMPT, TOKENS, rng, shape.tokens)
                steps.append((came[TOKENS - 1] - came[SKIPPED]) / (TOKENS - 1 - SKIPPED))
            step = statistics.median(steps)
            bound = workload.decode(Machine(bandwidth, rate), rows, PROMPT + TOKENS / 2, weight_bytes,
                                    2.0 * workload.cache_values)
            print(f"decode x {rows}: {1e3 * step:.3f} ms, {rows / step / bound.tokens_per_second:.2f} of the roofline "
                  f"({bound.by}); all layers {1e3 * step * LAYERS / options.layers:.2f} ms, "
                  f"{rows / step * options.layers / LAYERS:,.0f} tokens/s", flush=True)
            if options.kernels:
                kernels = kernels_of(lambda rows=rows: asked(engine, rows, PROMPT, TRACED, rng, shape.tokens), 1)
                show_kernels(kernels, TRACED, f"x {rows}, {TRACED} tokens and their prompts", options.kernels)
        for count, length in prompts:
            seconds = min(asked(engine, count, length, 1, rng, shape.tokens)[-1] for _ in range(3))
            print(f"prompts {count} x {length}: {seconds:.3f} s, all layers "
                  f"{count * length / seconds * options.layers / LAYERS:,.0f} tokens/s", flush=True)
            if options.kernels:
                kernels = kernels_of(
                    lambda count=count, length=length: asked(engine, count, length, 1, rng, shape.tokens), 1)
                show_kernels(kernels, 1, f"{count} x {length} and the first tokens", options.kernels)
        if options.profile:
            print(engine.get_op_profiling_info(MODEL), flush=True)
        engine.release_model(MODEL)


if __name__ == "__main__":
    main()
