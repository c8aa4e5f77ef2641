"""Times latent attention on a GPU: layers of DeepSeek-V2-Lite's attention (16 heads, rows of 512 + 64 features in
bfloat16, hidden size 2,048) with random weights and contexts of zeros. For decode, prints the microseconds of the op in
a layer, the part of the GPU's memory bandwidth that its bytes are, and the same of whole steps (the time beyond that of
short contexts). For prompts, prints TFLOP/s. With `selected` an indexer of DeepSeek-V3.2's shape (64 heads of 128)
selects so many positions; its keys are zeros, too, so all scores are equal.

`python bench_cuda_latent.py [device [heads [selected]]]`
"""

from __future__ import annotations

import sys
import time

import numpy as np

from allspark_server import _cuda, _native
from allspark_server.runtime.plan import SAMPLE, NewSlot, SamplingParams, StepPlan, WorkItem

HIDDEN, LAYERS, NOPE, VALUE, LATENT, ROPE, VOCAB = 2048, 4, 128, 128, 512, 64, 1024
SPAN, LENGTH, SLOTS, ROWS, STEPS = 64, 16192, 32, 4096, 60
TIMED = 64  # profiles time one of so many steps
INDEX_HEADS, INDEX_DIM = 64, 128
OPS = ("head_linear", "latent_attention", "indexer", "rope", "head_norm")


