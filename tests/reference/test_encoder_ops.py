"""Ops of encoders, which compute all rows of a text in one step: against the reference backend, and bit for bit in any
batch.
"""

from __future__ import annotations

import numpy as np
import pytest

from reference.backend import compile
from reference.batch import Limits
from reference.plan import HIDDEN
from reference.test_cpu_ops import EXACT, SEED, VOCAB, compiled
from reference.toy import ALL, OUTPUTS, Toy, item, plan, spans_for, start

LENGTHS = (1, 2, 127, 128, 129, 61)
SEPARATOR = 3


def toy() -> Toy:
    return Toy(SEED)


def texts(lengths=LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(SEED + 1)
    return [rng.integers(0, VOCAB, n).tolist() for n in lengths]


def step_of(given) -> bytes:
    """A step that computes all texts and gives one output of each."""
    work, spans = [], 0
    for slot, ids in enumerate(given):
        work.append(item(slot, len(ids), HIDDEN, outputs=1, spans=spans_for(len(ids), spans)))
        spans += len(work[-1].spans)
    return plan(work, [start(slot, ids) for slot, ids in enumerate(given)])


def embedded(own: Toy, width: int) -> int:
    return own.embedding(VOCAB, width, own.rng.normal(size=(VOCAB, width)))


def attended(own: Toy, x: int, q_heads: int, kv_heads: int, dim: int, **attributes) -> int:
    width = own.program.tensors[x][0]
    qkv = own.op("linear", (x,), (q_heads + 2 * kv_heads) * dim, (own.matrix((q_heads + 2 * kv_heads) * dim, width),))
    return own.attention(qkv, q_heads, kv_heads, dim, bidirectional=True, **attributes)


def pooled(own: Toy, x: int, pooling: str = "mean") -> None:
    """Ends the program with one row of `x` for each text."""
    width = own.program.tensors[x][0]
    own.op("hidden_states", (own.op("pool_rows", (x,), width, rows=OUTPUTS, pooling=pooling),))


def compare(own: Toy, tolerance: float = EXACT, threads: int = 2, dtype: str = "float32", lengths=LENGTHS):
    given, limits = texts(lengths), Limits(max_rows=2048, max_length=2048, num_spans=(256,))
    executor = compiled(own, threads, dtype=dtype, long=True)
    found = executor.step(step_of(given), False).hidden
    expected = compile([own.program], [own.weights], limits).step(step_of(given)).hidden
    assert found.shape == expected.shape
    if dtype == "float32":
        error = np.abs(found - expected).max() / max(np.sqrt((expected ** 2).mean()), 1e-3)  # relu may leave only zeros
    else:
        # Values are rounded relative to themselves. The mean of all texts is that of averages, which are small, and
        # says nothing of the largest value of a text of one token: the norms of a text's error and output compare.
        error = (np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)).max()
    print(f"error {error:.2e} of {tolerance}")
    assert error <= tolerance
    return executor, given, found


# Of 1,000 random texts bfloat16's error is 0.2 % in the mean and 0.8 % at most, int8's 0.6 % and 1 %. A text's norm
# needs several values: with one head of two, values that cancel each other would leave nothing to be relative to.
@pytest.mark.parametrize("dtype, tolerance", [("float32", EXACT), ("bfloat16", 2e-2), ("int8", 2e-2)])
@pytest.mark.parametrize("window", [0, 1, 2, 65, 128, 200])
@pytest.mark.parametrize("heads", [(7, 7, 2), (3, 3, 20), (6, 2, 64)])
def test_attention_in_both_directions(heads, window, dtype, tolerance):
    own = toy()
    pooled(own, attended(own, embedded(own, 31), *heads, window=window))
    compare(own, tolerance, dtype=dtype)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("window", [0, 65])
