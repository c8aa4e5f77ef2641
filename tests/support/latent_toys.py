"""Toy programs of latent attention with an indexer, of positions or of pools of them."""

from __future__ import annotations

import numpy as np

from reference.toy import Toy

VOCAB = 53


def embedded(own: Toy, width: int) -> int:
    return own.embedding(VOCAB, width, own.rng.normal(size=(VOCAB, width)))


def indexed(own: Toy, heads: int, dim: int, selected: int, layer: int = 1) -> tuple[int, int]:
    """Rows of 31 small integers, and an indexer's selection. Its queries, weights and keys are sums of these, which no
    type of the cache rounds, so scores are exact.
    """
    def integers(*shape):
        return own.rng.integers(-1, 2, shape).astype(float)

    x = own.embedding(VOCAB, 31, integers(VOCAB, 31))
    inputs = (own.op("linear", (x,), width, (own.matrix(width, 31, integers(width, 31)),))
              for width in (heads * dim, heads, dim))
    return x, own.op("indexer", tuple(inputs), selected, layer=layer)


def selective(own: Toy, heads: int, latent: int, rope: int, selected: int) -> int:
    """Latent attention over the positions that an indexer selects."""
    x, seen = indexed(own, 18, 24, selected)
    absorbed, rotated, kept = (own.op("linear", (x,), width, (own.matrix(width, 31),))
                               for width in (heads * latent, heads * rope + 3, latent + rope))
    return own.op("latent_attention", (absorbed, rotated, kept, seen), heads * latent, layer=0, latent_dim=latent,
                  rope_dim=rope, scale=0.3 / np.sqrt(31 * (latent + rope)))


#: kind and window of the cache groups of pooled()
POOL_GROUPS = (("latent", 0), ("sliding", 7))


def pooled(own: Toy, heads: int, latent: int, rope: int, pool: int, selected: int,
           rows: tuple[int, int] = (1, 0)) -> int:
    """Latent attention to pools of positions, of which an indexer selects so many. rows: group and layer of the cache
    where what their keys are made of lies.
    """
    x = own.embedding(VOCAB, 31, own.rng.normal(size=(VOCAB, 31)))
    absorbed, rotated, kept, both, asked, weights = (
        own.op("linear", (x,), width, (own.matrix(width, 31),))
        for width in (heads * latent, heads * rope + 3, latent + rope, 2 * 12, 13 * 12, 13))
    place = {"rate": pool, "layer": 1, "cache_group": 0}
    own.op("compress", (both,), None, (own.vector(pool * 12),), eps=0, rows_layer=rows[1],
           rows_group=rows[0], **place)
    seen = own.op("indexer", (asked, weights), selected * pool + pool - 1, positions=True, **place)
    return own.op("latent_attention", (absorbed, rotated, kept, seen), heads * latent, layer=0, latent_dim=latent,
                  rope_dim=rope, scale=0.3 / np.sqrt(31 * (latent + rope)), rate=pool)


def pool_spans(slot: int, begin: int, end: int, room: int) -> dict[str, list]:
    """Spans of both groups of a slot for positions up to `end`, of which those up to `begin` have some."""
    fresh = range(-(-begin // 16), -(-end // 16))
    first, second = ([room * (2 * slot + group) + span for span in fresh] for group in (0, 1))
    return {"spans": first, "other_spans": [second]}
