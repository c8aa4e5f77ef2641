"""Toy programs (reference/toy.py) with layers that keep a state, for the tests of every backend."""

from __future__ import annotations

from reference.toy import Toy

VOCAB = 53
#: value heads, key heads, and their dimensions
SHAPES = [(1, 1, 1, 1), (4, 2, 20, 12), (6, 6, 7, 33), (8, 2, 64, 64), (3, 1, 128, 128)]


def with_conv(own, x, channels, taps, bias, activated):
    weights = (own.vector(channels * taps), own.vector(channels)) if bias else (own.vector(channels * taps),)
    return own.op("causal_conv", (x,), channels, weights, taps=taps, activated=activated)


def with_delta(own, x, heads, key_heads, key, value, channels, rate=0.0, bound=0.0):
    """rate: the mean of A_log. bound: of decays, 0 for none."""
    decays = heads * key if channels else heads
    mixed = own.op("linear", (x,), 2 * key_heads * key + heads * value,
                   (own.matrix(2 * key_heads * key + heads * value, own.program.tensors[x][0]),))
    gates = own.op("linear", (x,), decays + heads, (own.matrix(decays + heads, own.program.tensors[x][0]),))
    return own.op("gated_delta", (mixed, gates), heads * value, (own.vector(rate + own.rng.normal(size=heads)),
                                                                 own.vector(decays)),
                  key_dim=key, value_dim=value, channels=channels, lower_bound=bound)


#: heads, groups, state and head dimensions of an ssd op
SSD_SHAPES = [(1, 1, 1, 1), (6, 2, 20, 12), (5, 5, 7, 33), (16, 2, 64, 64), (13, 1, 33, 20), (24, 1, 128, 64)]


def with_ssd(own, x, heads, groups, state, dim, rate=0.0, **limits):
    """rate: the mean of A_log."""
    width, columns = own.program.tensors[x][0], heads * dim + 2 * groups * state
    mixed = own.op("linear", (x,), columns, (own.matrix(columns, width),))
    steps = own.op("linear", (x,), heads, (own.matrix(heads, width),))
    vectors = (own.vector(rate + own.rng.normal(size=heads)), own.vector(heads), own.vector(heads))
    return own.op("ssd", (mixed, steps), heads * dim, vectors, state_dim=state, head_dim=dim, **limits)


#: kinds of states: the gated delta rule with decays of heads and of channels, and selective state spaces
STATE_KINDS = ("delta", "delta of channels", "bounded delta of channels", "ssd")
BOUND = -2.0


def recurrent_model(seed: int, kind: str):
    """Two layers with states of a kind beside one of attention."""
    own = Toy(seed)
    x = own.embedding(VOCAB, 24, own.rng.normal(size=(VOCAB, 24)))
    for layer in range(2):
        own.op("add", (x, with_conv(own, x, 24, 4, bool(layer), True)))
        # A state space multiplies three of its inputs: without norms the values of a second one would be huge.
        normed = own.op("rms_norm", (x,), 24, (own.vector(24),), eps=1e-6)
        y = (with_ssd(own, normed, 4, 2, 20, 12, -1.0) if kind == "ssd" else
             with_delta(own, normed, 4, 2, 20, 12, kind.endswith("channels"), -1.0,
                        BOUND if kind.startswith("bounded") else 0.0))
        own.op("add", (x, own.op("linear", (y,), 24, (own.matrix(24, 48),))))
    qkv = own.op("linear", (x,), 40, (own.matrix(40, 24),))
    own.op("add", (x, own.op("linear", (own.attention(qkv, 3, 1, 8),), 24, (own.matrix(24, 24),))))
    own.finish(own.op("linear", (x,), VOCAB, (own.matrix(VOCAB, 24),)))
    return own