def model(device: int, heads: int, selected: int = 0):
    """An executor with the layers and their projections."""
    e = _cuda.Executor(device, _native.HostSampler(4))
    rng = np.random.default_rng(0)
    e.add_cache_group("latent", 0)

    def matrix(n: int, k: int, experts: int = 1) -> int:
        handle = e.add_matrix(n, k, "bfloat16", 0, experts)
        e.fill_noise(handle, 0.035)
        return handle

    def vector(size: int) -> int:
        return e.add_vector(rng.normal(size=size).astype(np.float32))

    x, queries, kept, absorbed, recalled, attended, branch, last, logits = (e.add_tensor(*t) for t in (
        (HIDDEN,), (heads * (ROPE + NOPE),), (LATENT + ROPE,), (heads * LATENT,), (heads * LATENT,), (heads * VALUE,),
        (HIDDEN,), (HIDDEN, 1), (VOCAB, 1)))
    e.add_op("rotary_table", [], [], [vector(ROPE // 2)], {"rotary_dim": ROPE})
    e.add_op("embedding", [], [x], [matrix(VOCAB, HIDDEN)], {"vocab_begin": 0})
    for layer in range(LAYERS):
        e.add_op("linear", [x], [queries], [matrix(heads * (ROPE + NOPE), HIDDEN)], {})
        e.add_op("linear", [x], [kept], [matrix(LATENT + ROPE, HIDDEN)], {})
        e.add_op("head_norm", [kept], [], [vector(LATENT)], {"head_dim": LATENT, "offset": 0, "heads": 1, "eps": 1e-6})
        for rows, offset, count in ((queries, 0, heads), (kept, LATENT, 1)):
            e.add_op("rope", [rows], [], [], {"head_dim": ROPE, "offset": offset, "heads": count,
                                              "pairs": "interleaved"})
        e.add_op("head_linear", [queries], [absorbed], [matrix(heads * LATENT, NOPE, heads)],
                 {"heads": heads, "offset": heads * ROPE})
        seen = []
        if selected:
            index = [e.add_tensor(width) for width in (INDEX_HEADS * INDEX_DIM, INDEX_HEADS, INDEX_DIM)]
            for rows, width in zip(index, (INDEX_HEADS * INDEX_DIM, INDEX_HEADS, INDEX_DIM)):
                e.add_op("linear", [x], [rows], [matrix(width, HIDDEN)], {})
            seen = [e.add_tensor(selected)]
            e.add_op("indexer", index, seen, [], {"layer": LAYERS + layer})
        e.add_op("latent_attention", [absorbed, queries, kept, *seen], [recalled], [],
                 {"layer": layer, "latent_dim": LATENT, "rope_dim": ROPE, "scale": (NOPE + ROPE) ** -0.5})
        e.add_op("head_linear", [recalled], [attended], [matrix(heads * VALUE, LATENT, heads)],
                 {"heads": heads, "offset": 0})
        e.add_op("linear", [attended], [branch], [matrix(HIDDEN, heads * VALUE)], {})
        e.add_op("add", [x, branch], [x], [], {})
    e.add_op("select_rows", [x], [last], [], {})
    e.add_op("linear", [last], [logits], [matrix(VOCAB, HIDDEN)], {})
    e.add_op("sample", [logits], [], [], {"vocab_begin": 0, "vocab_size": VOCAB})
    e.allocate(ROWS, SLOTS, LENGTH, SPAN, SLOTS * (LENGTH // SPAN), "bfloat16", SLOTS)
    return e


def begin(slots: int, rows: int, cached: int) -> bytes:
    """A step that begins sequences whose first positions count as cached."""
    each, length = LENGTH // SPAN, cached + rows
    block = SamplingParams(do_sample=False, prompt_len=length).encode()
    return StepPlan(
        new=[NewSlot(s, [(7 * i + s) % VOCAB for i in range(length)], block, cached) for s in range(slots)],
        work=[WorkItem(s, rows, SAMPLE, spans=list(range(s * each, (s + 1) * each))) for s in range(slots)]).encode()


def end(e, slots: int) -> None:
    e.step(StepPlan(free=list(range(slots))).encode())


def op_times(e) -> dict[str, tuple[float, float]]:
    """Of each op in one layer: the least seconds, and bytes a second at the mean time."""
    found = {}
    for row in e.profile():
        if row["count"] and row["op"] in OPS and row["op"] not in found:
            found[row["op"]] = row["min"], row["bytes"] / row["sum"]
    return found


def decode(e, slots: int, context: int) -> tuple[float, dict]:
    """Seconds of a step with graphs, and the ops' times."""
    e.step(begin(slots, 1, context))
    plan = StepPlan(work=[WorkItem(s, 1, SAMPLE) for s in range(slots)]).encode()
    for _ in range(10):
        e.step(plan)
    times = []
    for _ in range(STEPS):
        started = time.perf_counter()
        e.step(plan)
        times.append(time.perf_counter() - started)
    e.set_profiling(True)
    for _ in range(TIMED):
        e.step(plan)
    found = op_times(e)
    e.set_profiling(False)
    end(e, slots)
    return float(np.median(times)), found


def main() -> None:
    """Prints the table."""
    device, heads, selected = (int(word) for word in (*sys.argv[1:], *("0", "16", "0")[len(sys.argv) - 1:]))
    bandwidth, _ = _cuda.measure_roofline(device)
    e = model(device, heads, selected)
    print(f"{e.device_name}, {bandwidth / 1e12:.2f} TB/s, {heads} heads, {selected or 'all'} positions", flush=True)
    for slots in (1, 8, 32):
        short, _ = decode(e, slots, SPAN)
        for context in (2048, 16000):
            size = slots * min(context, selected or context) * (LATENT + ROPE) * 2
            size += slots * context * INDEX_DIM * 2 if selected else 0
            seconds, found = decode(e, slots, context)
            layer = (seconds - short) / LAYERS
            print(f"decode x {slots} at {context}: step {1e6 * seconds:.0f} us (short {1e6 * short:.0f}); beyond short "
                  f"{1e6 * layer:.1f} us a layer, {size / layer / bandwidth:.2f} of bandwidth; " + "; ".join(
                      f"{op} {1e6 * least:.1f} us ({rate / bandwidth:.2f})" for op, (least, rate) in found.items()),
                  flush=True)
    for slots, rows, cached in ((4, 1024, 0), (1, 4096, 0), (1, 2048, 13952)):
        e.set_profiling(True)
        plan = begin(slots, rows, cached)
        for _ in range(TIMED):
            e.step(plan)
            end(e, slots)
            if found := op_times(e):
                break
        e.set_profiling(False)
        seen = slots * sum(min(cached + row + 1, selected or LENGTH) for row in range(rows))
        least = found["latent_attention"][0]
        flops = 2 * seen * heads * (2 * LATENT + ROPE)
        products = 2 * slots * rows * heads * LATENT * NOPE
        print(f"prompts {slots} x {rows} after {cached}: attention {1e3 * least:.2f} ms, {flops / least / 1e12:.0f} "
              f"TFLOP/s; head_linear {1e6 * found['head_linear'][0]:.0f} us, "
              f"{products / found['head_linear'][0] / 1e12:.0f} TFLOP/s"
              + (f"; indexer {1e3 * found['indexer'][0]:.2f} ms" if selected else ""), flush=True)


if __name__ == "__main__":
    main()
