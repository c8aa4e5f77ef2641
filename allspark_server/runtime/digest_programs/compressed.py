"""A model of the digest with attention over compressed positions, residual streams and a table of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from allspark_server.runtime.native import native_library

from .parts import EXPERTS, HEAD_DIM, HEADS, HIDDEN, INNER, TOP, VOCAB, finished, on_cpu, weights_of

STREAMS, WINDOW, ROTATED, SELECTED = 3, 29, 16, 9
#: kind and window of the cache groups
GROUPS = (("full", 0), ("full", 0), ("sliding", 40), ("sliding", 50))


def compressed(weights: str, group: int, cache: str, empty: Callable = on_cpu, dim: int = HEAD_DIM,
               count: int = STREAMS) -> Any:
    """An executor with two layers: one whose entries overlap and of which an indexer selects, with experts by a table;
    and one with entries of all its positions, with experts that a router chooses. A third has a window alone. dim: of
    a head. count: of residual streams; of four the sum is normed.
    """
    native, e = native_library(), empty()
    matrix, vector = weights_of(e, weights, group, iter(range(901, 1000)))
    wide, every = count * HIDDEN, count * (2 + count)
    x, twice, streams, normed, mixing, pre, h, y, queries, kept, attended, pair, inner, last, logits = (
        e.add_tensor(size, rows) for size, rows in (
            (HIDDEN, False), (2 * HIDDEN, False), (wide, False), (wide, False), (every, False), (count, False),
            (HIDDEN, False), (HIDDEN, False), (HEADS * dim, False), (dim, False), (HEADS * dim, False),
            (2 * INNER, False), (INNER, False), (HIDDEN, True), (VOCAB, True)))
    for kind, window in GROUPS:
        e.add_cache_group(kind, window)
    embedding = matrix(VOCAB, HIDDEN)
    for table in (0, 1):
        frequencies = np.ldexp(np.float32(1), -np.arange(table, ROTATED // 2 + table, dtype=np.int32))
        e.add_op("rotary_table", [], [], [e.add_vector(frequencies)], {"rotary_dim": ROTATED, "table": table})
    e.add_op("embedding", [], [x], [embedding], {"vocab_begin": 0})
    e.add_op("concat", [x, x], [twice], [], {})
    e.add_op("concat", [twice, twice if count == 4 else x], [streams], [], {})
    merged = e.add_tensor(HIDDEN, False) if count == 4 else h

    def merge(out: int, behind: bool = False) -> None:
        """The weighted sum of the streams, whose weights are then in `mixing`."""
        found, width = (pre, count) if behind else (mixing, every)
        e.add_op("rms_norm", [streams], [normed], [vector(wide, 1)], {"eps": 1e-6})
        e.add_op("linear", [normed], [found], [matrix(width, wide, dtype="float32")], {})
        e.add_op("stream_weights", [found], [], [vector(1 if behind else 3, 1), vector(width)],
                 {"streams": count, "iterations": 4, "eps": 1e-4})
        e.add_op("merge_streams", [streams, found], [out if behind else merged], [], {})
        if merged != h and not behind:
            e.add_op("rms_norm", [merged], [h], [vector(HIDDEN, 1)], {"eps": 1e-6})

    def rotate(rows: int, heads: int, table: int, size: int = dim, **more: int) -> None:
        e.add_op("rope", [rows], [], [], {
            "head_dim": size, "rotary_dim": ROTATED, "skip": size - ROTATED, "offset": 0, "heads": heads,
            "table": table, "pairs": "interleaved", **more})

    def compress(rate: int, width: int, table: int, place: dict[str, int], overlapping: int = 0) -> None:
        size = (1 + overlapping) * width
        both = e.add_tensor(2 * size, False)
        e.add_op("linear", [h], [both], [matrix(2 * size, HIDDEN)], {})
        e.add_op("compress", [both], [], [vector(rate * size), vector(width, 1)], {
            "rate": rate, "eps": 1e-6, "rotary_dim": ROTATED, "table": table, "overlapping": overlapping, **place})

    def attend(layer: int, table: int, **more: int) -> None:
        seen = [queries, kept]
        e.add_op("linear", [h], [queries], [matrix(HEADS * dim, HIDDEN)], {})
        e.add_op("linear", [h], [kept], [matrix(dim, HIDDEN)], {})
        for rows, heads in ((queries, HEADS), (kept, 1)):
            rotate(rows, heads, table)
        if layer == 0:
            compress(4, dim, table, {"layer": 0, "cache_group": 0, "rows_layer": 0, "rows_group": 3}, 1)
            compress(4, 24, table, {"layer": 1, "cache_group": 0, "rows_layer": 1, "rows_group": 3}, 1)
            asked, factors, chosen = (e.add_tensor(size, False) for size in (HEADS * 24, HEADS, SELECTED))
            e.add_op("linear", [h], [asked], [matrix(HEADS * 24, HIDDEN)], {})
            rotate(asked, HEADS, table, 24)
            e.add_op("linear", [h], [factors], [matrix(HEADS, HIDDEN)], {})
            e.add_op("indexer", [asked, factors], [chosen], [], {"layer": 1, "cache_group": 0, "rate": 4})
            seen.append(chosen)
        elif layer == 1:
            compress(11, dim, table, {"layer": 2, "cache_group": 1, "rows_layer": 2, "rows_group": 3})
        e.add_op("compressed_attention", seen, [attended], [vector(HEADS)],
                 {"layer": layer, "cache_group": 2, "window": WINDOW, "scale": 0.125, **more})
        rotate(attended, HEADS, table, inverse=1)
        e.add_op("linear", [attended], [y], [matrix(HIDDEN, HEADS * dim)], {})

    def experts(by_token: int) -> None:
        routed = e.add_row_set(native.ALL_ROWS, TOP)
        router, scores = e.add_tensor(EXPERTS, False), e.add_tensor(1, routed)
        both, activated, out = (e.add_tensor(size, routed) for size in (2 * INNER, INNER, HIDDEN))
        table = (np.arange(VOCAB)[:, None] * 5 + np.arange(TOP) * 2) % EXPERTS
        chosen = e.add_vector(table.ravel().astype(np.float32)) if by_token else vector(EXPERTS)
        e.add_op("linear", [h], [router], [matrix(EXPERTS, HIDDEN, dtype="float32")], {})
        e.add_op("router", [router], [scores], [chosen], {
            "top_k": TOP, "scores": "sqrt_softplus", "normalized": 1, "scale": 1.5, "by_token": by_token})
        e.add_op("expert_linear", [h], [both], [matrix(EXPERTS * 2 * INNER, HIDDEN, EXPERTS)], {"experts": EXPERTS})
        e.add_op("limited_silu_mul", [both], [activated], [], {"limit": 0.4})
        e.add_op("expert_linear", [activated], [out], [matrix(EXPERTS * HIDDEN, INNER, EXPERTS)], {"experts": EXPERTS})
        e.add_op("combine_experts", [out, scores], [y], [], {})

    def mlp() -> None:
        e.add_op("linear", [h], [pair], [matrix(2 * INNER, HIDDEN)], {})
        e.add_op("limited_silu_mul", [pair], [inner], [], {"limit": 0.3})
        e.add_op("linear", [inner], [y], [matrix(HIDDEN, INNER)], {})

    parts: list[Callable[[], None]] = [
        lambda: attend(0, 0, rate=4, entry_layer=0, entry_group=0), lambda: experts(1),
        lambda: attend(1, 1, rate=11, entry_layer=2, entry_group=1), lambda: experts(0), lambda: attend(2, 0), mlp]
    for part in parts:
        merge(h)
        part()
        e.add_op("mix_streams", [streams, y, mixing], [], [], {})
    merge(x, behind=True)
    return finished(e, x, last, logits, embedding, cache)
