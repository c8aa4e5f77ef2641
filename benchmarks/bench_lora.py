"""Measures the cost of LoRA adapters: 32 requests that use 8 adapters against the same requests without, in an Engine.

    bench_lora.py CHECKPOINT [--rank 16] [--weight-dtype bfloat16] [--rounds 7] [--threads 2]

Each round measures without, with and again without adapters. Its ratio is the speed with adapters over the mean speed
without. The loads are decode at short contexts, 8 prompts of 200 tokens, and a single stream.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from allspark_client import AsModelConfig
from allspark_server import Engine
from support.adapters import write_adapter

ADAPTERS, BATCH = 8, 32
#: tokens of a prompt, requests, new tokens
LOADS = {"decode": (16, BATCH, 24), "prefill": (200, 8, 1), "alone": (8, 1, 24)}


def seconds(engine: Engine, adapters: list[str], length: int, requests: int, tokens: int) -> float:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 1000, length).tolist() for _ in range(requests)]
    began, started = time.perf_counter(), []
    for i, prompt in enumerate(prompts):
        config = {"max_new_tokens": tokens, "early_stopping": False, "do_sample": False}
        if adapters:
            config["lora_name"] = adapters[i % len(adapters)]
        started.append(engine.start_request("m", {"input_ids": prompt}, config))
    for _, _, queue in started:
        for _ in queue:
            pass
    taken = time.perf_counter() - began
    for _, handle, _ in started:
        engine.release_request("m", handle)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--weight-dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Engine() as engine:
        paths = [Path(folder, f"a{i}") for i in range(ADAPTERS)]
        for path in paths:
            write_adapter(path, options.checkpoint, rank=options.rank, dtype="BF16", strength=0.02)
        engine.install_model(AsModelConfig(
            "m", options.checkpoint, weight_dtype=options.weight_dtype, lora_max_num=ADAPTERS, engine_max_batch=BATCH,
            engine_max_length=512, enable_prefix_cache=False, num_threads=options.threads, cache_memory=1 << 30))
        engine.start_model("m")
        for path in paths:
            engine.load_lora("m", str(path))
        names = [path.name for path in paths]
        for name, load in LOADS.items():
            seconds(engine, names, *load)
            ratios = []
            for _ in range(options.rounds):
                before, own, after = (seconds(engine, names * with_, *load) for with_ in (0, 1, 0))
                ratios.append((before + after) / 2 / own)
            print(f"{name}: {statistics.median(ratios):.3f} of the speed without ({min(ratios):.3f} to "
                  f"{max(ratios):.3f})", flush=True)


if __name__ == "__main__":
    main()
