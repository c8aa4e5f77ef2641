"""Compares the all-reduce of two native libraries over the ranks of one host, for example before and after a change.

    bench_all_reduce.py OLD_LIBRARY NEW_LIBRARY [--ranks 2] [--rounds 9] [--seconds 1]

A LIBRARY is a _native*.so. The libraries take turns, the old one twice to show the noise. Processes sum messages of
each size through shared memory. A round's figure is the 10th percentile of the call times, which other work on the
machine moves least. The table shows the median over the rounds, and the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location

import numpy as np

#: floats: a row of a small model, 32 of a large one, a prompt's chunk
SIZES = (896, 4096, 32 * 4096, 512 * 4096)


def measure(library: str, ranks: int, seconds: float) -> dict[int, float]:
    """Microseconds of a sum of each size, on rank 0."""
    spec = spec_from_file_location("_native", library, loader=ExtensionFileLoader("_native", library))
    native = module_from_spec(spec)
    spec.loader.exec_module(native)
    step = -(-native.SharedMemory.bytes_needed(ranks) // 4096) * 4096
    memory = mmap.mmap(-1, step * ranks)
    base = np.frombuffer(memory, np.uint8).ctypes.data
    children, rank = [], 0
    for number in range(1, ranks):
        if not (child := os.fork()):
            rank = number
            break
        children.append(child)
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
    window = native.SharedMemory(rank, ranks, [base + r * step for r in range(ranks)], len(cpus) >= ranks, 60.0, 1.0)
    found = {}
    for size in SIZES:
        x = np.zeros(size, np.float32)
        calls = max(20, int(seconds / len(SIZES) / (2e-6 + 2e-9 * size)))       # as many on every rank
        times = np.empty(calls)
        for i in range(calls):
            began = time.perf_counter()
            window.all_reduce(x, 1)
            times[i] = time.perf_counter() - began
        found[size] = 1e6 * float(np.percentile(times, 10))
    if rank:
        os._exit(0)
    for child in children:
        os.waitpid(child, 0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new", nargs="?", default="")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    if not options.new:     # one measurement, of a process of its own
        print(json.dumps(list(measure(options.old, options.ranks, options.seconds).items())), flush=True)
        return
    libraries = {"old": options.old, "new": options.new, "again": options.old}
    rounds: list[dict[str, dict[int, float]]] = []
    for turn in range(options.rounds):
        found = {}
        for name in (names := list(libraries))[turn % 3:] + names[:turn % 3]:
            words = [sys.executable, __file__, libraries[name], "--ranks", options.ranks, "--seconds", options.seconds]
            done = subprocess.run(list(map(str, words)), check=True, capture_output=True, text=True, timeout=120)
            found[name] = dict(json.loads(done.stdout))
        rounds.append(found)
    print(f"{options.ranks} ranks of {len(os.sched_getaffinity(0))} CPUs\n"
          f"{'floats':>9} {'old us':>9} {'new us':>9} {'new/old':>8} {'old/old':>8}")
    for size in SIZES:
        old, new, again = ([found[name][size] for found in rounds] for name in libraries)
        print(f"{size:9} {statistics.median(old):9.2f} {statistics.median(new):9.2f} "
              f"{statistics.median(n / o for n, o in zip(new, old)):8.3f} "
              f"{statistics.median(a / o for a, o in zip(again, old)):8.3f}")


if __name__ == "__main__":
    main()
