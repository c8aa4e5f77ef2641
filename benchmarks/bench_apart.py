"""Measures streams beside long prompts, computed in their group or by another one (docs/guides/prefill.md).

    bench_apart.py [7b] [--layers N] [--gpus 0 1 | --gpus -1 -1] [--streams 8] [--prompt 16000] [--seconds 10]
                   [--every 1.5] [--folder /dev/shm]

Two groups of one rank serve a model of a real shape with random weights: on the first GPU one computes prompts, on the
second one the other generates (-1: a CPU). For `--seconds` each: streams alone; beside prompts of another client,
computed by the group itself; beside the same prompts with the first group's help. Prints the gaps between a stream's
tokens, and the seconds to the first token of a long prompt.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from bench_served import SHAPES, write_checkpoint

from allspark_client import ClientEngine
from allspark_launch.group.background import background_group

LENGTH, OUTPUT = 128, 4000      # of a stream's prompt and answer


def tokens_of(engine: ClientEngine, prompt: list[int], count: int, until: float) -> list[float]:
    """The times at which the answer's tokens came."""
    _, handle, queue = engine.start_request("m", {"input_ids": prompt}, {
        "max_new_tokens": count, "eos_token_id": -1, "do_sample": False})
    came: list[float] = []
    for part in queue:
        came += [time.perf_counter()] * len(part.ids_from_generate)
        if time.perf_counter() > until:
            engine.stop_request("m", handle)
            break
    engine.release_request("m", handle)
    return came


def measure(address: str, options: argparse.Namespace, prompts: bool) -> str:
    """Streams for a while, with long prompts or without; a line with what they met."""
    vocab, until = int(SHAPES[options.shape]["vocab_size"]), time.perf_counter() + options.seconds
    streams: list[list[float]] = []
    firsts: list[float] = []
    with ClientEngine(address) as engine:
        def stream(seed: int) -> None:
            ids = np.random.default_rng(seed).integers(300, vocab, LENGTH).tolist()
            streams.append(tokens_of(engine, ids, OUTPUT, until))

        def ask() -> None:
            rng = np.random.default_rng(time.time_ns())
            time.sleep(min(1.0, options.seconds / 4))
            while (began := time.perf_counter()) < until - options.every:
                came = tokens_of(engine, rng.integers(300, vocab, options.prompt).tolist(), 1, float("inf"))
                firsts.append(came[0] - began)
                time.sleep(max(0.0, began + options.every - time.perf_counter()))
        threads = [threading.Thread(target=stream, args=(n,)) for n in range(options.streams)]
        threads += [threading.Thread(target=ask)] if prompts else []
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    gaps = np.concatenate([np.diff(came) for came in streams]) * 1e3
    p50, p99 = np.percentile(gaps, [50, 99])
    line = f"gaps p50 {p50:.2f} p99 {p99:.2f} longest {gaps.max():.1f} ms of {len(gaps)}"
    if firsts:
        line += f"; {len(firsts)} prompts, first tokens p50 {np.median(firsts):.2f} s"
    return line


def main() -> None:
    """Reads the command line, serves, and prints a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", choices=SHAPES, default="7b")
    parser.add_argument("--layers", type=int, default=0, help="default: the model's")
    parser.add_argument("--gpus", type=int, nargs=2, default=[0, 1])
    parser.add_argument("--weight-dtype", default="bfloat16")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=16000)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--every", type=float, default=1.5, help="seconds from a long prompt to the next")
    parser.add_argument("--host-memory", type=int, default=8 << 30, help="bytes of each host cache")
    parser.add_argument("--folder", default="/dev/shm")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        model = Path(folder) / "model"
        model.mkdir()
        write_checkpoint(model, options.shape, options.layers)
        files = []
        for number, gpu in enumerate(options.gpus):
            host = Path(folder) / f"host{number}"
            host.mkdir()
            fields = {"model_name": "m", "model_path": str(model), "weight_dtype": options.weight_dtype,
                      "engine_max_batch": options.streams + 2, "enable_prefix_cache": True,
                      "engine_max_length": options.prompt + OUTPUT + LENGTH + 64, "host_cache_dir": str(host),
                      "host_cache_memory": options.host_memory}
            files.append(Path(folder) / f"group{number}.json")
            files[-1].write_text(json.dumps({"models": [fields]} | ({"gpus": [gpu]} if gpu >= 0 else {})))
        with (background_group(["--config", str(files[0])], verbose=True) as first,
              background_group(["--config", str(files[1]), "--prefill-from", first.addresses[0]],
                               verbose=True) as second):
            for name, address, prompts in (("streams alone", second.addresses[0], False),
                                           ("prompts in their group", first.addresses[0], True),
                                           ("prompts in another group", second.addresses[0], True),
                                           ("streams alone again", second.addresses[0], False)):
                print(f"{name}: {measure(address, options, prompts)}", flush=True)


if __name__ == "__main__":
    main()
