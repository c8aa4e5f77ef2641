"""Where the time of a step goes, kernel by kernel, as CUPTI records it (torch's profiler sees all of its process):
`python step_kernels.py [7b] [decode=1,8] [lines=14] [prefill=1x1024] [format=float8] [cache=int8]`, as bench_cuda.py
has these. Steps, and prompts of prefill, are timed without it first.

A kernel's time is from the end of the one before to its own: so those that begin early do not count twice. Kernels that
are told apart by what came before them (the product after a norm, after attention ...) have lines of their own."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench_cuda import BANDWIDTH, SHAPES, SPAN, Model  # noqa: E402

from allspark_server.runtime.plan import DRAW, StepPlan, WorkItem  # noqa: E402

STEPS = 10


def short(name: str) -> str:
    name = re.sub(r"\(.*?\)::|as::cuda::|void |\([^()]*\)$", "", name)
    return re.sub(r"_kernel|StreamShape|\((?:int|bool|unsigned int)\)|\s", "", name)[:44]


def kernels_of(run: Callable[[], object]) -> list[tuple[float, float, str]]:
    """Of some steps: start and end in us, and name."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    return sorted((e["ts"], e["ts"] + e["dur"], short(e["name"])) for e in events if e.get("cat") == "kernel")


def kernels_of_decode(model: Model, batch: int) -> list[tuple[float, float, str]]:
    plan = StepPlan(work=[WorkItem(s, 1, DRAW) for s in range(batch)]).encode()
    model.e.step(model.start(batch, 129, 128 // SPAN * SPAN))

    def steps(count: int) -> None:
        for _ in range(count):
            model.e.step(plan)

    steps(5)
    kernels = kernels_of(lambda: steps(STEPS))
    model.free(batch)
    return kernels


def show(kernels: list[tuple[float, float, str]], steps: int, most: int, head: str) -> None:
    times, before, ended = defaultdict(list), ("", ""), None
    for begin, end, kernel in kernels:
        if ended is not None and begin - ended < 200:
            times[before, kernel].append(max(end - max(ended, begin - 5), 0))
        before, ended = (before[1], kernel), max(end, ended or end)
    print(f"{head}; {len(kernels) / steps:.0f} kernels a step, {sum(map(sum, times.values())) / steps:.0f} us")
    for (earlier, kernel), each in sorted(times.items(), key=lambda item: -sum(item[1]))[:most]:
        print(f"{sum(each) / steps:6.0f} us = {len(each) / steps:5.1f} x {sum(each) / len(each):6.1f}  {kernel} "
              f"after {earlier[1][:16]}")


def main(arguments: list[str]) -> None:
    name = arguments[0] if arguments and arguments[0] in SHAPES else "7b"
    asked = dict(a.split("=") for a in arguments if "=" in a)
    batches = [int(b) for b in asked.get("decode", "1").split(",") if b]
    prefill = [tuple(map(int, c.split("x"))) for c in asked.get("prefill", "").split(",") if c]
    length = max([512, *(n for _, n in prefill)]) + 128
    sys.stdout.reconfigure(line_buffering=True)  # what is known is there when a limit of time ends the rest
    torch.cuda.init()
    model = Model(name, 8192, max([*batches, *(b for b, _ in prefill)]), length, 0, 1, "",
                  asked.get("format", "bfloat16"), asked.get("cache", "bfloat16"))
    lines = int(asked.get("lines", 14))
    for batch, tokens in prefill:
        seconds = model.prefill(batch, tokens, 8192)
        kernels = kernels_of(lambda batch=batch, tokens=tokens: model.prefill(batch, tokens, 8192, 2))
        show(kernels, 2, lines, f"-- prefill {batch} x {tokens}: {batch * tokens / seconds:,.0f} tokens/s")
    for batch in batches:
        seconds = model.decode(batch)
        floor = model.step_bytes(batch, 128) / BANDWIDTH
        show(kernels_of_decode(model, batch), STEPS, lines,
             f"-- batch {batch}: {1e3 * seconds:.3f} ms, {batch / seconds:,.0f} tokens/s, {floor / seconds:.2f} of "
             "bandwidth")


if __name__ == "__main__":
    main(sys.argv[1:])
