"""Toy programs (reference/toy.py) with layers that keep a state, for the tests of every backend."""

from __future__ import annotations

from reference.toy import Toy

VOCAB = 53
#: value heads, key heads, and their dimensions
SHAPES = [(1, 1, 1, 1), (4, 2, 20, 12), (6, 6, 7, 33), (8, 2, 64, 64), (3, 1, 128, 128)]


def with_conv(own, x, channels, taps, bias, activated):
    weights = (own.vector(channels * taps), own.vector(channels)) if bias else (own.vector(channels * taps),)
    return own.op("causal_conv", (x,), channels, weights, taps=taps, activated=activated)


def with_delta(own, x, heads, key_heads, key, value, channels, rate=0.0):
    """rate: the mean of A_log."""
    decays = heads * key if channels else heads
    mixed = own.op("linear", (x,), 2 * key_heads * key + heads * value,
                   (own.matrix(2 * key_heads * key + heads * value, own.program.tensors[x][0]),))
    gates = own.op("linear", (x,), decays + heads, (own.matrix(decays + heads, own.program.tensors[x][0]),))
    return own.op("gated_delta", (mixed, gates), heads * value, (own.vector(rate + own.rng.normal(size=heads)),
                                                                 own.vector(decays)),
                  key_dim=key, value_dim=value, channels=channels)


def recurrent_model(seed: int, channels: bool):
    """Two layers with states beside one of attention."""
    own = Toy(seed)
    x = own.embedding(VOCAB, 24, own.rng.normal(size=(VOCAB, 24)))
    for layer in range(2):
        own.op("add", (x, with_conv(own, x, 24, 4, bool(layer), True)))
        y = with_delta(own, x, 4, 2, 20, 12, channels, -1.0)
        own.op("add", (x, own.op("linear", (y,), 24, (own.matrix(24, 48),))))
    qkv = own.op("linear", (x,), 40, (own.matrix(40, 24),))
    own.op("add", (x, own.op("linear", (own.attention(qkv, 3, 1, 8),), 24, (own.matrix(24, 24),))))
    own.finish(own.op("linear", (x,), VOCAB, (own.matrix(VOCAB, 24),)))
    return own
