"""Measures how long a request waits for a model on demand that is not loaded, beside copying the model's file.

    bench_switch.py CHECKPOINT_OR_ASGRAPH [--threads N] [--rounds N]

Two names for one checkpoint stand for two models. In turn, each is unloaded and a request of 32 tokens names the other.
The file is in the page cache. Ceiling: the threads copy the file's bytes into fresh memory (memcpy).
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from bench_load import read_and_write

from allspark_client import AsModelConfig
from allspark_server.engine.engine import Engine

PROMPT = list(range(10, 42))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    a = parser.parse_args()
    if a.model.suffix == ".asgraph":
        files, more = [a.model.with_suffix(".asparam")], {"weights_path": str(a.model.with_suffix(".asparam"))}
    else:
        files, more = sorted(a.model.glob("*.safetensors")), {}
    engine, names = Engine(), ("first", "second")
    for name in names:
        engine.install_model(AsModelConfig(name, str(a.model), on_demand=True, num_threads=a.threads,
                                           cache_memory=64 << 20, engine_max_length=512, **more))
        engine.start_model(name)
    waits, copies = [], []
    for round_ in range(2 * a.rounds):
        name, other = names[round_ % 2], names[1 - round_ % 2]
        began = time.perf_counter()
        for file in files:
            read_and_write(file, file.stat().st_size, a.threads)
        copies.append(time.perf_counter() - began)
        began = time.perf_counter()
        queue = engine.start_request(name, {"input_ids": PROMPT}, {"max_new_tokens": 1, "eos_token_id": -1})[2]
        queue.Get()
        waits.append(time.perf_counter() - began)
        if other in {state.name for state in engine.list_models() if state.running}:
            engine.unload_model(other)
    engine.close()
    size = sum(file.stat().st_size for file in files)
    wait, copy = statistics.median(waits), statistics.median(copies)
    print(f"{size / 1e9:.2f} GB: first token after {wait:.3f} s, the copy takes {copy:.3f} s: {wait / copy:.2f} of it")


if __name__ == "__main__":
    main()