@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_bits_of_a_text_do_not_depend_on_its_batch(pooling, window, threads):
    """The texts of the longest one's step, alone, and in another order."""
    own = toy()
    x = embedded(own, 48)
    for _ in range(2):
        own.op("add", (x, own.op("linear", (attended(own, x, 4, 4, 12, window=window, layer=0),), 48,
                                 (own.matrix(48, 48),))))
    pooled(own, x, pooling)
    lengths = (700, 1, 257, 128, 129)
    _, given, together = compare(own, 1e-4, threads, lengths=lengths)
    for order in ([4, 2, 0, 3, 1], [0], [1], [2], [3, 4]):
        executor = compiled(own, threads if len(order) > 1 else 2, long=True)
        alone = executor.step(step_of([given[i] for i in order]), False).hidden
        assert alone.tobytes() == together[order].tobytes()


def test_a_part_of_a_text_is_refused():
    own = toy()
    pooled(own, attended(own, embedded(own, 8), 1, 1, 8))
    executor, (text,) = compiled(own), texts((40,))
    for rows, outputs, reason in ((39, 1, "0...39 of 40 and 1 outputs"), (40, 2, "0...40 of 40 and 2 outputs")):
        part = plan([item(0, rows, HIDDEN, outputs=outputs, spans=spans_for(40))], [start(0, text)])
        with pytest.raises(ValueError, match="all rows of a text in one step") as error:
            executor.step(part, False)
        assert reason in str(error.value)


def test_layers_share_their_place_in_the_cache_only_in_both_directions():
    own = toy()
    x = embedded(own, 8)
    attended(own, x, 1, 1, 8)
    attended(own, x, 1, 1, 8)
    with pytest.raises(ValueError, match="layer 0 of cache group 0 is taken"):
        own.attention(own.op("linear", (x,), 24, (own.matrix(24, 8),)), 1, 1, 8)
    with pytest.raises(ValueError, match="bidirectional excludes"):
        attended(own, x, 1, 1, 8, logn=4.0)


@pytest.mark.parametrize("width", [1, 31, 64, 131])
@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_pooling(pooling, width):
    own = toy()
    x = embedded(own, width)
    pooled(own, attended(own, x, 1, 1, 2), pooling)  # the attention says that a step has whole texts
    own = toy()
    pooled(own, embedded(own, width), pooling)
    for threads in (1, 3):
        compare(own, threads=threads)


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("width", [1, 17, 64])
def test_position_embedding(width, segments):
    own, positions, offset = toy(), 140, 5
    weights = [own.vector(positions * width)] + ([own.vector(2 * width)] if segments else [])
    x = embedded(own, width)
    own.op("position_embedding", (x,), None, weights, positions=positions, offset=offset, separator=SEPARATOR)
    pooled(own, x)
    compare(own)


@pytest.mark.parametrize("function", ["gelu", "gelu_tanh", "silu", "tanh", "relu", "quick_gelu"])
@pytest.mark.parametrize("width", [1, 19, 64])
def test_activate(width, function):
    own = toy()
    x = own.embedding(VOCAB, width, 4 * own.rng.normal(size=(VOCAB, width)))
    own.op("activate", (x,), function=function)
    pooled(own, x, "cls")
    compare(own, lengths=[1] * 8)


@pytest.mark.parametrize("width", [1, 19, 64])
def test_gelu_mul(width):
    own = toy()
    x = own.embedding(VOCAB, 2 * width, 4 * own.rng.normal(size=(VOCAB, 2 * width)))
    pooled(own, own.op("gelu_mul", (x,), width, rows=ALL), "cls")
    compare(own, lengths=[1] * 8)


def test_gelu_of_extremes():
    own, values = toy(), [np.nan, np.inf, -np.inf, 3e38, -3e38, -13.9, -14.1, 0.0, -0.0, 1e-30]
    x = own.embedding(len(values), 1, np.array(values)[:, None])
    own.op("activate", (x,), function="gelu")
    pooled(own, x, "cls")
    executor = compiled(own)
    given = [[i] for i in range(8)]
    found = executor.step(step_of(given), False).hidden[:, 0]
    assert np.isnan(found[0]) and found[1] == np.inf and found[3] == np.float32(3e38)
    assert not found[[2, 4, 5, 6, 7]].any()
