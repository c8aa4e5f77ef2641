"""Decode and prefill speed of this project on a checkpoint directory, measured as the peers' scripts do.

    bench_allspark.py CHECKPOINT [--ranks N] [--threads N] [--batch 1 4 8] [--weight-dtype auto|int4:64] [--json]

--ranks 0 (default): Engine in this process with --threads threads. --ranks N: a ClientEngine and a group of N ranks.
Prompts of 128 random tokens, 64 tokens out, greedy; prefill is the time to the first token of a prompt of 1,024.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import time

import numpy as np

from allspark_client import AbstractEngine, AsModelConfig, ClientEngine


def generate(engine: AbstractEngine, rng: np.random.Generator, batch: int, prompt: int, output: int) -> tuple[float, float]:
    """(seconds to the last first token, decode tokens/s after that) of `batch` requests at once."""
    config = {"top_k": 1, "max_length": prompt + output, "early_stopping": False}
    begin = time.perf_counter()
    requests = [engine.start_request("m", {"input_ids": rng.integers(10, 3000, prompt)}, config)[1:] for _ in range(batch)]
    counted = 0
    for _, queue in requests:
        counted -= len(queue.Get().ids_from_generate)
    first = time.perf_counter()
    for handle, queue in requests:
        for elements in queue:
            pass
        counted += queue.GeneratedLength()
    seconds = time.perf_counter() - first
    for handle, _ in requests:
        engine.release_request("m", handle)
    return first - begin, counted / seconds if output > 1 else 0.0


def measure(engine: AbstractEngine, checkpoint: str, threads: int, weight_dtype: str, batches: list[int], repeats: int) -> dict[str, float]:
    kind, _, group = weight_dtype.partition(":")
    engine.install_model(AsModelConfig(model_name="m", model_path=checkpoint, engine_max_length=2048, engine_max_batch=max(batches),
                                       num_threads=threads, weight_dtype=kind, weight_group_size=int(group or 0),
                                       enable_prefix_cache=False))
    engine.start_model("m")
    rng = np.random.default_rng(0)
    generate(engine, rng, 1, 16, 4)
    best: dict[str, float] = {}
    for _ in range(repeats):
        for batch in batches:
            rate = generate(engine, rng, batch, 128, 64)[1]
            best[f"decode_b{batch}"] = max(best.get(f"decode_b{batch}", 0), rate)
        best["prefill_1024"] = max(best.get("prefill_1024", 0), 1024 / generate(engine, rng, 1, 1024, 1)[0])
    engine.release_model("m")
    return {k: round(v, 2) for k, v in best.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="of each rank; 0: what it is given")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--weight-dtype", default="auto", help="with a group size after a colon, such as int4:64")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        if options.ranks:
            from allspark_launch.serving import background_group

            group = stack.enter_context(background_group(["--ranks", str(options.ranks)], timeout=60.0))
            engine: AbstractEngine = stack.enter_context(ClientEngine(group.addresses[0]))
            name = f"allspark {options.ranks} ranks"
        else:
            from allspark_server import Engine

            engine = stack.enter_context(Engine())
            name = "allspark one process"
        result = measure(engine, options.checkpoint, options.threads, options.weight_dtype, options.batch, options.repeats)
    print(f"RESULT {name} {options.weight_dtype} {json.dumps(result)}", flush=True)


if __name__ == "__main__":
    main()
