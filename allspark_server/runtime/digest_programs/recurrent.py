"""Models of the digest of layers with a state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .parts import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, RANK, VOCAB, finished, on_cpu, weights_of


def recurrent(weights: str, group: int, empty: Callable = on_cpu, kinds: tuple[int, ...] = (0, 1),
              **bounds: float) -> Any:
    """An executor with a model of two layers with a state: with a decay for each head, and for each channel, and with
    each kind of gates. kinds: whether each layer's decays are for each channel. bounds: lower_bound, if they have one.
    """
    e = empty()
    matrix, vector = weights_of(e, weights, group, iter(range(201, 300)))
    width = HEADS * HEAD_DIM
    columns = 2 * KV_HEADS * HEAD_DIM + width
    x, y, mixed, convolved, out, gate, last, logits = (e.add_tensor(size, rows) for size, rows in (
        (HIDDEN, False), (HIDDEN, False), (columns, False), (columns, False), (width, False), (width, False),
        (HIDDEN, True), (VOCAB, True)))
    embedding = matrix(VOCAB, HIDDEN)
    e.add_op("embedding", [], [x], [embedding], {"vocab_begin": 0})
    for channels in kinds:
        decays = HEADS * HEAD_DIM if channels else HEADS
        gates = e.add_tensor(decays + HEADS)
        e.add_op("linear", [x], [mixed], [matrix(columns, HIDDEN)], {})
        e.add_op("linear", [x], [gates], [matrix(decays + HEADS, HIDDEN, dtype="float32")], {})
        bias = [vector(columns)] if channels else []
        e.add_op("causal_conv", [mixed], [convolved], [vector(4 * columns), *bias],
                 {"taps": 4, "activated": 1 - channels})
        e.add_op("gated_delta", [convolved, gates], [out], [vector(HEADS, -3), vector(decays)],
                 {"key_dim": HEAD_DIM, "value_dim": HEAD_DIM, "channels": channels, **bounds})
        e.add_op("linear", [x], [gate], [matrix(width, HIDDEN)], {})
        e.add_op("gated_rms_norm", [out, gate], [], [vector(HEAD_DIM, 1)],
                 {"eps": 1e-4, "head_dim": HEAD_DIM, "gate": "sigmoid" if channels else "silu"})
        e.add_op("sigmoid_gate", [out, gate], [], [], {})
        e.add_op("multiply", [out, gate], [], [], {})
        e.add_op("linear", [out], [y], [matrix(HIDDEN, width)], {})
        e.add_op("add", [x, y], [x], [], {})
    return finished(e, x, last, logits, embedding)


def state_space(weights: str, group: int, empty: Callable = on_cpu) -> Any:
    """An executor with a model of two layers with a selective state space, of which one limits its steps, and an MLP
    without a gate.
    """
    e = empty()
    matrix, vector = weights_of(e, weights, group, iter(range(301, 400)))
    heads, width, columns = 2 * HEADS, 2 * HEADS * HEAD_DIM, 2 * HEADS * HEAD_DIM + 4 * RANK
    x, y, mixed, steps, out, gate, inner, squares, last, logits = (e.add_tensor(size, rows) for size, rows in (
        (HIDDEN, False), (HIDDEN, False), (columns, False), (heads, False), (width, False), (width, False),
        (INNER, False), (2, False), (HIDDEN, True), (VOCAB, True)))
    embedding = matrix(VOCAB, HIDDEN)
    e.add_op("embedding", [], [x], [embedding], {"vocab_begin": 0})
    limits: dict[str, float]
    for limits in ({}, {"least_step": 0.2, "most_step": 1.5}):
        e.add_op("linear", [x], [mixed], [matrix(columns, HIDDEN)], {})
        e.add_op("linear", [x], [steps], [matrix(heads, HIDDEN, dtype="float32")], {})
        e.add_op("ssd", [mixed, steps], [out], [vector(heads, -3), vector(heads), vector(heads, 1)],
                 {"state_dim": RANK, "head_dim": HEAD_DIM, **limits})
        e.add_op("linear", [x], [gate], [matrix(width, HIDDEN)], {})
        e.add_op("gated_rms_norm", [out, gate], [], [vector(width, 1)],
                 {"eps": 1e-4, "head_dim": HEADS * HEAD_DIM, "gate": "silu", "gate_first": 1})
        e.add_op("linear", [out], [y], [matrix(HIDDEN, width)], {})
        e.add_op("add", [x, y], [x], [], {})
    e.add_op("linear", [x], [inner], [matrix(INNER, HIDDEN)], {})
    e.add_op("relu_square", [inner], [], [], {})
    e.add_op("qk_square_sums", [inner], [squares], [], {"q_columns": INNER})
    e.add_op("all_reduce", [squares], [], [], {})
    e.add_op("qk_norm", [inner, squares], [], [vector(INNER, 1)],
             {"eps": 1e-4, "q_width": INNER, "q_columns": INNER})
    e.add_op("linear", [inner], [y], [matrix(HIDDEN, INNER)], {})
    e.add_op("add", [x, y], [x], [], {})
    return finished(e, x, last, logits, embedding)
