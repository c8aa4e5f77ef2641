"""Toy programs of latent attention with an indexer."""

from __future__ import annotations

import numpy as np

from reference.toy import Toy

VOCAB = 53


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
