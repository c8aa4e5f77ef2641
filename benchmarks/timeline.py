"""What GPUs do while a model is served: steps by kind, their kernels, idle time (`bench_served.py --timeline`).

The recorder is cuda/kernel_trace.cpp, which the driver loads into each process that uses a GPU.
"""

from __future__ import annotations

import os
import re
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

SECONDS = 0.5   # of a recording
WAIT = 15.0     # seconds for files that a process still writes
LINES = 14      # of a step
#: what kernels are for, by their names and parameters; the first that fits counts
PURPOSES = {"sums": r"\(as::cuda::RankSum", "sampling": r"SampleTask|RankSamples|Argmax",
            "attention": r"::attend|::store", "GEMMs": r"gemm|gemv|stream_k", "copies": r"^copy$", "other": ""}


class Kernel(NamedTuple):
    """A kernel or a copy; times are in nanoseconds."""

    begin: int
    end: int
    name: str


def enable(library: Path, folder: Path) -> None:
    """Makes processes that start from now on load the recorder, which writes to this folder."""
    os.environ["CUDA_INJECTION64_PATH"] = str(library.resolve(strict=True))
    os.environ["KERNEL_TRACE"] = str(folder)


def record_after(folder: Path, name: str, seconds: float) -> None:
    """Begins a recording of SECONDS in so many seconds."""
    timer = threading.Timer(seconds, lambda: (folder / "go").write_text(f"{name} {SECONDS}"))
    timer.daemon = True
    timer.start()


def kernels_of(path: Path) -> list[Kernel]:
    """All kernels of a trace, by their beginning."""
    rows = (line.split(" ", 2) for line in path.read_text().splitlines())
    return sorted(Kernel(int(begin), int(end), name) for begin, end, name in rows)


def short(name: str) -> str:
    """The name of a kernel without namespaces, parameters and what all names have."""
    name = re.sub(r"\(.*?\)::|as::cuda::|void |\([^()]*\)$", "", name)
    return re.sub(r"_kernel|StreamKShape|\((?:int|bool|unsigned int)\)|\s", "", name)[:44]


def spent(kernels: Iterable[tuple[float, float, str]]) -> dict[tuple[str, str], list[float]]:
    """Microseconds of each kernel that is given as (begin, end, name), by (name, the name before it).

    The time is that from the end of the one before to its own end, so that overlapping kernels do not count twice.
    After 200 us without a kernel another step begins.
    """
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    before, ended = "", None
    for begin, end, name in kernels:
        if ended is not None and begin - ended < 200:
            found[name, before].append(max(end - max(ended, begin - 5), 0))
        before, ended = name, max(end, ended or end)
    return found


def busy(kernels: list[Kernel]) -> int:
    """Nanoseconds in which at least one runs."""
    sum_, end = 0, 0
    for kernel in kernels:
        sum_ += max(0, kernel.end - max(kernel.begin, end))
        end = max(end, kernel.end)
    return sum_


def purposes(kernels: list[Kernel]) -> str:
    """The microseconds of a step by what its kernels are for; overlapping kernels count once, as in spent()."""
    found, end = dict.fromkeys(PURPOSES, 0.0), kernels[0].begin
    for kernel in kernels:
        purpose = next(name for name, words in PURPOSES.items() if re.search(words, kernel.name))
        found[purpose] += max(0, kernel.end - max(kernel.begin, end)) / 1e3
        end = max(end, kernel.end)
    return ", ".join(f"{name} {us:.0f}" for name, us in found.items() if us)


def report(folder: Path, name: str) -> list[str]:
    """Lines for each process with a recording of this name that has whole steps, which begin with the embedding."""
    ends = time.monotonic() + WAIT
    while (list(folder.glob(f"{name}-*.part")) or not list(folder.glob(f"{name}-*.trace"))) and time.monotonic() < ends:
        time.sleep(0.1)
    lines = []
    for path in sorted(folder.glob(f"{name}-*.trace")):
        kernels = kernels_of(path)
        starts = [i for i, kernel in enumerate(kernels) if "embed_kernel" in kernel.name]
        if len(starts) < 2:
            continue    # a process without a step: the launcher, or an HTTP worker
        kinds = defaultdict(list)   # by whether a step has rows of prompts
        for first, after in pairwise(starts):
            step = kernels[first:after]
            if kernels[after].begin - step[0].begin > 1e9 * SECONDS:
                continue    # what came before the recording began
            prompts = any("prefill" in kernel.name and "attend" in kernel.name for kernel in step)
            kinds[prompts].append((kernels[after].begin - step[0].begin, step))
        whole = sum(length for steps in kinds.values() for length, _ in steps)
        for prompts, steps in sorted(kinds.items()):
            length, step = sorted(steps, key=lambda each: each[0])[len(steps) // 2]
            lines.append(f"{path.stem}: {len(steps)} steps {'with prompts' if prompts else 'of decoding'}, "
                         f"{sum(each[0] for each in steps) / whole:.2f} of the time, median {length / 1e6:.2f} ms, "
                         f"of which kernels run {statistics.median(busy(each[1]) for each in steps) / 1e6:.2f}")
            lines.append(f"  us: {purposes(step)}, none {length / 1e3 - busy(step) / 1e3:.0f}")
            times = spent((kernel.begin / 1e3, kernel.end / 1e3, short(kernel.name)) for kernel in step)
            for (kernel, before), each in sorted(times.items(), key=lambda item: -sum(item[1]))[:LINES]:
                lines.append(f"  {sum(each):8.0f} us = {len(each):4d} x {sum(each) / len(each):7.1f}  {kernel} after "
                             f"{before[:20]}")
    return lines or [f"{name}: nothing was recorded within {SECONDS} s and {WAIT:.0f} s"]
