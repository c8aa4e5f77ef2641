"""Models of the digest that see whole sequences: encoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from allspark_server.runtime.sampler_digest import SAMPLINGS

from .parts import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, SPAN, VOCAB, on_cpu, weights_of


def encoder(weights: str, group: int, empty: Callable = on_cpu) -> Any:
    """An executor with an encoder: a layer for each activation, of which every second one has a window, and each kind
    of pooling.
    """
    e = empty()
    matrix, vector = weights_of(e, weights, group, iter(range(401, 500)))
    columns, positions = (HEADS + 2 * KV_HEADS) * HEAD_DIM, 300
    x, y, normed, qkv, attended, inner, halves, head, logits = (e.add_tensor(size, rows) for size, rows in (
        (HIDDEN, False), (HIDDEN, False), (HIDDEN, False), (columns, False), (HEADS * HEAD_DIM, False), (INNER, False),
        (INNER // 2, False), (HIDDEN, True), (HIDDEN, True)))
    e.add_op("embedding", [], [x], [matrix(VOCAB, HIDDEN)], {"vocab_begin": 0})
    e.add_op("position_embedding", [x], [], [vector(positions * HIDDEN)], {"positions": positions, "offset": 2})
    e.add_op("position_embedding", [x], [], [vector(positions * HIDDEN), vector(2 * HIDDEN)],
             {"positions": positions, "separator": 10})
    for number, function in enumerate(("gelu", "gelu_tanh", "silu", "tanh", "relu")):
        e.add_op("layer_norm", [x], [normed], [vector(HIDDEN, 1), vector(HIDDEN)], {"eps": 1e-5})
        e.add_op("linear", [normed], [qkv], [matrix(columns, HIDDEN)], {})
        e.add_op("span_attention", [qkv], [attended], [],
                 {"layer": 0, "q_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "group": HEADS // KV_HEADS,
                  "scale": 0.2, "bidirectional": 1, "window": 33 if number % 2 else 0})
        e.add_op("linear", [attended], [y], [matrix(HIDDEN, HEADS * HEAD_DIM)], {})
        e.add_op("add", [x, y], [x], [], {})
        e.add_op("linear", [x], [inner], [matrix(INNER, HIDDEN)], {})
        e.add_op("activate", [inner], [], [], {"function": function})
        e.add_op("gelu_mul", [inner], [halves], [], {})
        e.add_op("linear", [halves], [y], [matrix(HIDDEN, INNER // 2)], {})
        e.add_op("add", [x, y], [x], [], {})
    e.add_op("pool_rows", [x], [logits], [], {"pooling": "cls"})
    for pooling in ("mean", "last"):
        e.add_op("pool_rows", [x], [head], [], {"pooling": pooling})
        e.add_op("add", [logits, head], [logits], [], {})
    e.add_op("hidden_states", [logits], [], [], {})
    e.allocate(512, len(SAMPLINGS), 512, SPAN, 64, "float32")
    return e
