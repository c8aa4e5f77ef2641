"""Measures a decode step of one long sequence among short ones, relative to the time needed to read its bytes.

    bench_long_context.py [--threads 16] [--long 131072] [--short 32] [--context 128] [--formats bfloat16:0]

The shape is Qwen2.5-0.5B's. The long prompt is not computed: its cache is a prefix of zeros, because only
the distribution of its blocks over threads is measured. Bandwidth is measured before and after; the higher value
counts.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from bench_shape import SHAPES, SPAN, Model

from allspark_server import _native
from allspark_server.runtime.plan import SAMPLE, NewSlot, SamplingParams, StepPlan, WorkItem

STEPS = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--long", type=int, default=131072)
    parser.add_argument("--short", type=int, default=32)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--formats", nargs="+", default=["bfloat16:0"])
    parser.add_argument("--cache", default="bfloat16")
    options = parser.parse_args()
    cpus, shape = list(range(options.threads)), SHAPES["0.5b"]
    long_spans, short_spans = options.long // SPAN + 8, options.context // SPAN + 8
    for text in options.formats:
        dtype, group = text.split(":")
        model = Model(shape, options.threads, dtype, int(group), 256, options.short + 1, options.context, options.cache,
                      long_spans + options.short * short_spans, options.long + 256)
        sampling = SamplingParams(do_sample=False, prompt_len=options.context).encode()
        ids = [(7 * i) % 3000 + 10 for i in range(options.long + 1)]
        for slot in range(options.short):
            first = long_spans + slot * short_spans
            model.executor.step(StepPlan(
                new=[NewSlot(slot, ids[: options.context], sampling)],
                work=[WorkItem(slot, options.context, SAMPLE, spans=list(range(first, first + short_spans)))]).encode())
        items = [WorkItem(slot, 1, SAMPLE) for slot in range(options.short)]

        def steps(plan: StepPlan) -> float:
            times = []
            for _ in range(STEPS):
                begin = time.perf_counter()
                model.executor.step(plan.encode())
                times.append(time.perf_counter() - begin)
            return float(np.median(times))

        alone = steps(StepPlan(work=items))
        model.executor.step(StepPlan(
            new=[NewSlot(options.short, ids, sampling, options.long)],
            work=[WorkItem(options.short, 1, SAMPLE, spans=list(range(long_spans)))]).encode())
        before = _native.measure_roofline(cpus, options.threads, 5, 1024)[0]
        seconds = steps(StepPlan(work=[*items, WorkItem(options.short, 1, SAMPLE)]))
        bandwidth = max(before, _native.measure_roofline(cpus, options.threads, 5, 1024)[0])
        position = _native.span_bytes(SPAN, shape.head_dim, options.cache) / SPAN * shape.kv_heads * shape.layers
        cached = (options.long + options.short * (options.context + STEPS)) * position
        print(f"{text}, cache {options.cache}, {options.threads} threads: {options.short} sequences "
              f"{1e3 * alone:.2f} ms; with one of {options.long} tokens {1e3 * seconds:.2f} ms; "
              f"{1e-9 * (model.bytes(1) + cached):.2f} GB at "
              f"{1e-9 * bandwidth:.1f} GB/s take {1e3 * (model.bytes(1) + cached) / bandwidth:.2f} ms: "
              f"{seconds * bandwidth / (model.bytes(1) + cached):.2f} x", flush=True)


if __name__ == "__main__":
    main()
