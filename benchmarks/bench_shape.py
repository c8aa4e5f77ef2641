"""Measures a model of a real shape with random weights on the native executor: prefill, decode, and time per kind of
op.

    bench_shape.py [--shape 0.5b 1.5b] [--threads 16] [--formats bfloat16:0 w8a8:0] [--prompt 1024] [--batch 1 8 32]
    [--context 128]

No checkpoint, engine or tokenizer is involved. The machine's rates are measured first. Prefill is reported as a
fraction of the AMX peak (that of 8-bit products for w8a8 and w4a8), or of the fp32 FMA rate without AMX. It counts only
necessary operations: weights for all rows, the head for one row, and the causal half of attention. Behind the
milliseconds of a matrix is its own fraction. Decode is bytes of weights over the read bandwidth.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace

import numpy as np

from allspark_server import _native
from allspark_server.runtime.plan import SAMPLE, NewSlot, SamplingParams, StepPlan, WorkItem

SPAN = 32


@dataclass
class Shape:
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int = 151936
    experts: int = 0  # of `inner` features each, of which a token goes to `top`
    top: int = 0

    def expert_bytes(self, dtype: str, group: int, rows: int) -> float:
        """Bytes of experts that a step of this many rows reads in a layer, if rows choose experts independently and
        uniformly.
        """
        one = sum(_native.matrix_bytes(n, k, dtype, group) - 4096 for n, k in ((2 * self.inner, self.hidden),
                                                                              (self.hidden, self.inner)))
        return one * self.experts * (1 - (1 - self.top / self.experts) ** rows)


SHAPES = {"30b-a3b": Shape(2, 2048, 768, 32, 4, 128, experts=128, top=8), "0.5b": Shape(24, 896, 4864, 14, 2, 64),
          "1.5b": Shape(28, 1536, 8960, 12, 2, 128)}


class Model:

    def __init__(
        self, shape: Shape, threads: int, dtype: str, group: int, rows: int, batch: int, context: int, cache: str,
        spans: int = 0, max_length: int = 0,
    ):
        """spans, max_length: of the cache and of its longest sequence; 0: as prompts of `rows` and contexts need."""
        self.shape, self.names, self.context = shape, [], context
        e = self.executor = _native.Executor(cpus=list(range(threads)), num_threads=threads)
        rng = np.random.default_rng(0)
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        sizes = {"qkv": (width, shape.hidden), "o": (shape.hidden, shape.heads * shape.head_dim),
                 "gate_up": (2 * shape.inner, shape.hidden), "down": (shape.hidden, shape.inner)}
        routed = shape.experts > 0
        values = {name: (rng.normal(size=size) * size[1]**-0.5).astype(np.float32) for name, size in sizes.items()}
        uses = {name: shape.top if routed and name in ("gate_up", "down") else 1 for name in sizes}
        self.sizes = sizes
        self.layer_weights = sum(n * k * uses[name] for name, (n, k) in sizes.items()) * shape.layers
        dense = [size for name, size in sizes.items() if not routed or uses[name] == 1]
        head_bytes = _native.matrix_bytes(shape.vocab, shape.hidden, dtype, group)
        dense_bytes = sum(_native.matrix_bytes(*size, dtype, group) for size in dense) * shape.layers + head_bytes
        # Bytes of weights that a step of so many rows reads.
        self.bytes = lambda rows: dense_bytes + (
            shape.layers * shape.expert_bytes(dtype, group, rows) if routed else 0)

        def fill(size, array, experts=1):
            size = (size[0] * experts, size[1])
            handle = e.add_matrix(*size, dtype, group, experts)
            for row in range(0, size[0], len(array)):
                e.fill_matrix(handle, array[:min(len(array), size[0] - row)], "F32", row)
            return handle

        head = fill((shape.vocab, shape.hidden), rng.normal(size=(8192, shape.hidden)).astype(np.float32))
        ones, bias = e.add_vector(np.ones(shape.hidden, np.float32)), e.add_vector(np.zeros(width, np.float32))
        frequencies = e.add_vector((1e6 ** (-np.arange(shape.head_dim // 2) * 2 / shape.head_dim)).astype(np.float32))
        x, y, qkv, context, hidden, both, last, logits = (
            e.add_tensor(w, r) for w, r in ((shape.hidden, False), (shape.hidden, False), (width, False),
                                            (shape.heads * shape.head_dim, False), (shape.inner, False),
                                            (2 * shape.inner, False), (shape.hidden, True), (shape.vocab, True)))

        if routed:
            rows_of = e.add_row_set(_native.ALL_ROWS, shape.top)
            scores, hidden, both, out = (e.add_tensor(w, rows_of)
                                         for w in (1, shape.inner, 2 * shape.inner, shape.hidden))
            router_logits, gate = e.add_tensor(shape.experts), rng.normal(size=(shape.experts, shape.hidden))

        def op(name, kind, inputs, outputs, weights, attributes):
            self.names.append(name)
            e.add_op(kind, inputs, outputs, weights, attributes)

        op("rotary_table", "rotary_table", [], [], [frequencies], {"rotary_dim": shape.head_dim})
        op("embedding", "embedding", [], [x], [head], {"vocab_begin": 0})
        for layer in range(shape.layers):
            handles = {name: fill(size, values[name], shape.experts if routed and name in ("gate_up", "down") else 1)
                       for name, size in sizes.items()}
            op("norm", "rms_norm", [x], [y], [ones], {"eps": 1e-6})
            op("qkv", "linear", [y], [qkv], [handles["qkv"], bias], {})
            op(
                "rope",
                "rope",
                [qkv],
                [],
                [],
                {"offset": 0, "heads": shape.heads + shape.kv_heads, "head_dim": shape.head_dim},
            )
            op("attention", "span_attention", [qkv], [context], [], {
                "layer": layer, "q_heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim,
                "group": shape.heads // shape.kv_heads, "scale": shape.head_dim**-0.5})
            op("o", "linear", [context], [y], [handles["o"]], {})
            op("add", "add", [x, y], [x], [], {})
            op("norm", "rms_norm", [x], [y], [ones], {"eps": 1e-6})
            if routed:
                router = e.add_matrix(shape.experts, shape.hidden, "float32")
                e.fill_matrix(router, gate.astype(np.float32), "F32")
                op("router_logits", "linear", [y], [router_logits], [router], {})
                op("router", "router", [router_logits], [scores], [], {"top_k": shape.top, "normalized": 1})
                op("gate_up", "expert_linear", [y], [both], [handles["gate_up"]], {"experts": shape.experts})
                op("silu_mul", "silu_mul", [both], [hidden], [], {})
                op("down", "expert_linear", [hidden], [out], [handles["down"]], {"experts": shape.experts})
                op("combine", "combine_experts", [out, scores], [y], [], {})
            else:
                op("gate_up", "linear", [y], [both], [handles["gate_up"]], {})
                op("silu_mul", "silu_mul", [both], [hidden], [], {})
                op("down", "linear", [hidden], [y], [handles["down"]], {})
            op("add", "add", [x, y], [x], [], {})
        op("norm", "rms_norm", [x], [y], [ones], {"eps": 1e-6})
        op("select_rows", "select_rows", [y], [last], [], {})
        op("head", "linear", [last], [logits], [head], {})
        op("sample", "sample", [logits], [], [], {"vocab_begin": 0, "vocab_size": shape.vocab})
        spans = spans or -(-max(rows, self.context + 32) // SPAN) * batch
        e.allocate(rows, batch, max_length or max(2048, rows + 32), SPAN, spans, cache)

    def start(self, slot: int, prompt: int, first_span: int) -> float:
        """Seconds for a prompt in one chunk."""
        ids = np.random.default_rng(slot).integers(10, 3000, prompt).tolist()
        new = [NewSlot(slot, ids, SamplingParams(do_sample=False, prompt_len=prompt).encode())]
        spans = list(range(first_span, first_span + -(-(prompt + 32) // SPAN)))[
            : -(-max(prompt, self.context + 32) // SPAN)
        ]
        plan = StepPlan(new=new, work=[WorkItem(slot, prompt, SAMPLE, spans=spans)]).encode()
        begin = time.perf_counter()
        self.executor.step(plan)
        return time.perf_counter() - begin

    def prefill(self, prompt: int) -> float:
        seconds = self.start(0, prompt, 0)
        self.executor.step(StepPlan(free=[0]).encode())
        return seconds

    def decode(self, batch: int, steps: int) -> float:
        """Median seconds of a step."""
        for slot in range(batch):
            self.start(slot, self.context, slot * -(-(self.context + 32) // SPAN))
        self.executor.set_profiling(True)
        times = []
        plan = StepPlan(work=[WorkItem(s, 1, SAMPLE) for s in range(batch)]).encode()
        for _ in range(steps):
            begin = time.perf_counter()
            self.executor.step(plan)
            times.append(time.perf_counter() - begin)
        self.executor.step(StepPlan(free=list(range(batch))).encode())
        return float(np.median(times))

    def report(self, rows: int = 0, peak: float = 0) -> str:
        """Milliseconds of each kind of op since profiling was switched on. With the rows of a step: also the fraction
        of `peak` that the products with each dense matrix reach.
        """
        total: dict[str, float] = {}
        work: dict[str, float] = {}
        count = 1
        for op in self.executor.profile():
            matrix = self.names[op["index"]]
            name = matrix + ("+" + op["op"].partition("+")[2] if "+" in op["op"] else "")
            total[name] = total.get(name, 0) + op["sum"]
            count = max(count, op["count"])
            if "linear" in op["op"].split("+") and matrix in self.sizes:
                work[name] = work.get(name, 0) + 2 * self.sizes[matrix][0] * self.sizes[matrix][1] * rows * op["count"]
        return "  ".join(
            f"{name} {seconds / count * 1e3:.2f}" + (f" [{work[name] / seconds / peak:.2f}]" if work.get(name) else "")
            for name, seconds in sorted(total.items(), key=lambda i: -i[1])
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["0.5b"], choices=SHAPES)
    parser.add_argument("--layers", type=int, default=0, help="instead of the shape's own number")
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--formats", nargs="+", default=["bfloat16:0", "w8a8:0"])
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=128, help="tokens of each sequence when decoding")
    parser.add_argument("--cache", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    cpus = list(range(options.threads))
    bandwidth, rate = _native.measure_roofline(cpus, options.threads, 5, 1024)
    bf16, int8 = _native.measure_tile_roofline(cpus, options.threads, 5)
    print(f"{_native.isa()}, {options.threads} threads: read {bandwidth / 1e9:.1f} GB/s, fp32 {rate / 1e12:.2f} T/s, "
          f"tiles bf16 {bf16 / 1e12:.2f}, int8 {int8 / 1e12:.2f} T/s", flush=True)
    for name in options.shape:
        shape = replace(SHAPES[name], layers=options.layers or SHAPES[name].layers)
        for text in options.formats:
            dtype, group = text.split(":")
            model = Model(
                shape,
                options.threads,
                dtype,
                int(group),
                max(options.prompt, options.context),
                max(options.batch, default=1),
                options.context,
                options.cache,
            )
            model.prefill(options.prompt)
            model.executor.set_profiling(True)
            times, peaks = [], []
            for _ in range(options.repeats):
                peaks.append(_native.measure_tile_roofline(cpus, options.threads, 1)[dtype in ("w8a8", "w4a8")])
                times.append(model.prefill(options.prompt))
            peak = max(peaks) or rate
            n = options.prompt
            work = 2 * model.layer_weights * n + 2 * shape.vocab * shape.hidden
            work += 2 * shape.layers * shape.heads * shape.head_dim * n * (n + 1)
            print(
                f"{name} {text} prefill {n}: best {n / min(times):.0f} tokens/s, median {n / np.median(times):.0f}; "
                f"{work / min(times) / 1e12:.2f} T/s = {work / min(times) / peak:.2f} of {peak / 1e12:.2f} "
                f"(median {np.median(peaks) / 1e12:.2f})\n   ms: {model.report(n, peak)}",
                flush=True,
            )
            for batch in options.batch:
                seconds = min(model.decode(batch, 20) for _ in range(2))
                print(
                    f"{name} {text} decode batch {batch}: {batch / seconds:.1f} tokens/s, "
                    f"{model.bytes(batch) / seconds / bandwidth:.2f} of bandwidth\n   ms: {model.report()}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
