"""The CPU backend's routers and experts against the reference backend (see test_cpu_ops.py)."""

from __future__ import annotations

import numpy as np
import pytest

from reference.test_cpu_ops import EXACT, FORMATS, VOCAB, compare, compiled, embedded, prompts, seed, step_of, toy
from reference.toy import ALL, Toy

__all__ = ["seed"]  # a fixture


def stack(own: Toy, experts: int, n: int, k: int, form: str = "float32", group: int = 0) -> int:
    """A stack of matrices [n, k]."""
    matrix = own.program.add_matrix(experts * n, k, form, group)
    own.weights[matrix] = own.rng.normal(size=(experts * n, k)) * k**-0.5
    return matrix


def routed(own: Toy, x: int, experts: int, top: int, weights=(), spread: float = 3.0, **router) -> tuple[int, int]:
    """The row set that a router of random logits forms, and its weights."""
    rows = own.program.add_row_set(ALL, top)
    width = own.program.tensors[x][0]
    gate = own.matrix(experts, width, own.rng.normal(size=(experts, width)) * spread * width**-0.5)
    logits = own.op("linear", (x,), experts, (gate,))
    return rows, own.op("router", (logits,), 1, weights, rows, top_k=top, **router)


def mlp(own: Toy, x: int, rows: int, scores: int, experts: int, inner: int, form="float32", group=0, first=0) -> int:
    """Gate and up, silu_mul, down and the weighted sum: of `experts` experts from `first` on."""
    width, own_part = own.program.tensors[x][0], {"experts": experts, "expert_begin": first}
    both = own.op("expert_linear", (x,), 2 * inner, (stack(own, experts, 2 * inner, width, form, group),), rows,
                  **own_part)
    y = own.op("expert_linear", (own.op("silu_mul", (both,), inner),), width,
               (stack(own, experts, width, inner, form, group),), **own_part)
    return own.op("combine_experts", (y, scores), width, rows=ALL)


SIZES = [(1, 1, 1, 1), (3, 2, 7, 5), (10, 3, 24, 31), (5, 5, 97, 48), (33, 8, 64, 40), (128, 8, 70, 96)]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("experts, top, width, inner", SIZES)
@pytest.mark.parametrize("form, group, tolerance", FORMATS)
def test_experts(experts, top, width, inner, form, group, tolerance, threads):
    own = toy()
    x = embedded(own, width)
    rows, scores = routed(own, x, experts, top, normalized=True)
    own.finish(mlp(own, x, rows, scores, experts, inner, form, group))
    compare(own, tolerance if tolerance == EXACT else 3 * tolerance, threads)  # two products, one after the other


@pytest.mark.parametrize("router", [
    {"normalized": True}, {}, {"scale": 2.5}, {"scores": "sigmoid"}, {"scores": "sigmoid", "normalized": True},
    {"groups": 4, "top_groups": 2}, {"groups": 12, "top_groups": 7, "scores": "sigmoid", "normalized": True}])
@pytest.mark.parametrize("corrected", [True, False])
def test_routers(router, corrected):
    own = toy()
    x = embedded(own, 19)
    correction = (own.vector(own.rng.normal(size=12) * 0.1),) if corrected else ()
    rows, scores = routed(own, x, 12, 5, correction, **router)
    own.finish(mlp(own, x, rows, scores, 12, 9))
    compare(own)


def test_all_rows_to_one_expert_and_experts_without_rows():
    own = toy()
    x = embedded(own, 21)
    far = own.vector(np.where(np.arange(9) == 4, 1000.0, 0.0))
    rows, scores = routed(own, x, 9, 1, (far,), scores="sigmoid")
    own.finish(mlp(own, x, rows, scores, 9, 48))
    compare(own)


def test_equal_logits_go_to_the_lowest_experts():
    own = toy()
    x = embedded(own, 8)
    rows, scores = routed(own, x, 6, 3, spread=0.0, normalized=True)
    own.finish(mlp(own, x, rows, scores, 6, 5))
    compare(own)


