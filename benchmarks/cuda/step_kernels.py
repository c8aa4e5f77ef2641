"""Shows the time of a step, kernel by kernel, as CUPTI records it (torch's profiler sees the whole process).

`python step_kernels.py [7b] [decode=1,8] [at=128] [lines=14] [prefill=1x1024] [format=float8] [cache=int8]
[layers=8]`, with bench_cuda.py's arguments; at: the context of decoding. Steps are timed without the profiler first.
Prompts are one step of all their rows.

A kernel's time runs from the end of the previous one to its own end, so that overlapping kernels do not count twice.
Kernels that depend on what ran before them (a GEMM after a norm, after attention, …) have lines of their own.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench_cuda import BANDWIDTH, SHAPES, SPAN, Model
from timeline import short, spent

from allspark_server.runtime.plan import SAMPLE, StepPlan, WorkItem

STEPS = 10


def kernels_of(step, times: int) -> list[tuple[float, float, str]]:
    """Start and end in us, and name, of the kernels of some steps."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(times):
            step()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    return sorted((e["ts"], e["ts"] + e["dur"], short(e["name"])) for e in events if e.get("cat") == "kernel")


def show(step, times: int, title: str, most: int) -> None:
    show_kernels(kernels_of(step, times), times, title, most)


def show_kernels(kernels: list[tuple[float, float, str]], steps: int, title: str, most: int) -> None:
    """Prints the time of each of kernels_of(), of which there are so many steps."""
    times = spent(kernels)
    print(f"-- {title}; {len(kernels) / steps:.0f} kernels a step, {sum(map(sum, times.values())) / steps:.0f} us")
    for (kernel, before), each in sorted(times.items(), key=lambda item: -sum(item[1]))[:most]:
        print(f"{sum(each) / steps:6.0f} us = {len(each) / steps:5.1f} x {sum(each) / len(each):6.1f}  {kernel} "
              f"after {before[:16]}")


def main(arguments: list[str]) -> None:
    name = arguments[0] if arguments and arguments[0] in SHAPES else "7b"
    asked = dict(a.split("=") for a in arguments if "=" in a)
    hidden, layers, *rest = SHAPES[name]
    SHAPES[name] = (hidden, int(asked.get("layers", layers)), *rest)
    batches = [int(b) for b in asked.get("decode", "1").split(",") if b]
    prefill = [tuple(map(int, c.split("x"))) for c in asked.get("prefill", "").split(",") if c]
    at = int(asked.get("at", 128))
    length, lines = max([512, at, *(n for _, n in prefill)]) + 128, int(asked.get("lines", 14))
    rows = max([8192, *(b * n for b, n in prefill)])
    sys.stdout.reconfigure(line_buffering=True)  # what is known is there when a limit of time ends the rest
    torch.cuda.init()
    model = Model(name, rows, max([1, *batches, *(b for b, _ in prefill)]), length, 0, 1, "",
                  asked.get("format", "bfloat16"), asked.get("cache", "bfloat16"))
    for batch, tokens in prefill:
        speed = batch * tokens / model.prefill(batch, tokens, rows)

        def prompts():
            model.e.step(model.start(batch, tokens))
            model.free(batch)

        show(prompts, 3, f"prefill {batch} x {tokens}: {speed:,.0f} tokens/s", lines)
    for batch in batches:
        seconds = model.decode(batch, at)
        floor = model.step_bytes(batch, at) / BANDWIDTH
        plan = StepPlan(work=[WorkItem(s, 1, SAMPLE) for s in range(batch)]).encode()
        model.e.step(model.start(batch, at + 1, at // SPAN * SPAN))
        for _ in range(5):
            model.e.step(plan)
        show(lambda: model.e.step(plan), STEPS, f"batch {batch} at {at}: {1e3 * seconds:.3f} ms, "
             f"{batch / seconds:,.0f} tokens/s, {floor / seconds:.2f} of bandwidth", lines)
        model.free(batch)


if __name__ == "__main__":
    main(sys.argv[1:])
