"""The CPU backend's routers and experts against the reference backend (see test_cpu_ops.py)."""

from __future__ import annotations

import numpy as np
import pytest

from reference import expert_toys as toys
from reference.expert_toys import embedded, mlp, routed
from reference.plan import SAMPLE
from reference.test_cpu_ops import EXACT, FORMATS, compare, compiled, prompts, seed, step_of, toy
from reference.toy import item, plan, spans_for, start

__all__ = ["seed"]  # a fixture


@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize("experts, top, width, inner", toys.SIZES)
@pytest.mark.parametrize("form, group, tolerance", FORMATS)
def test_experts(experts, top, width, inner, form, group, tolerance, threads):
    compare(toys.normalized(toy(), experts, top, width, inner, form, group),
            tolerance if tolerance == EXACT else 3 * tolerance, threads)  # two products, one after the other


@pytest.mark.parametrize("router", toys.ROUTERS)
@pytest.mark.parametrize("corrected", [True, False])
def test_routers(router, corrected):
    compare(toys.with_router(toy(), router, corrected))


def test_all_rows_to_one_expert_and_experts_without_rows():
    compare(toys.all_to_one(toy()))


def test_equal_logits_go_to_the_lowest_experts():
    compare(toys.equal_logits(toy()))


@pytest.mark.parametrize("first, count", toys.WHOLE)
def test_whole_experts_of_a_rank(first, count):
    compare(toys.of_a_rank(toy(), first, count))


@pytest.mark.parametrize("form", ["float32", "bfloat16", "w8a8"])
def test_biases_and_a_row_set_of_two_layers(form):
    tolerance = {f: t for f, g, t in FORMATS if not g}[form]
    # Four products round their rows, one after the other.
    compare(toys.with_biases(toy(), 32, form), tolerance if form == "float32" else 3 * tolerance)


@pytest.mark.parametrize("width", [1, 7, 96])
def test_sigmoid_mul(width):
    compare(toys.gated_by_one(toy(), width))


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
    for own, problem in toys.contradictions(toy):
        with pytest.raises(ValueError, match=problem):
            compiled(own)


def test_rows_that_are_no_numbers():
    toys.check_rows_that_are_no_numbers(toy(), compiled, step_of(prompts()), [p[-1] for p in prompts()])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gates", toys.ADAPTER_GATES)
@pytest.mark.parametrize("experts, top, width, inner, part", [
    (1, 1, 1, 1, ()), (3, 2, 7, 5, ()), (10, 3, 97, 31, ()), (33, 8, 64, 40, ()), (10, 3, 24, 16, (3, 5))])
def test_adapters_of_experts(experts, top, width, inner, part, gates, dtype, threads):
    """dtype: of the adapters."""
    own = toys.AdaptedExperts(toy(), lambda own: compiled(own, threads, adapters=3, adapter_rank=toys.MOST_RANK,
                                                          adapter_dtype=dtype),
                              experts, top, width, inner, "float32", 0, gates, *part)
    given, which = [*prompts(), prompts()[2][::-1]], (0, -1, 1, 0, -1, 1)
    work = [item(slot, len(p), SAMPLE, spans=spans_for(len(p), 8 * slot), adapter=adapter)
            for slot, (p, adapter) in enumerate(zip(given, which))]
    data = plan(work, [start(slot, p) for slot, p in enumerate(given)])
    found, expected = own.native.step(data, True).logits, own.reference.step(data).logits
    assert np.abs(found - expected).max() <= EXACT * max(np.sqrt(np.mean(expected**2)), 1e-3)
