"""Toy programs with the ops of DeepSeek-V4: residual streams, rotations of a head's last features, routers with a table
of experts, and attention over compressed positions.
"""

from __future__ import annotations

import numpy as np

from allspark_server import _native
from reference.toy import ALL, Toy
from support.latent_toys import VOCAB, embedded
from support.seed import SEED


def several_streams(streams: int, iterations: int, width: int) -> Toy:
    own, every = Toy(SEED), streams * (2 + streams)
    x = embedded(own, streams * width)
    weights = own.op("linear", (x,), every, (own.matrix(every, streams * width),))
    own.op("stream_weights", (weights,), None, (own.vector(3), own.vector(every)), streams=streams,
           iterations=iterations, eps=1e-3)
    y = own.op("merge_streams", (x, weights), width)
    own.op("mix_streams", (x, y, weights))
    pre = own.op("linear", (x,), streams, (own.matrix(streams, streams * width),))
    own.op("stream_weights", (pre,), None, (own.vector(1), own.vector(streams)), streams=streams, iterations=1,
           eps=1e-3)
    own.op("add", (y, own.op("merge_streams", (x, pre), width)))
    own.finish(own.op("concat", (x, y), (streams + 1) * width))
    return own


def normed_streams(streams: int, iterations: int, width: int, seed: int = SEED) -> Toy:
    """Two parts of a layer, as models have them: norms before the products, and of the streams' sum."""
    own, every = Toy(seed), streams * (2 + streams)
    x = embedded(own, streams * width)
    for _ in range(2):
        normed = own.op("rms_norm", (x,), streams * width, (own.vector(streams * width),), eps=1e-5)
        weights = own.op("linear", (normed,), every, (own.matrix(every, streams * width),))
        own.op("stream_weights", (weights,), None, (own.vector(3), own.vector(every)), streams=streams,
               iterations=iterations, eps=1e-3)
        h = own.op("rms_norm", (own.op("merge_streams", (x, weights), width),), width, (own.vector(width),), eps=1e-5)
        own.op("mix_streams", (x, own.op("linear", (h,), width, (own.matrix(width, width),)), weights))
    own.finish(x)
    return own


def rotated(dim: int, rotary_dim: int, pairs: str) -> Toy:
    """The last features of three heads, there and, half as large, back."""
    own = Toy(SEED)
    x = embedded(own, 1 + 3 * dim)
    own.rotary(rotary_dim)
    place = {"offset": 1, "heads": 3, "head_dim": dim, "rotary_dim": rotary_dim, "skip": dim - rotary_dim}
    own.op("rope", (x,), pairs=pairs, **place)
    y = own.op("scale", (own.op("concat", (x, x), 2 * (1 + 3 * dim)),), factor=0.5)
    own.op("rope", (y,), pairs=pairs, inverse=True, **place)
    own.finish(y)
    return own


def limited(width: int) -> Toy:
    own = Toy(SEED)
    both = own.embedding(VOCAB, 2 * width, 4 * own.rng.normal(size=(VOCAB, 2 * width)))
    own.finish(own.op("limited_silu_mul", (both,), width, limit=1.5))
    return own


def routers(by_token: bool, normalized: bool, selected_first: bool, experts: int = 7, top: int = 3) -> Toy:
    """Experts by roots of softplus, or by a table. selected_first: only rows with outputs have experts."""
    own = Toy(SEED)
    x, rows = embedded(own, 31), ALL
    if selected_first:
        x, rows = own.op("select_rows", (x,), 31, rows=_native.OUTPUT_ROWS), _native.OUTPUT_ROWS
    routed = own.program.add_row_set(rows, top)
    logits = own.op("linear", (x,), experts, (own.matrix(experts, 31, 2 * own.rng.normal(size=(experts, 31))),))
    table = own.rng.permuted(np.tile(np.arange(experts), (VOCAB, 1)), axis=1)[:, :top].ravel()
    weights = (own.vector(table) if by_token else own.vector(experts),)
    scores = own.op("router", (logits,), 1, weights, rows=routed, top_k=top, scores="sqrt_softplus", scale=1.7,
                    normalized=normalized, by_token=by_token)
    stack = own.matrix(experts * 31, 31)
    y = own.op("expert_linear", (x,), 31, (stack,), rows=routed, experts=experts)
    y = own.op("combine_experts", (y, scores), 31, rows=rows)
    if selected_first:
        own.op("sample", (y,), vocab_begin=0, vocab_size=31)
    else:
        own.finish(y)
    return own


def with_experts_of_a_token(experts: list) -> Toy:
    """A router whose table has these experts, of five, for token 2."""
    own = Toy(SEED)
    x = embedded(own, 7)
    routed = own.program.add_row_set(ALL, 3)
    logits = own.op("linear", (x,), 5, (own.matrix(5, 7),))
    table = np.tile([0.0, 1, 2], (VOCAB, 1))
    table[2] = experts
    scores = own.op("router", (logits,), 1, (own.vector(table.ravel()),), rows=routed, top_k=3, scores="sqrt_softplus",
                    by_token=True)
    y = own.op("expert_linear", (x,), 7, (own.matrix(5 * 7, 7),), rows=routed, experts=5)
    own.finish(own.op("combine_experts", (y, scores), 7, rows=ALL))
    return own


GROUPS = (("full", 0), ("sliding", 30), ("sliding", 80))


def with_entries(own: Toy, x: int, dim: int, rate: int, overlapping: bool, rotary_dim: int, number: int) -> None:
    width = dim * (2 if overlapping else 1)
    both = own.op("linear", (x,), 2 * width, (own.matrix(2 * width, 31),))
    own.op("compress", (both,), None, (own.vector(rate * width), own.vector(dim)), rate=rate, overlapping=overlapping,
           eps=1e-6, rotary_dim=rotary_dim, rows_layer=number, rows_group=2, layer=number, cache_group=0)


def compressed(own: Toy, heads: int, dim: int, rate: int, selected: int = 0, overlapping: bool = False,
               rotary_dim: int = 4) -> int:
    """Attention over a window of 29 and entries; selected: how many an indexer selects."""
    x = own.embedding(VOCAB, 31, own.rng.normal(size=(VOCAB, 31)))
    own.rotary(rotary_dim)
    queries, kept = (own.op("linear", (x,), width, (own.matrix(width, 31),)) for width in (heads * dim, dim))
    seen = [queries, kept]
    if rate:
        with_entries(own, x, dim, rate, overlapping, rotary_dim, 0)
    if selected:
        with_entries(own, x, 12, rate, overlapping, rotary_dim, 1)
        asked, weights = (own.op("linear", (x,), width, (own.matrix(width, 31),)) for width in (13 * 12, 13))
        seen.append(own.op("indexer", (asked, weights), selected, layer=1, cache_group=0, rate=rate))
    return own.op("compressed_attention", seen, heads * dim, (own.vector(heads),), layer=0, cache_group=1, window=29,
                  scale=0.3, rate=rate, entry_layer=0, entry_group=0)


def spans_of(slot: int, begin: int, end: int, room: int) -> dict[str, list]:
    """Spans of all groups of a slot for positions up to `end`, of which those up to `begin` have some."""
    fresh = range(-(-begin // 16), -(-end // 16))
    first, *others = ([room * (3 * slot + group) + span for span in fresh] for group in range(3))
    return {"spans": first, "other_spans": others}
