"""Prints the time of latent attention's decode on this CPU, and its part of memory bandwidth.

    bench_latent.py [--threads N] [--context N] [--sequences N] [--heads N] [--isa NAME] [--cache TYPE]

One layer of DeepSeek-V2-Lite's shape: 16 heads, a row of 512 + 64 features a token. The bytes are those of the rows.
Times are the least of a step.
"""

from __future__ import annotations

import argparse

import numpy as np

from allspark_server import _native
from allspark_server.runtime.plan import NewSlot, SamplingParams, StepPlan, WorkItem

LATENT, ROPE, SPAN, VOCAB, CHUNK, STEPS = 512, 64, 128, 8, 512, 12


def main() -> None:
    """Reads the command line and prints the times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2, help="threads (default: %(default)s)")
    parser.add_argument("--context", type=int, default=16000, help="positions (default: %(default)s)")
    parser.add_argument("--sequences", type=int, default=8, help="sequences that decode (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=16, help="query heads (default: %(default)s)")
    parser.add_argument("--isa", default="", help="instruction set (default: the best one)")
    parser.add_argument("--cache", default="bfloat16", help="type of the cache (default: %(default)s)")
    o = parser.parse_args()
    if o.isa:
        _native.use_isa(o.isa)
    e, rng, spans = _native.Executor(num_threads=o.threads), np.random.default_rng(1), (o.context + STEPS) // SPAN + 1
    e.add_cache_group("latent", 0)

    def table(width: int, rows: int = VOCAB) -> int:
        handle = e.add_matrix(rows, width, "float32", 0)
        e.fill_matrix(handle, rng.standard_normal((rows, width), np.float32), "F32")
        return handle

    absorbed, rotated, kept = (e.add_tensor(width) for width in (o.heads * LATENT, o.heads * ROPE, LATENT + ROPE))
    for tensor, width in ((absorbed, o.heads * LATENT), (rotated, o.heads * ROPE), (kept, LATENT + ROPE)):
        e.add_op("embedding", [], [tensor], [table(width)], {"vocab_begin": 0})
    out, last, logits = e.add_tensor(o.heads * LATENT), e.add_tensor(o.heads * LATENT, True), e.add_tensor(VOCAB, True)
    e.add_op("latent_attention", [absorbed, rotated, kept], [out], [],
             {"layer": 0, "latent_dim": LATENT, "rope_dim": ROPE, "scale": 0.01})
    e.add_op("select_rows", [out], [last], [], {})
    e.add_op("linear", [last], [logits], [table(o.heads * LATENT)], {})
    e.add_op("sample", [logits], [], [], {"vocab_begin": 0, "vocab_size": VOCAB})
    e.allocate(CHUNK, o.sequences, o.context + STEPS, SPAN, spans * o.sequences, o.cache)
    for slot in range(o.sequences):
        sampling = SamplingParams(do_sample=False, prompt_len=o.context).encode()
        new = [NewSlot(slot, rng.integers(0, VOCAB, o.context).tolist(), sampling, 0)]
        for begin in range(0, o.context, CHUNK):
            rows = min(CHUNK, o.context - begin)
            ends = begin + rows == o.context
            own = list(range(slot * spans, (slot + 1) * spans)) if not begin else []
            e.step(StepPlan(new=new, work=[WorkItem(slot, rows, 1 if ends else 0, spans=own)]).encode(), False)
            new = []
    e.set_profiling(True)
    for _ in range(STEPS - 2):
        e.step(StepPlan(work=[WorkItem(slot, 1, 1) for slot in range(o.sequences)]).encode(), False)
    seconds = next(row["min"] for row in e.profile() if row["op"] == "latent_attention")
    read = o.sequences * o.context * _native.latent_span_bytes(SPAN, LATENT, ROPE, o.cache) // SPAN
    bandwidth, _ = _native.measure_roofline(threads=o.threads)
    print(f"{_native.isa()}, {o.cache}, {o.heads} heads, {o.threads} threads: {seconds * 1e3:.2f} ms, "
          f"{read / seconds / 1e9:.1f} GB/s, {read / seconds / bandwidth:.2f} of the bandwidth")


if __name__ == "__main__":
    main()
