"""The CPU backend's attention with heads of several sizes, normed values, and keys and values that several ops read;
and the ops around them in Gemma 4 (see test_cpu_ops.py).
"""

from __future__ import annotations

import numpy as np
import pytest

from reference import expert_toys
from reference.expert_toys import embedded, mlp, routed
from reference.plan import SAMPLE
from reference.test_cpu_ops import CACHES, VOCAB, compare, compiled, same_in_chunks, seed, toy
from reference.toy import Toy, item, plan, start

__all__ = ["seed"]  # a fixture

WINDOW = 40


def reading(own: Toy, x: int, kept: tuple[int, int, int], **attributes) -> int:
    """Attention of rows of x, as queries, over what an earlier op with these heads keeps."""
    q_heads, kv_heads, dim = kept
    width = own.program.tensors[x][0]
    queries = own.op("linear", (x,), q_heads * dim, (own.matrix(q_heads * dim, width),))
    return own.op("span_attention", (queries,), q_heads * dim, q_heads=q_heads, head_dim=dim, group=q_heads // kv_heads,
                  scale=dim**-0.5, **{"layer": 0, **attributes})


def two_sizes(own: Toy, small=(6, 3, 12), large=(6, 2, 33)) -> Toy:
    """Layers with a window and small heads, and one without and large ones; then layers that read their keys."""
    x = embedded(own, 24)

    def add(y: int) -> None:
        own.op("add", (x, own.op("linear", (y,), 24, (own.matrix(24, own.program.tensors[y][0]),))))

    places = [(small, {"layer": layer, "cache_group": 1, "window": WINDOW}) for layer in range(2)]
    places.append((large, {"layer": 0, "cache_group": 0}))
    for heads, place in places:
        q_heads, kv_heads, dim = heads
        width = (q_heads + 2 * kv_heads) * dim
        qkv = own.op("linear", (x,), width, (own.matrix(width, 24),))
        for offset, count in ((0, q_heads), (q_heads * dim, kv_heads), ((q_heads + kv_heads) * dim, kv_heads)):
            own.op("head_norm", (qkv,), None, (own.vector(dim),), eps=1e-6, heads=count, head_dim=dim, offset=offset)
        add(own.attention(qkv, *heads, **place))
    for heads, place in places[1:]:
        add(reading(own, x, heads, **place))
    own.finish(own.op("linear", (x,), VOCAB, (own.matrix(VOCAB, 24),)))
    return own


GROUPS = (("full", 0), ("sliding", WINDOW))


