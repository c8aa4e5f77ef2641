"""Prints the time of the gated delta rule on this CPU: decode in parts of memory bandwidth, and prompts.

    bench_recurrent.py [--threads N] [--sequences N] [--channels] [--ssd]

One layer of Qwen3-Next's shape: 16 key heads and 32 value heads of 128; or a state space of Nemotron-3-Nano-30B-A3B's:
64 heads of 64, 8 groups of 128, which has as large a state. Decode reads each sequence's state and the rows
since the last multiple of 64 positions; the bytes are those, without caches in between. Times are the least of a step.
"""

from __future__ import annotations

import argparse

import numpy as np

from allspark_server import _native
from allspark_server.runtime.plan import NewSlot, SamplingParams, StepPlan, WorkItem

KEY_HEADS, GROUPS, HEADS, DIM, SPAN, VOCAB, PROMPT = 16, 8, 32, 128, 16, 8, 256
STATE = 4 * HEADS * DIM * DIM  # bytes


def executor(threads: int, sequences: int, channels: bool, ssd: bool):
    """An executor with one convolution and one op with a state."""
    e, rng = _native.Executor(num_threads=threads), np.random.default_rng(1)
    columns = (2 * (GROUPS if ssd else KEY_HEADS) + HEADS) * DIM
    decays = HEADS * DIM if channels else HEADS  # with as many rates, as a state space of 2 HEADS has steps

    def matrix(rows: int, width: int) -> int:
        handle = e.add_matrix(rows, width, "float32", 0)
        e.fill_matrix(handle, rng.standard_normal((rows, width), np.float32) / np.float32(width**0.5), "F32")
        return handle

    def vector(size: int, mean: float = 0.0) -> int:
        return e.add_vector(np.float32(mean) + rng.standard_normal(size, np.float32))

    x, mixed, gates, out = (e.add_tensor(width) for width in (columns, columns, decays + HEADS, HEADS * DIM))
    last, logits = e.add_tensor(HEADS * DIM, True), e.add_tensor(VOCAB, True)
    e.add_op("embedding", [], [x], [matrix(VOCAB, columns)], {"vocab_begin": 0})
    e.add_op("linear", [x], [gates], [matrix(decays + HEADS, columns)], {})
    e.add_op("causal_conv", [x], [mixed], [vector(4 * columns)], {"taps": 4, "activated": 1})
    if ssd:
        e.add_op("ssd", [mixed, gates], [out], [vector(2 * HEADS, mean) for mean in (-2, 0, 1)],
                 {"state_dim": DIM, "head_dim": DIM // 2})
    else:
        e.add_op("gated_delta", [mixed, gates], [out], [vector(HEADS, -2), vector(decays)],
                 {"key_dim": DIM, "value_dim": DIM, "channels": int(channels)})
    e.add_op("select_rows", [out], [last], [], {})
    e.add_op("linear", [last], [logits], [matrix(VOCAB, HEADS * DIM)], {})
    e.add_op("sample", [logits], [], [], {"vocab_begin": 0, "vocab_size": VOCAB})
    e.allocate(PROMPT, sequences, 2 * PROMPT, SPAN, 2 * PROMPT // SPAN * sequences, "float32")
    return e


def least(e, op: str) -> float:
    """Seconds of the op's fastest step."""
    return next(row["min"] for row in e.profile() if row["op"] == op)


def main() -> None:
    """Reads the command line and prints the times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="threads (default: %(default)s)")
    parser.add_argument("--sequences", type=int, default=24, help="sequences that decode (default: %(default)s)")
    parser.add_argument("--channels", action="store_true", help="a decay for each channel, as in Kimi Linear")
    parser.add_argument("--ssd", action="store_true", help="a selective state space instead of the gated delta rule")
    options = parser.parse_args()
    rule = "ssd" if options.ssd else "gated_delta"
    ring_row = 4 * DIM * (HEADS + (GROUPS if options.ssd else KEY_HEADS))  # bytes
    bandwidth, rate = _native.measure_roofline(threads=options.threads)
    e, count = executor(options.threads, options.sequences, options.channels, options.ssd), options.sequences
    print(f"{options.threads} threads: {bandwidth / 1e9:.1f} GB/s, {rate / 1e9:.0f} Gop/s")
    e.set_profiling(True)
    spans = 2 * PROMPT // SPAN
    for slot in range(count):
        new = [NewSlot(slot, [i % VOCAB for i in range(PROMPT)], SamplingParams(prompt_len=PROMPT).encode())]
        tables = list(range(spans * slot, spans * (slot + 1)))
        e.step(StepPlan(new=new, work=[WorkItem(slot, PROMPT, 1, spans=tables)]).encode(), False)
    for op in ("causal_conv", rule):
        print(f"prompt of {PROMPT}: {op} {least(e, op) / PROMPT * 1e6:.1f} us a row")
    for first in range(0, 64, 16):
        e.set_profiling(True)
        for _ in range(16):
            e.step(StepPlan(work=[WorkItem(slot, 1, 1) for slot in range(count)]).encode(), False)
        seconds, read = least(e, rule), count * (STATE + first * ring_row)
        print(f"decode of {count}, {first} to {first + 15} rows after a multiple: {seconds * 1e3:.2f} ms, "
              f"{read / seconds / 1e9:.1f} GB/s, {read / seconds / bandwidth:.2f} of the bandwidth")


if __name__ == "__main__":
    main()