@pytest.mark.parametrize("first, count", [(0, 4), (3, 5), (9, 1), (0, 10)])
def test_whole_experts_of_a_rank(first, count):
    """Entries of other ranks' experts add nothing, whatever lies in the buffers."""
    own = toy()
    x = embedded(own, 24)
    rows, scores = routed(own, x, 10, 2, normalized=True)
    own.finish(own.op("add", (x, mlp(own, x, rows, scores, count, 32, first=first))))
    compare(own)


@pytest.mark.parametrize("form", ["float32", "bfloat16", "w8a8"])
def test_biases_and_a_row_set_of_two_layers(form):
    own = toy()
    x = embedded(own, 40)
    rows, scores = routed(own, x, 7, 3, normalized=True)
    for _ in range(2):
        bias = own.vector(7 * 64), own.vector(7 * 40)
        both = own.op("expert_linear", (x,), 64, (stack(own, 7, 64, 40, form), bias[0]), rows, experts=7)
        y = own.op("expert_linear", (own.op("silu_mul", (both,), 32),), 40, (stack(own, 7, 40, 32, form), bias[1]),
                   experts=7)
        own.op("add", (x, own.op("combine_experts", (y, scores), 40, rows=ALL)))
    own.finish(x)
    tolerance = dict((f, t) for f, g, t in FORMATS if not g)[form]
    compare(own, tolerance if form == "float32" else 3 * tolerance)  # four products round their rows, one after the other


@pytest.mark.parametrize("width", [1, 7, 96])
def test_sigmoid_mul(width):
    own = toy()
    x = embedded(own, width)
    own.op("sigmoid_mul", (x, own.op("linear", (x,), 1, (own.matrix(1, width),))))
    own.finish(x)
    compare(own)


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int4", "w8a8", "w4a8"])
def test_bits_do_not_depend_on_threads_or_fusion(form):
    own = toy()
    x = embedded(own, 64)
    rows, scores = routed(own, x, 16, 4, normalized=True)
    own.finish(mlp(own, x, rows, scores, 16, 192, form, 32 if form == "int4" else 0))
    data, found, weights = step_of(prompts()), [], dict(own.weights)
    for threads, fused in ((1, True), (4, True), (3, False)):
        own.weights = dict(weights)  # not as a format has recovered them
        found.append(compiled(own, threads, fused=fused).step(data, True).logits)
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


def test_what_cannot_be_is_refused():
    own = toy()
    x = embedded(own, 8)
    rows, scores = routed(own, x, 4, 2)
    both = own.op("expert_linear", (x,), 6, (stack(own, 2, 6, 8),), rows, experts=2)
    y = own.op("expert_linear", (both,), VOCAB, (stack(own, 2, VOCAB, 6),), experts=2, expert_begin=1)
    own.finish(own.op("combine_experts", (y, scores), VOCAB, rows=ALL))
    with pytest.raises(ValueError, match="other experts than those before"):
        compiled(own)
    own = toy()
    rows, scores = routed(own, embedded(own, 8), 4, 2)
    y = own.op("expert_linear", (0,), VOCAB, (stack(own, 3, VOCAB, 8),), rows, experts=3, expert_begin=2)
    own.finish(own.op("combine_experts", (y, scores), VOCAB, rows=ALL))
    with pytest.raises(ValueError, match=r"experts 2...4, the router has 4"):
        compiled(own)


def test_rows_that_are_no_numbers():
    """Their status tells; rows beside them are as ever."""
    own = toy()
    x = embedded(own, 16)
    rows, scores = routed(own, x, 6, 2, normalized=True)
    own.finish(mlp(own, x, rows, scores, 6, 12))
    expected = compiled(own).step(step_of(prompts()), True)
    own.weights[0] = own.weights[0].copy()
    own.weights[0][prompts()[1][-1]] = np.nan
    found = compiled(own).step(step_of(prompts()), True)
    broken = [p[-1] == prompts()[1][-1] for p in prompts()]
    assert (found.status != 0).tolist() == broken
    np.testing.assert_array_equal(found.logits[~np.array(broken)], expected.logits[~np.array(broken)])