def steps(own, lengths, chunk, first=0):
    """Plans of prompts in chunks, each group with spans of its own; the last one samples of all of them."""
    rng = np.random.default_rng(17)
    given = [rng.integers(0, VOCAB, n).tolist() for n in lengths]
    for begin in range(0, max(lengths), chunk):
        work, new = [], []
        for slot, prompt in enumerate(given):
            count = min(chunk, len(prompt) - begin)
            if count <= 0:
                continue
            last = begin + count == len(prompt)
            tables = [list(range(100 * group + 20 * slot + -(-begin // 16), 100 * group + 20 * slot
                                 + -(-(begin + count) // 16))) for group in range(2)]
            work.append(item(slot, count, SAMPLE if last else 0, spans=tables[0], other_spans=tables[1:]))
            new += [start(slot, prompt)] if not begin else []
        yield plan(work, new)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("cache, tolerance", CACHES)
def test_heads_of_two_sizes_and_queries_that_read_earlier_keys(cache, tolerance, threads):
    """In one step as in chunks, fused or not, near the reference: spans of both groups lie in one pool."""
    lengths, results = (130, 70, 3), []
    for chunk, fused in ((200, True), (37, True), (37, False)):
        own = two_sizes(Toy(11, GROUPS))
        executor = compiled(own, threads, dtype=cache, long=True, fused=fused)
        found = [executor.step(data, True).logits for data in steps(own, lengths, chunk)]
        results.append(np.concatenate([each for each in found if len(each)]))
    results = [np.sort(each, axis=0) for each in results]
    np.testing.assert_array_equal(results[1], results[0])
    np.testing.assert_array_equal(results[2], results[0])
    (data,) = steps(own, lengths, 200)
    limits = {"num_spans": (256, 256), "max_rows": 2048, "max_length": 2048}
    expected = two_sizes(Toy(11, GROUPS)).runner(**limits).step(data).logits
    scale = np.sqrt(np.mean(expected**2))
    assert np.abs(results[0] - np.sort(expected, axis=0)).max() <= tolerance * scale


def test_a_span_has_room_for_the_largest_group():
    """Bytes of a span: two layers of 3 heads of 12, against one of 2 heads of 33."""
    own = two_sizes(Toy(11, GROUPS))
    span = max(2 * 3 * _bytes(12), 2 * _bytes(33))
    assert compiled(own, long=True).cache_bytes() == 256 * span


def _bytes(dim: int) -> int:
    from allspark_server import _native

    return _native.span_bytes(16, dim, "float32")


@pytest.mark.parametrize("change, problem", [
    ({"layer": 5}, "queries without keys, and no earlier op keeps some in layer 5 of cache group 0"),
    ({"head_dim": 8}, "it reads other heads than those that are kept in layer 0 of cache group 0"),
    ({"group": 6}, "it reads other heads"), ({"q_head_begin": 3}, "it reads other heads"),
    ({"bidirectional": 1}, "it reads other heads")])
def test_queries_without_keys_are_refused(change, problem):
    own = toy()
    x = embedded(own, (6 + 2 * 2) * 16)
    own.attention(x, 6, 2, 16)
    queries = own.op("linear", (x,), 96, (own.matrix(96, 160),))
    attributes = {"layer": 0, "q_heads": 6, "head_dim": 16, "group": 3, "scale": 0.25, **change}
    if "head_dim" in change:
        attributes["q_heads"] = 12
    with pytest.raises(ValueError, match=problem):
        own.op("span_attention", (queries,), 96, **attributes)


@pytest.mark.parametrize("cache", [cache for cache, _ in CACHES])
def test_bits_of_queries_over_earlier_keys_do_not_depend_on_chunks(cache):
    def model():
        own = Toy(7)
        x = embedded(own, 4 * 16)
        own.op("add", (x, own.op("linear", (own.attention(x, 2, 1, 16, window=300),), 64, (own.matrix(64, 32),))))
        own.finish(reading(own, x, (2, 1, 16), window=100))
        return own

    same_in_chunks(model, cache, 3, (1290, 47))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("width, offset, rest", [(1, 0, 0), (7, 5, 3), (96, 131, 0), (33, 0, 40)])
def test_products_with_some_columns(width, offset, rest, threads):
    own = toy()
    x = embedded(own, width)
    more = own.op("linear", (x,), offset + width + rest, (own.matrix(offset + width + rest, width),))
    own.finish(own.op("multiply", (x, more), offset=offset))
    compare(own, threads=threads)


@pytest.mark.parametrize("factor", [{}, {"factor": -1.7}])
def test_scale_by_a_weight(factor):
    own = toy()
    own.finish(own.op("scale", (embedded(own, 31),), None, (own.vector([0.37]),), **factor))
    compare(own)


@pytest.mark.parametrize("widths", [(1, 1), (7, 31), (1, 5, 64), (33, 2, 9)])
def test_concat(widths):
    own = toy()
    x = embedded(own, 19)
    parts = [own.op("linear", (x,), width, (own.matrix(width, 19),)) for width in widths]
    own.finish(own.op("concat", (parts[0], *parts[1:-1], parts[-1]), sum(widths)))
    compare(own)


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("router", [{"normalized": True}, *expert_toys.ROUTERS[-2:]])
def test_routers_with_a_scale_for_each_expert(router, corrected):
    own = toy()
    x = embedded(own, 19)
    correction = (own.vector(own.rng.normal(size=12) * 0.1),) if corrected else ()
    rows, scores = routed(own, x, 12, 5, (*correction, own.vector(12)), expert_scales=True, **router)
    own.finish(mlp(own, x, rows, scores, 12, 9))
    compare(own)


@pytest.mark.parametrize("weights, scaled, problem", [
    (0, True, "expert_scales need a weight"), (2, False, "a second weight without expert_scales")])
def test_routers_with_other_weights_are_refused(weights, scaled, problem):
    own = toy()
    x = embedded(own, 19)
    with pytest.raises(ValueError, match=problem):
        routed(own, x, 12, 5, tuple(own.vector(12) for _ in range(weights)), expert_scales=scaled)


def test_products_beyond_the_columns_are_refused():
    own = toy()
    x = embedded(own, 19)
    with pytest.raises(ValueError, match="op multiply: it reaches past its second input"):
        own.op("multiply", (x, x), offset=1)


