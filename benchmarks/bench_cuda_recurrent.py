"""Times the ops of layers with a gated delta rule on a GPU: 6 such layers and one of attention, in the shape of
Qwen3.6-35B-A3B without its experts, random weights in bfloat16; or state spaces in the shape of Nemotron-3-Nano-30B-A3B
(64 heads of 64, 8 groups of 128); or the rule with a decay for each channel in the shape of Kimi-Linear-48B-A3B (32
heads of 128). Prints the microseconds of an op in a layer, the part of the GPU's memory bandwidth that its bytes are,
and what 30 such layers take of a step or of a prompt's token.

`python bench_cuda_recurrent.py [device] [delta|ssd|channels]`
"""

from __future__ import annotations

import sys

import numpy as np

from allspark_server import _cuda, _native
from allspark_server.runtime.plan import SAMPLE, NewSlot, SamplingParams, StepPlan, WorkItem

HIDDEN, LAYERS, KEY_HEADS, HEADS, DIM, VOCAB, SPAN, LENGTH, SLOTS, ROWS = 2048, 6, 16, 32, 128, 4096, 32, 2304, 32, 8192
STATE_HEADS, STATE_HEAD, GROUPS = 64, 64, 8  # of a state space, whose states have DIM features
OPS = ("causal_conv", "gated_delta", "ssd", "gated_rms_norm")
ALL_LAYERS = 30  # of the whole model


def model(device: int, kind: str):
    e = _cuda.Executor(device, _native.HostSampler(4))
    rng = np.random.default_rng(0)
    ssd, channels = kind == "ssd", kind == "channels"
    width, decays = STATE_HEADS * STATE_HEAD if ssd else HEADS * DIM, HEADS * (DIM if channels else 1)
    mixed_width = width + 2 * (GROUPS if ssd else HEADS if channels else KEY_HEADS) * DIM
    gate_width = STATE_HEADS if ssd else decays + HEADS

    def matrix(n: int, k: int, size: float = 0.035) -> int:
        handle = e.add_matrix(n, k, "bfloat16", 0)
        e.fill_noise(handle, size)
        return handle

    def vector(*shape: int) -> int:
        return e.add_vector(rng.normal(size=int(np.prod(shape))).astype(np.float32))

    x, mixed, convolved, gates, out, z, branch, qkv, context, last, logits = (e.add_tensor(*t) for t in (
        (HIDDEN,), (mixed_width,), (mixed_width,), (gate_width,), (width,), (width,), (HIDDEN,), (3 * 2 * DIM,),
        (2 * DIM,), (HIDDEN, 1), (VOCAB, 1)))
    e.add_op("embedding", [], [x], [matrix(VOCAB, HIDDEN, 1.0)], {"vocab_begin": 0})
    for _ in range(LAYERS):
        e.add_op("linear", [x], [mixed], [matrix(mixed_width, HIDDEN)], {})
        e.add_op("linear", [x], [gates], [matrix(gate_width, HIDDEN)], {})
        e.add_op("linear", [x], [z], [matrix(width, HIDDEN)], {})
        e.add_op("causal_conv", [mixed], [convolved], [vector(mixed_width, 4)], {"taps": 4, "activated": 1})
        if ssd:
            e.add_op("ssd", [convolved, gates], [out], [vector(STATE_HEADS) for _ in range(3)],
                     {"state_dim": DIM, "head_dim": STATE_HEAD})
            e.add_op("gated_rms_norm", [out, z], [], [vector(width)],
                     {"eps": 1e-5, "head_dim": width // GROUPS, "gate": "silu", "gate_first": 1})
        else:
            e.add_op("gated_delta", [convolved, gates], [out], [vector(HEADS), vector(decays)],
                     {"key_dim": DIM, "value_dim": DIM, "channels": int(channels)})
            e.add_op("gated_rms_norm", [out, z], [], [vector(DIM)],
                     {"eps": 1e-6, "head_dim": DIM, "gate": "sigmoid" if channels else "silu"})
        e.add_op("linear", [out], [branch], [matrix(HIDDEN, width)], {})
        e.add_op("add", [x, branch], [x], [], {})
    e.add_op("linear", [x], [qkv], [matrix(3 * 2 * DIM, HIDDEN)], {})
    e.add_op("span_attention", [qkv], [context], [], {
        "layer": 0, "q_heads": 2, "kv_heads": 2, "head_dim": DIM, "group": 1, "scale": DIM**-0.5})
    e.add_op("linear", [context], [branch], [matrix(HIDDEN, 2 * DIM)], {})
    e.add_op("add", [x, branch], [x], [], {})
    e.add_op("select_rows", [x], [last], [], {})
    e.add_op("linear", [last], [logits], [matrix(VOCAB, HIDDEN)], {})
    e.add_op("sample", [logits], [], [], {"vocab_begin": 0, "vocab_size": VOCAB})
    e.allocate(ROWS, SLOTS, LENGTH, SPAN, SLOTS * -(-LENGTH // SPAN), "bfloat16", SLOTS)
    return e


def begin(slots: int, length: int) -> bytes:
    each = -(-LENGTH // SPAN)
    block = SamplingParams(do_sample=False, prompt_len=length).encode()
    return StepPlan(
        new=[NewSlot(s, [(7 * i + s) % 1000 for i in range(length)], block) for s in range(slots)],
        work=[WorkItem(s, length, SAMPLE, spans=list(range(s * each, (s + 1) * each))) for s in range(slots)]).encode()


def report(e, what: str, rows: int, bandwidth: float) -> None:
    cells, total = [], 0.0
    for name in OPS:
        found = [row for row in e.profile() if row["op"] == name and row["count"]]
        if not found:
            continue
        row = found[len(found) // 2]
        count, least, seconds, size = (row[key] for key in ("count", "min", "sum", "bytes"))
        total += seconds / count
        cells.append(f"{name} {1e6 * seconds / count:8.1f} us (least {1e6 * least:8.1f}, "
                     f"{size / seconds / bandwidth:4.2f} of bandwidth)")
    print(f"{what:<14}", "; ".join(cells), f"; {ALL_LAYERS} layers: {1e6 * ALL_LAYERS * total / rows:.2f} us a row",
          flush=True)


def main() -> None:
    device = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    bandwidth, _ = _cuda.measure_roofline(device)
    e = model(device, sys.argv[2] if len(sys.argv) > 2 else "delta")
    print(f"{e.device_name}, {bandwidth / 1e12:.2f} TB/s", flush=True)
    for slots in (1, 8, 32):
        e.step(begin(slots, 200))
        e.set_profiling(True)
        plan = StepPlan(work=[WorkItem(s, 1, SAMPLE) for s in range(slots)]).encode()
        for _ in range(400):
            e.step(plan)
        report(e, f"decode x {slots}", slots, bandwidth)
        e.set_profiling(False)
        e.step(StepPlan(free=list(range(slots))).encode())
    for slots, length in ((8, 1024), (1, 2048)):
        e.set_profiling(True)
        for _ in range(30):
            e.step(begin(slots, length))
            e.step(StepPlan(free=list(range(slots))).encode())
        report(e, f"{slots} x {length}", slots * length, bandwidth)
        e.set_profiling(False)


if __name__ == "__main__":
    main()
