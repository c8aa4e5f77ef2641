"""Models of the digest with other forms of attention: latent, with an indexer, and heads of several sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from allspark_server.runtime.native import native_library

from .parts import EXPERTS, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, TOP, VOCAB, finished, on_cpu, weights_of


def latent(weights: str, group: int, cache: str, empty: Callable = on_cpu,
           row: tuple[int, int] = (HEAD_DIM // 2, 3 * HEAD_DIM), selected: int = 0, pool: int = 0) -> Any:
    """An executor with a layer of latent attention, and experts in groups that count as much as their best one. row:
    features of rotated keys and of latents. selected: how many positions an indexer selects; 0: there is none. pool: it
    selects so many positions at a time; then the layer's output and its input are two streams, whose mean follows.
    """
    native, e = native_library(), empty()
    matrix, vector = weights_of(e, weights, group, iter(range(301, 400)))
    rope, latent = row
    x, y, queries, kept, absorbed, recalled, context, last, logits = (e.add_tensor(size, rows) for size, rows in (
        (HIDDEN, False), (HIDDEN, False), (HEADS * (rope + HEAD_DIM), False), (latent + rope, False),
        (HEADS * latent, False), (HEADS * latent, False), (HEADS * HEAD_DIM, False), (HIDDEN, True), (VOCAB, True)))
    e.add_cache_group("latent", 0)
    e.add_cache_group("latent", 0)
    if pool:
        e.add_cache_group("sliding", pool)
    embedding = matrix(VOCAB, HIDDEN)
    frequencies = e.add_vector(np.ldexp(np.float32(1), -np.arange(rope // 2, dtype=np.int32)))
    e.add_op("rotary_table", [], [], [frequencies], {"rotary_dim": rope})
    e.add_op("embedding", [], [x], [embedding], {"vocab_begin": 0})
    e.add_op("linear", [x], [queries], [matrix(HEADS * (rope + HEAD_DIM), HIDDEN)], {})
    e.add_op("linear", [x], [kept], [matrix(latent + rope, HIDDEN)], {})
    e.add_op("head_norm", [kept], [], [vector(latent, 1)], {"head_dim": latent, "offset": 0, "heads": 1, "eps": 1e-6})
    for rows, offset, heads in ((queries, 0, HEADS), (kept, latent, 1)):
        e.add_op("rope", [rows], [], [], {"head_dim": rope, "offset": offset, "heads": heads, "pairs": "interleaved"})
    e.add_op("head_linear", [queries], [absorbed], [matrix(HEADS * latent, HEAD_DIM, HEADS)],
             {"heads": HEADS, "offset": HEADS * rope})
    seen: list[list[int]] = [[], []]
    rate: dict[str, int] = {}
    if selected:
        wide = (HEADS * HEAD_DIM, HEADS, HEAD_DIM)
        index = [e.add_tensor(width, False) for width in wide]
        for tensor, width in zip(index, wide):
            e.add_op("linear", [x], [tensor], [matrix(width, HIDDEN)], {})
        normed = e.add_tensor(HEAD_DIM, False)
        e.add_op("layer_norm", [index[2]], [normed], [vector(HEAD_DIM, 1), vector(HEAD_DIM)], {"eps": 1e-6})
        index[2] = normed
        if pool:
            rate["rate"] = pool
        seen = [[e.add_tensor(selected + max(0, pool - 1), False)] for _ in seen]
        for number, output in enumerate(seen):
            place = {"layer": 1, "cache_group": number}
            if pool:
                gates, both = e.add_tensor(HEAD_DIM, False), e.add_tensor(2 * HEAD_DIM, False)
                e.add_op("linear", [x], [gates], [matrix(HEAD_DIM, HIDDEN)], {})
                e.add_op("concat", [normed, gates], [both], [], {})
                e.add_op("compress", [both], [], [vector(pool * HEAD_DIM)],
                         {"eps": 0, "rows_layer": number, "rows_group": 2, **rate, **place})
                e.add_op("indexer", index[:2], output, [], {"positions": 1, **rate, **place})
            else:
                e.add_op("indexer", index, output, [], place)
    for number in (0, 1):
        e.add_op("latent_attention", [absorbed, queries, kept, *seen[number]], [recalled], [],
                 {"layer": 0, "cache_group": number, "latent_dim": latent, "rope_dim": rope, "scale": 0.125, **rate})
        if not number:
            e.add_op("add", [absorbed, recalled], [absorbed], [], {})
    e.add_op("head_linear", [recalled], [context], [matrix(HEADS * HEAD_DIM, latent, HEADS)],
             {"heads": HEADS, "offset": 0})
    e.add_op("linear", [context], [y], [matrix(HIDDEN, HEADS * HEAD_DIM)], {})
    if pool:
        streams = e.add_tensor(2 * HIDDEN, False)
        e.add_op("concat", [x, y], [streams], [], {})
        e.add_op("merge_streams", [streams], [x], [], {})
    else:
        e.add_op("add", [x, y], [x], [], {})
    routed, experts = e.add_row_set(native.ALL_ROWS, TOP), 2 * EXPERTS
    router = e.add_tensor(experts)
    scores, out = e.add_tensor(1, routed), e.add_tensor(HIDDEN, routed)
    e.add_op("linear", [x], [router], [matrix(experts, HIDDEN, dtype="float32")], {})
    e.add_op("router", [router], [scores], [],
             {"top_k": TOP, "groups": EXPERTS, "top_groups": 4, "group_scores": "largest"})
    e.add_op("expert_linear", [x], [out], [matrix(experts * HIDDEN, HIDDEN, experts)], {"experts": experts})
    e.add_op("combine_experts", [out, scores], [y], [], {})
    e.add_op("add", [x, y], [x], [], {})
    return finished(e, x, last, logits, embedding, cache)


def several_heads(weights: str, group: int, cache: str, empty: Callable = on_cpu, large: int = HEAD_DIM) -> Any:
    """An executor with heads of two sizes in two cache groups, normed values that are keys, and a layer that reads
    another one's keys; factors from weights, products with some columns of a tensor, and experts with scales. large:
    features of the larger heads.
    """
    native, e = native_library(), empty()
    matrix, vector = weights_of(e, weights, group, iter(range(501, 600)))
    small = HEAD_DIM // 2
    x, y, qkv, context, queries, keys, joined, wide, columns, router, last, logits = (
        e.add_tensor(size, rows) for size, rows in (
            (HIDDEN, False), (HIDDEN, False), ((HEADS + 2 * KV_HEADS) * small, False), (HEADS * small, False),
            (HEADS * large, False), (KV_HEADS * large, False), ((HEADS + 2 * KV_HEADS) * large, False),
            (HEADS * large, False), (2 * HIDDEN, False), (EXPERTS, False), (HIDDEN, True), (VOCAB, True)))
    e.add_cache_group("full", 0)
    e.add_cache_group("sliding", 48)
    embedding = matrix(VOCAB, HIDDEN)
    e.add_op("rotary_table", [], [], [e.add_vector(np.ldexp(np.float32(1), -np.arange(small // 2, dtype=np.int32)))],
             {"rotary_dim": small})
    e.add_op("embedding", [], [x], [embedding], {"vocab_begin": 0})

    def attend(rows: int, out: int, dim: int, kv_heads: int, place: dict[str, int]) -> None:
        attributes = {"kv_heads": kv_heads} if kv_heads else {}
        e.add_op("head_norm", [rows], [], [vector(dim, 1)], {"head_dim": dim, "offset": 0, "heads": HEADS, "eps": 1e-6})
        if kv_heads:
            e.add_op("head_norm", [rows], [], [vector(dim, 1)],
                     {"head_dim": dim, "offset": (HEADS + kv_heads) * dim, "heads": kv_heads, "eps": 1e-6})
        e.add_op("span_attention", [rows], [out], [], {
            "q_heads": HEADS, "head_dim": dim, "group": HEADS // KV_HEADS, "scale": 1, **attributes, **place})
        e.add_op("linear", [out], [y], [matrix(HIDDEN, HEADS * dim)], {})
        e.add_op("add", [x, y], [x], [], {})

    e.add_op("linear", [x], [qkv], [matrix((HEADS + 2 * KV_HEADS) * small, HIDDEN)], {})
    e.add_op("rope", [qkv], [], [], {"head_dim": small, "offset": 0, "heads": HEADS + KV_HEADS})
    attend(qkv, context, small, KV_HEADS, {"layer": 0, "cache_group": 1, "window": 40})
    e.add_op("linear", [x], [queries], [matrix(HEADS * large, HIDDEN)], {})
    e.add_op("linear", [x], [keys], [matrix(KV_HEADS * large, HIDDEN)], {})
    e.add_op("concat", [queries, keys, keys], [joined], [], {})
    attend(joined, wide, large, KV_HEADS, {"layer": 0})
    e.add_op("linear", [x], [queries], [matrix(HEADS * large, HIDDEN)], {})
    attend(queries, wide, large, 0, {"layer": 0})
    e.add_op("linear", [x], [columns], [matrix(2 * HIDDEN, HIDDEN)], {})
    e.add_op("multiply", [y, columns], [], [], {"offset": 37})
    e.add_op("concat", [y, x], [columns], [], {})
    e.add_op("linear", [columns], [y], [matrix(HIDDEN, 2 * HIDDEN)], {})
    e.add_op("add", [x, y], [x], [], {})
    routed = e.add_row_set(native.ALL_ROWS, TOP)
    scores, out = e.add_tensor(1, routed), e.add_tensor(HIDDEN, routed)
    e.add_op("linear", [x], [router], [matrix(EXPERTS, HIDDEN, dtype="float32")], {})
    e.add_op("router", [router], [scores], [vector(EXPERTS), vector(EXPERTS, 1)], {"top_k": TOP, "expert_scales": 1})
    e.add_op("expert_linear", [x], [out], [matrix(EXPERTS * HIDDEN, HIDDEN, EXPERTS)], {"experts": EXPERTS})
    e.add_op("combine_experts", [out, scores], [y], [], {})
    e.add_op("add", [x, y], [x], [], {})
    e.add_op("scale", [x], [], [vector(1, 0.75)], {})
    return finished(e, x, last, logits, embedding, cache)
