"""Measures steps of a real model's shape on a GPU, with random weights and without an engine: milliseconds, tokens/s
and the fraction of the roofline.

`python bench_cuda.py [7b|0.5b|30b-a3b|gpt-oss-20b|gpt-oss-120b] [ranks=2] [decode=1,8,32] [prefill=1x1024]
[context=8000x1] [draft=3x8000x1] [short=32x8000x1] [short_chunks=fastest|decode|prefill] [mixed=204+1702,0+1906]
[format=int4:64] [cache=bfloat16] [threads=1] [warm=1] [layers=8] [queued=1]`

`mixed=D+P` measures a step of D decoding rows at a context of 640 with P rows of prompts of 512 tokens; with a single
such cell it prints what each op took. `warm=1` first runs and times the warm-up of a load. Each decoding step begins
when the one before has returned, so the GPU waits for the host in between; `queued=1` queues the next step meanwhile,
as the engine does.

`draft=DxCxB` verifies D drafts for each of B requests at a context of C, `short=RxCxB` computes a prompt's last R rows
behind C cached ones. `short_chunks` says which kernel attends for either.

`format=float8:128` is as FP8 checkpoints in blocks have it: embedding and head are bfloat16. `format=mxfp4` is for
experts; all else is bfloat16 then. gpt-oss' sinks, windows and biases are left out.

`ranks=N` uses GPUs 0 to N-1 of one host, with a process (or, with threads=1, a thread) for each. The roofline is then
that of all of them together.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from allspark_server import _cuda, _native
from allspark_server.runtime.plan import SAMPLE, Flag, NewSlot, SamplingParams, StepPlan, WorkItem

SHAPES = {  # hidden, layers, heads, KV heads, head_dim, inner, vocabulary
    "7b": (3584, 28, 28, 4, 128, 18944, 152064),
    "0.5b": (896, 24, 14, 2, 64, 4864, 151936),
    "30b-a3b": (2048, 48, 32, 4, 128, 768, 151936),
    "gpt-oss-20b": (2880, 24, 64, 8, 64, 2880, 201088),
    "gpt-oss-120b": (2880, 36, 64, 8, 64, 2880, 201088),
}
# How many, and how many a row goes to; these models norm heads, and have no biases.
EXPERTS = {"30b-a3b": (128, 8), "gpt-oss-20b": (32, 4), "gpt-oss-120b": (128, 4)}
ROW_SETS = 4  # of entries of experts: layers share them
MAPPED = []  # windows' memory stays as long as the process
SPAN, BANDWIDTH, RATE = 32, 4.44e12, 792e12  # measured on an H200


def format_of(text: str) -> tuple[str, int]:
    """Type of weights and group size."""
    dtype, _, group = text.partition(":")
    return dtype, int(group or 0)


def window_of(rank: int, ranks: int, path: str):
    """The ranks' shared memory, in a file; None for a single rank."""
    if ranks == 1:
        return None
    size = -(-_native.SharedMemory.bytes_needed(ranks) // 4096) * 4096
    with open(path, "r+b") as file:
        file.truncate(size * ranks)
        mapped = mmap.mmap(file.fileno(), size * ranks)
    address = np.frombuffer(mapped, np.uint8).ctypes.data
    MAPPED.append(mapped)
    return _native.SharedMemory(rank, ranks, [address + r * size for r in range(ranks)], True, 120.0)


class Model:
    def __init__(self, name: str, max_rows: int, max_slots: int, max_length: int, rank: int, ranks: int, path: str,
                 form: str, cache: str, max_outputs: int | None = None, short_chunks: str = "fastest"):
        """form: of weights, with a group size behind a colon. max_outputs: rows of logits a step; by default, a row a
        slot.
        """
        max_outputs = max_outputs or max_slots
        self.shape = hidden, layers, heads, kv, dim, inner, vocab = SHAPES[name]
        self.ranks, whole = ranks, vocab
        self.queued = False  # whether decode() queues steps
        heads, kv, inner, vocab = heads // ranks, kv // ranks, inner // ranks, vocab // ranks // 256 * 256
        begin = rank * vocab
        vocab = whole - begin if rank == ranks - 1 else vocab
        self.slots, self.length = max_slots, max_length
        self.window = window = window_of(rank, ranks, path)
        self.e = e = _cuda.Executor(rank, _native.HostSampler(8, shared_memory=window), window)
        rng = np.random.default_rng(0)
        noise = (rng.normal(size=(4096, max(hidden, inner, heads * dim))) * 0.02).astype(np.float32)
        noise = (noise.view(np.uint32) >> 16).astype(np.uint16)

        dtype, _ = form = of_experts = format_of(form)
        if dtype == "mxfp4":
            dtype, _ = form = ("bfloat16", 0)
            of_experts = ("mxfp4", 32)
            values = rng.integers(0, 256, (4096, max(hidden, inner) // 2)).astype(np.uint8)
            scales = rng.integers(118, 122, (4096, max(hidden, inner) // 32)).astype(np.uint8)

        in_blocks = form == ("float8", 128)
        of_head = ("bfloat16", 0) if in_blocks else form
        if in_blocks:
            quants = rng.integers(0, 120, (4096, max(hidden, inner, heads * dim))).astype(np.uint8)  # up to 240
            quants += rng.integers(0, 2, quants.shape).astype(np.uint8) << 7
            scale = np.full((4096, quants.shape[1] // 128), 0.0005, np.float32).view(np.uint32)
            halves = scale.astype(np.uint16), (scale >> 16).astype(np.uint16)

        def matrix(n: int, k: int, experts: int = 1, size: float = 0.035, form: tuple[str, int] = form) -> int:
            if experts > 1 and of_experts[0] == "mxfp4":
                handle = e.add_matrix(experts * n, k, *of_experts, experts)
                for first in range(0, experts * n, 4096):
                    rows = min(4096, experts * n - first)
                    e.fill_mx(handle, values[:rows, :k // 2], scales[:rows, :k // 32], first)
                return handle
            handle = e.add_matrix(experts * n, k, *form, experts)
            if form[0] in ("bfloat16", "float16") and k % 64 == 0:
                e.fill_noise(handle, size)
            elif form == ("float8", 128):
                for first in range(0, experts * n, 4096):
                    rows = min(4096, experts * n - first)
                    own = [np.ascontiguousarray(half[:rows, :k // 128]) for half in halves]
                    e.fill_quantized(handle, np.ascontiguousarray(quants[:rows, :k]), *own, 8, k, 128, first)
            else:
                for first in range(0, experts * n, 4096):
                    e.fill_rows(handle, [noise[:min(4096, experts * n - first), :k]], "BF16", first)
            return handle

        self.experts, top = EXPERTS.get(name, (0, 0))
        # Row sets; each with the tensors of its layers: weights, gates, what they gate, results.
        self.routed = [e.add_row_set(0, top) for _ in range(ROW_SETS if self.experts else 0)]
        tensors = [[e.add_tensor(n, rows) for n in (1, 2 * inner, inner, hidden)] for rows in self.routed]

        def branch_of(y: int, layer: int) -> None:
            if not self.experts:
                e.add_op("linear", [y], [both], [matrix(2 * inner, hidden)], {})
                e.add_op("silu_mul", [both], [act], [], {})
                return e.add_op("linear", [act], [branch], [matrix(hidden, inner)], {})
            gate = e.add_matrix(self.experts, hidden, "float32")
            e.fill_matrix(gate, rng.normal(size=(self.experts, hidden)).astype(np.float32), "F32")
            scores, wide, narrow, out = tensors[layer * ROW_SETS // layers]
            e.add_op("linear", [y], [router_logits], [gate], {})
            e.add_op("router", [router_logits], [scores], [], {"top_k": top, "normalized": 1})
            own = {"experts": self.experts}
            e.add_op("expert_linear", [y], [wide], [matrix(2 * inner, hidden, self.experts)], own)
            e.add_op("silu_mul", [wide], [narrow], [], {})
            e.add_op("expert_linear", [narrow], [out], [matrix(hidden, inner, self.experts)], own)
            e.add_op("combine_experts", [out, scores], [branch], [], {})

        ones, head_ones = e.add_vector(np.ones(hidden, np.float32)), e.add_vector(np.ones(dim, np.float32))
        bias = [] if self.experts else [e.add_vector(np.zeros((heads + 2 * kv) * dim, np.float32))]
        frequencies = e.add_vector((1e6 ** (-np.arange(dim // 2) * 2 / dim)).astype(np.float32))
        x, y, qkv, context, both, act, branch, last, normed, logits = (e.add_tensor(*t) for t in (
            (hidden,), (hidden,), ((heads + 2 * kv) * dim,), (heads * dim,), (2 * inner,), (inner,), (hidden,),
            (hidden, 1), (hidden, 1), (vocab, 1)))
        router_logits = e.add_tensor(max(self.experts, 1))
        e.add_op("rotary_table", [], [], [frequencies], {"rotary_dim": dim})
        e.add_op("embedding", [], [x], [matrix(vocab, hidden, size=1.0, form=of_head)], {"vocab_begin": begin})
        e.add_op("all_reduce", [x], [x], [], {})
        for layer in range(layers):
            e.add_op("rms_norm", [x], [y], [ones], {"eps": 1e-6})
            e.add_op("linear", [y], [qkv], [matrix((heads + 2 * kv) * dim, hidden), *bias], {})
            for offset, count in ((0, heads), (heads * dim, kv)) if self.experts else ():
                e.add_op("head_norm", [qkv], [], [head_ones], {"eps": 1e-6, "offset": offset, "heads": count,
                                                               "head_dim": dim})
            e.add_op("rope", [qkv], [], [], {"offset": 0, "heads": heads + kv, "head_dim": dim})
            e.add_op("span_attention", [qkv], [context], [], {
                "layer": layer, "q_heads": heads, "kv_heads": kv, "head_dim": dim, "group": heads // kv,
                "scale": dim**-0.5, "q_head_begin": rank * heads, "kv_begin": rank * kv})
            e.add_op("linear", [context], [branch], [matrix(hidden, heads * dim)], {})
            e.add_op("all_reduce", [branch], [branch], [], {})
            e.add_op("add", [x, branch], [x], [], {})
            e.add_op("rms_norm", [x], [y], [ones], {"eps": 1e-6})
            branch_of(y, layer)
            e.add_op("all_reduce", [branch], [branch], [], {})
            e.add_op("add", [x, branch], [x], [], {})
        e.add_op("select_rows", [x], [last], [], {})
        e.add_op("rms_norm", [last], [normed], [ones], {"eps": 1e-6})
        e.add_op("linear", [normed], [logits], [matrix(vocab, hidden, form=of_head)], {})
        e.add_op("sample", [logits], [], [], {"vocab_begin": begin, "vocab_size": whole})
        began = time.perf_counter()
        self.spans = -(-max_length // SPAN)
        if window:
            own = e.share(max_rows, max_outputs)
            all_ranks = window.broadcast(b"".join(window.gather(own) or []))
            e.connect([all_ranks[r * len(own):(r + 1) * len(own)] for r in range(ranks)])
        e.allocate(max_rows, max_slots, max_length, SPAN, max_slots * self.spans, cache, max_outputs,
                   short_chunks=short_chunks)
        self.matrices = ranks * hidden * ((2 * heads + 2 * kv) * dim + 3 * inner * max(top, 1))

        def bytes_of(*shapes) -> float:
            return float(ranks * sum(_cuda.matrix_bytes(*shape, *form) for shape in shapes))

        mlp = float(ranks * sum(_cuda.matrix_bytes(*shape, *of_experts) for shape in ((2 * inner, hidden),
                                                                                      (hidden, inner))))
        self.expert_bytes = mlp if self.experts else 0.0
        self.bytes = _cuda.matrix_bytes(whole, hidden, *of_head) + layers * (
            bytes_of(((heads + 2 * kv) * dim, hidden), (hidden, heads * dim)) + mlp - self.expert_bytes
            + 4.0 * self.experts * hidden)
        self.position_bytes = ranks * layers * kv * _cuda.span_bytes(SPAN, dim, cache) / SPAN
        print(f"{name}: {e.weight_bytes() / 1e9:.2f} GB, cache {e.cache_bytes() / 1e9:.2f} GB, compiled in "
              f"{time.perf_counter() - began:.2f} s", flush=True)

    def warm_up(self) -> str:
        """Runs the warm-up of all sizes of steps; what it took."""
        before, began, longest = self.e.free_bytes(), time.perf_counter(), 0.0
        done, total = self.e.warm_up(0)
        while done < total:
            at = time.perf_counter()
            done, total = self.e.warm_up(1)
            longest = max(longest, time.perf_counter() - at)
        return (f"warm-up: {total} sizes in {time.perf_counter() - began:.2f} s, the longest {1e3 * longest:.0f} ms, "
                f"{(before - self.e.free_bytes()) / 2**20:.0f} MiB")

    def start(self, slots: int, length: int, cached: int = 0, draws: bool = True):
        """A step that computes the rest of prompts whose first positions count as cached."""
        block = SamplingParams(do_sample=False, prompt_len=length).encode()
        new = [NewSlot(s, [(7 * i + s) % 1000 for i in range(length)], block, cached) for s in range(slots)]
        work = [WorkItem(s, length - cached, SAMPLE if draws else 0,
                         spans=list(range(s * self.spans, (s + 1) * self.spans))) for s in range(slots)]
        return StepPlan(new=new, work=work).encode()

    def free(self, slots: int):
        self.e.step(StepPlan(free=list(range(slots))).encode())

    def short(self, batch: int, context: int, rows: int, times: int = 12) -> float:
        """Median seconds of a step of the last rows of prompts whose other rows are cached."""
        context, seconds = context // SPAN * SPAN, []
        for _ in range(times):
            plan = self.start(batch, context + rows, context)
            began = time.perf_counter()
            self.e.step(plan)
            seconds.append(time.perf_counter() - began)
            self.free(batch)
        return float(np.median(seconds[4:]))

    def decode(self, batch: int, context: int = 128, drafts: int = 0, steps: int = 60) -> float:
        """Median seconds of a step, which verifies that many drafts of each request; most are rejected."""
        self.e.step(self.start(batch, context + 1, context // SPAN * SPAN))
        flags = SAMPLE | Flag.GIVEN if drafts else SAMPLE
        work, seconds = [WorkItem(s, 1, flags, known=[1] * drafts, drafts=drafts) for s in range(batch)], []
        plan, stepper, began = StepPlan(work=work).encode(), _native.Stepper(), time.perf_counter()
        for step in range(steps):
            if not self.queued:
                self.e.step(plan)
            else:
                for _ in range(1 if step else 2):
                    stepper.submit(self.e, plan)
                stepper.collect()
            seconds.append(time.perf_counter() - began)
            began = time.perf_counter()
        if self.queued:
            stepper.collect()
        touched = [len({expert for expert, _ in self.e.expert_tiles(rows)}) for rows in self.routed]
        self.touched = float(np.mean(touched)) if touched else 0.0
        self.free(batch)
        return float(np.median(seconds[10:]))

    def prefill(self, batch: int, length: int, chunk: int, times: int = 4) -> float:
        """Least seconds until all prompts have their first token, in steps of `chunk` rows."""
        _, _layers, *_ = self.shape
        best = 1e9
        for _ in range(times):
            began, slot, done = time.perf_counter(), 0, 0
            block = SamplingParams(do_sample=False, prompt_len=length).encode()
            while slot < batch:
                room, new, work = chunk, [], []
                while room and slot < batch:
                    rows = min(room, length - done)
                    if not done:
                        new.append(NewSlot(slot, [(7 * i + slot) % 1000 for i in range(length)], block, 0))
                    spans = list(range(slot * self.spans, (slot + 1) * self.spans)) if not done else []
                    done, room = done + rows, room - rows
                    work.append(WorkItem(slot, rows, SAMPLE if done == length else 0, spans=spans))
                    if done == length:
                        slot, done = slot + 1, 0
                self.e.step(StepPlan(new=new, work=work).encode())
            best = min(best, time.perf_counter() - began)
            self.free(batch)
        return best

    def mixed(self, decoding: int, rows: int, context: int = 640, length: int = 512, steps: int = 24) -> float:
        """Median seconds of a step of decoding rows and rows of new prompts."""
        if decoding:
            self.e.step(self.start(decoding, context + 1, context // SPAN * SPAN))
        block, seconds = SamplingParams(do_sample=False, prompt_len=length).encode(), []
        for _ in range(steps):
            new, work = [], [WorkItem(slot, 1, SAMPLE) for slot in range(decoding)]
            for slot, first in enumerate(range(0, rows, length), decoding):
                new.append(NewSlot(slot, [(7 * i + slot) % 1000 for i in range(length)], block, 0))
                count, spans = min(length, rows - first), range(slot * self.spans, (slot + 1) * self.spans)
                work.append(WorkItem(slot, count, SAMPLE if count == length else 0, spans=list(spans)))
            plan = StepPlan(new=new, work=work).encode()
            began = time.perf_counter()
            self.e.step(plan)
            seconds.append(time.perf_counter() - began)
            if new:
                self.e.step(StepPlan(free=[item.slot for item in new]).encode())
        if decoding:
            self.free(decoding)
        return float(np.median(seconds[4:]))

    def kv_bytes(self, positions: float) -> float:
        return positions * self.position_bytes

    def step_bytes(self, batch: int, context: int) -> float:
        """Bytes that a step reads; of experts, those that the last decode() used."""
        return self.bytes + self.shape[1] * self.touched * self.expert_bytes + batch * self.kv_bytes(context)


def main(arguments: list[str]) -> None:
    name = arguments[0] if arguments and arguments[0] in SHAPES else "7b"
    asked = dict(a.split("=") for a in arguments if "=" in a)
    hidden, layers, *rest = SHAPES[name]
    SHAPES[name] = (hidden, int(asked.get("layers", layers)), *rest)
    decode = [int(b) for b in asked.get("decode", "1,8,32").split(",") if b]
    contexts = [tuple(map(int, c.split("x"))) for c in asked.get("context", "").split(",") if c]
    prefill, drafts, shorts = ([tuple(map(int, c.split("x"))) for c in asked.get(key, "").split(",") if c]
                               for key in ("prefill", "draft", "short"))
    mixed = [tuple(map(int, c.split("+"))) for c in asked.get("mixed", "").split(",") if c]
    chunk = int(asked.get("chunk", 8192))
    length = max([512, *(c for c, _ in contexts), *(n for _, n in prefill), *(640 for _ in mixed),
                  *(c + 60 * d for d, c, _ in drafts), *(r + c for r, c, _ in shorts)]) + 128
    slots = max([1, *decode, *(b for _, b in contexts), *(b for b, _ in prefill), *(b for *_, b in drafts + shorts),
                 *(batch + -(-rows // 512) for batch, rows in mixed)])
    outputs = max([slots, *((1 + d) * b for d, _, b in drafts)])
    ranks, rank = int(asked.get("ranks", 1)), int(asked.get("rank", 0))
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        path = asked.get("window", file.name)

        def compute(rank: int) -> None:
            model = Model(name, chunk, slots, length, rank, ranks, path, asked.get("format", "bfloat16"),
                          asked.get("cache", "bfloat16"), outputs, asked.get("short_chunks", "fastest"))
            model.queued = "queued" in asked
            show = print if rank == 0 else lambda *_, **__: None
            if "warm" in asked:
                show(model.warm_up(), flush=True)
            run(model, decode, contexts, prefill, chunk, show)
            run_mixed(model, mixed, show)
            run_short(model, drafts, shorts, show)
            if model.window:
                model.window.close()

        if "threads" in asked:
            with ThreadPoolExecutor(ranks) as pool:
                return list(pool.map(compute, range(ranks)))
        others = [subprocess.Popen([sys.executable, __file__, *arguments, f"rank={r}", f"window={path}"],
                                   stdout=subprocess.DEVNULL, env={**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
                  for r in range(1, ranks) if rank == 0]
        compute(rank)
        for other in others:
            other.wait()


def run(model: Model, decode: list[int], contexts: list, prefill: list, chunk: int, print) -> None:
    bandwidth, rate = model.ranks * BANDWIDTH, model.ranks * RATE
    for batch, context in [(b, 128) for b in decode] + [(b, c) for c, b in contexts]:
        seconds = model.decode(batch, context)
        floor = model.step_bytes(batch, context) / bandwidth
        touched = f", {model.touched:.1f} experts a layer" if model.routed else ""
        print(f"decode batch {batch} at {context}: {1e3 * seconds:.3f} ms, {batch / seconds:,.0f} tokens/s, "
              f"{floor / seconds:.2f} of bandwidth{touched}", flush=True)
    for batch, tokens in prefill:
        seconds = model.prefill(batch, tokens, chunk)
        hidden, layers, heads, _, dim, _, vocab = model.shape
        work = 2.0 * batch * (tokens * layers * model.matrices + hidden * vocab) \
            + 2.0 * batch * layers * heads * dim * tokens * tokens
        print(f"prefill {batch} x {tokens}: {1e3 * seconds:.1f} ms, {batch * tokens / seconds:,.0f} tokens/s, "
              f"{work / rate / seconds:.2f} of {rate / 1e12:.0f} TFLOP/s", flush=True)


def run_short(model: Model, drafts: list, shorts: list, print) -> None:
    plain = {}
    for count, context, batch in drafts:
        if (context, batch) not in plain:
            plain[context, batch] = model.decode(batch, context)
        seconds, one = model.decode(batch, context, count), plain[context, batch]
        print(f"draft of {count} x {batch} at {context}: {1e3 * seconds:.3f} ms, {seconds / one:.2f} of a plain step's "
              f"{1e3 * one:.3f} ms", flush=True)
    for rows, context, batch in shorts:
        print(f"last {rows} x {batch} rows behind {context}: {1e3 * model.short(batch, context, rows):.3f} ms",
              flush=True)


def run_mixed(model: Model, mixed: list, print) -> None:
    hidden, layers, _, _, _, _, vocab = model.shape
    for decoding, rows in mixed:
        seconds = model.mixed(decoding, rows)
        outputs = decoding + rows // 512
        work = 2.0 * ((decoding + rows) * layers * model.matrices + outputs * hidden * vocab)
        print(f"mixed {decoding} + {rows}: {1e3 * seconds:.3f} ms, {1e6 * seconds / (decoding + rows):.2f} us a row, "
              f"products at {work / seconds / model.ranks / 1e12:.0f} TFLOP/s", flush=True)
    if len(mixed) == 1:
        times: dict[str, list[float]] = {}
        for entry in model.e.profile():
            work = entry["operations"] / max(entry["count"], 1)
            total = times.setdefault(f"{entry['op']} of {work / 1e9:,.0f} GFLOP", [0, 0])
            total[0] += entry["sum"] / max(entry["count"], 1)
            total[1] += 1
        for op, (total, count) in sorted(times.items(), key=lambda item: -item[1][0])[:14]:
            print(f"  {op:60s} {count:3d} x {1e6 * total / count:8.1f} us = {1e3 * total:7.3f} ms", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
