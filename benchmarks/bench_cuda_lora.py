"""Measures the cost of LoRA adapters on a GPU: steps of bench_cuda.py's shapes whose rows use no adapter, the same one,
or several.

`python bench_cuda_lora.py [7b|0.5b] [rank=16] [adapters=4] [decode=1,32,256] [prefill=1x8192]`
"""

from __future__ import annotations

import sys
import time

import bench_cuda
import numpy as np
from bench_cuda import SHAPES, SPAN, Model

from allspark_server import _cuda
from allspark_server.runtime.plan import SAMPLE, NewSlot, SamplingParams, StepPlan, WorkItem


class WithAdapters:
    """An executor in which ops for adapters follow every linear but the head."""

    def __init__(self, executor, widths: dict[int, list[int]], rank: int, count: int):
        """widths: of the targets of a linear that makes so many columns."""
        self.executor, self.widths, self.rank, self.count = executor, widths, rank, count
        self.tensors: list[int] = []  # their widths
        self.targets: list[tuple[int, int]] = []  # inputs, columns

    def __getattr__(self, name: str):
        return getattr(self.executor, name)

    def add_tensor(self, width: int, rows: int = 0) -> int:
        self.tensors.append(width)
        return self.executor.add_tensor(width, rows)

    def add_op(self, name, inputs, outputs, weights, attributes) -> None:
        self.executor.add_op(name, inputs, outputs, weights, attributes)
        if name != "linear":
            return
        offset = 0
        for columns in self.widths.get(self.tensors[outputs[0]], []):
            self.executor.add_op("lora", [outputs[0], inputs[0]], [], [], {
                "target": len(self.targets), "offset": offset, "columns": columns})
            self.targets.append((self.tensors[inputs[0]], columns))
            offset += columns

    def allocate(self, *sizes) -> None:
        self.executor.allocate(*sizes, adapters=self.count, adapter_rank=self.rank, adapter_dtype="bfloat16")
        rng = np.random.default_rng(1)
        noise = (0.01 * rng.normal(size=(1 << 16, self.rank))).astype(np.float32)
        for index in range(self.count):
            filled = self.executor.new_adapter()
            for target, (inputs, columns) in enumerate(self.targets):
                filled.set(target, np.ascontiguousarray(noise[:inputs].T), "F32", noise[:columns], "F32", 1.0)
            self.executor.set_adapter(index, filled)


def decode(model: Model, batch: int, adapters: list[int], steps: int = 60) -> float:
    """Median seconds of a step at context 128; row i uses adapters[i % len(adapters)]."""
    model.e.step(model.start(batch, 129, 128 // SPAN * SPAN))
    plan = StepPlan(work=[WorkItem(s, 1, SAMPLE, adapter=adapters[s % len(adapters)]) for s in range(batch)]).encode()
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        model.e.step(plan)
        seconds.append(time.perf_counter() - began)
    model.free(batch)
    return float(np.median(seconds[10:]))


def prefill(model: Model, batch: int, length: int, adapter: int, times: int = 4) -> float:
    """Least seconds of a step."""
    best, block = 1e9, SamplingParams(do_sample=False, prompt_len=length).encode()
    for _ in range(times):
        new = [NewSlot(s, [(7 * i + s) % 1000 for i in range(length)], block, 0) for s in range(batch)]
        work = [WorkItem(s, length, SAMPLE, spans=list(range(s * model.spans, (s + 1) * model.spans)), adapter=adapter)
                for s in range(batch)]
        plan, began = StepPlan(new=new, work=work).encode(), time.perf_counter()
        model.e.step(plan)
        best = min(best, time.perf_counter() - began)
        model.free(batch)
    return best


def main(arguments: list[str]) -> None:
    name = arguments[0] if arguments and arguments[0] in SHAPES else "7b"
    asked = dict(a.split("=") for a in arguments if "=" in a)
    rank, count = int(asked.get("rank", 16)), int(asked.get("adapters", 4))
    batches = [int(b) for b in asked.get("decode", "1,32,256").split(",") if b]
    prompts = [tuple(map(int, p.split("x"))) for p in asked.get("prefill", "1x8192").split(",") if p]
    hidden, _, heads, kv, dim, inner, _ = SHAPES[name]
    widths = {(heads + 2 * kv) * dim: [heads * dim, kv * dim, kv * dim], hidden: [hidden], 2 * inner: [inner, inner]}
    rows, length = max([512, *(b * n for b, n in prompts)]), max([512, *(n for _, n in prompts)]) + 128
    slots, kinds = max([*batches, *(b for b, _ in prompts)]), {"none": [-1], "one": [0], "several": list(range(count))}
    plain = _cuda.Executor
    for adapted in (False, True):
        bench_cuda._cuda.Executor = (lambda *given: WithAdapters(plain(*given), widths, rank, count)) if adapted \
            else plain
        model = Model(name, rows, slots, length, 0, 1, "", "bfloat16", "bfloat16")
        for kind, adapters in kinds.items():
            if not adapted and kind != "none":
                continue
            where = f"{'room for ' + str(count) if adapted else 'no room for'} adapters, rows have {kind}"
            for batch in batches:
                print(f"decode {batch}, {where}: {1e3 * decode(model, batch, adapters):.3f} ms", flush=True)
            for batch, tokens in prompts:
                print(f"prefill {batch} x {tokens}, {where}: "
                      f"{1e3 * prefill(model, batch, tokens, adapters[0]):.1f} ms", flush=True)
        del model


if __name__ == "__main__":
    main(sys.argv[1:])
