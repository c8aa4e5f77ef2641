"""Toy programs with experts for the tests of every backend. Programs that end with `sample` have logits of VOCAB or of
the given width.
"""

from __future__ import annotations

import numpy as np

from reference.rounding import as_bf16
from reference.toy import ALL, Toy

VOCAB = 53
ROUTERS = [{"normalized": True}, {}, {"scale": 2.5}, {"scores": "sigmoid"}, {"scores": "sigmoid", "normalized": True},
           {"groups": 4, "top_groups": 2}, {"groups": 4, "top_groups": 2, "group_scores": "largest"},
           {"groups": 12, "top_groups": 7, "scores": "sigmoid", "normalized": True}]
SIZES = [(1, 1, 1, 1), (3, 2, 7, 5), (10, 3, 24, 31), (5, 5, 97, 48), (33, 8, 64, 40), (128, 8, 70, 96)]
WHOLE = [(0, 4), (3, 5), (9, 1), (0, 10)]  # of 10 experts those that a rank has: the first, and how many
#: what is between the products of experts with adapters
ADAPTER_GATES = {"silu_mul": {}, "clamped_silu_mul": {"alpha": 1.7, "limit": 1.5}}
MOST_RANK = 40


def embedded(own: Toy, width: int) -> int:
    return own.embedding(VOCAB, width, own.rng.normal(size=(VOCAB, width)))


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


def mlp(own: Toy, x: int, rows: int, scores: int, experts: int, inner: int, form="float32", group=0, first=0,
        clamped: dict | None = None) -> int:
    """Gate and up, silu_mul, down and the weighted sum, for `experts` experts from `first` on. clamped: the attributes
    of clamped_silu_mul, which then takes silu_mul's place, between products with biases.
    """
    width, own_part = own.program.tensors[x][0], {"experts": experts, "expert_begin": first}

    def weights(n: int, k: int) -> tuple[int, ...]:
        return stack(own, experts, n, k, form, group), *((own.vector(experts * n),) if clamped else ())

    both = own.op("expert_linear", (x,), 2 * inner, weights(2 * inner, width), rows, **own_part)
    gated = own.op("clamped_silu_mul" if clamped else "silu_mul", (both,), inner, **clamped or {})
    y = own.op("expert_linear", (gated,), width, weights(width, inner), **own_part)
    return own.op("combine_experts", (y, scores), width, rows=ALL)


def normalized(own: Toy, experts: int, top: int, width: int, inner: int, form="float32", group=0) -> Toy:
    x = embedded(own, width)
    rows, scores = routed(own, x, experts, top, normalized=True)
    own.finish(mlp(own, x, rows, scores, experts, inner, form, group))
    return own


def with_router(own: Toy, router: dict, corrected: bool) -> Toy:
    """Twelve experts, five per row; `router` are the router's attributes."""
    x = embedded(own, 19)
    correction = (own.vector(own.rng.normal(size=12) * 0.1),) if corrected else ()
    rows, scores = routed(own, x, 12, 5, correction, **router)
    own.finish(mlp(own, x, rows, scores, 12, 9))
    return own


def all_to_one(own: Toy) -> Toy:
    """All rows go to one expert, none to the others."""
    x = embedded(own, 21)
    far = own.vector(np.where(np.arange(9) == 4, 1000.0, 0.0))
    rows, scores = routed(own, x, 9, 1, (far,), scores="sigmoid")
    own.finish(mlp(own, x, rows, scores, 9, 48))
    return own


def equal_logits(own: Toy) -> Toy:
    x = embedded(own, 8)
    rows, scores = routed(own, x, 6, 3, spread=0.0, normalized=True)
    own.finish(mlp(own, x, rows, scores, 6, 5))
    return own


def of_a_rank(own: Toy, first: int, count: int, form="float32", group=0) -> Toy:
    """`count` whole experts of ten: entries of other experts add nothing, whatever the buffers hold."""
    x = embedded(own, 24)
    rows, scores = routed(own, x, 10, 2, normalized=True)
    own.finish(own.op("add", (x, mlp(own, x, rows, scores, count, 32, form, group, first))))
    return own


def with_biases(own: Toy, inner: int, form="float32", group=0, gates="silu_mul", **attributes) -> Toy:
    """Two layers that share a row set, with biases; `gates` is the op between their products."""
    x = embedded(own, 40)
    rows, scores = routed(own, x, 7, 3, normalized=True)
    for _ in range(2):
        bias = own.vector(7 * 2 * inner), own.vector(7 * 40)
        both = own.op("expert_linear", (x,), 2 * inner, (stack(own, 7, 2 * inner, 40, form, group), bias[0]), rows,
                      experts=7)
        y = own.op("expert_linear", (own.op(gates, (both,), inner, **attributes),), 40,
                   (stack(own, 7, 40, inner, form, group), bias[1]), experts=7)
        own.op("add", (x, own.op("combine_experts", (y, scores), 40, rows=ALL)))
    own.finish(x)
    return own


class AdaptedExperts:
    """A layer of experts with adapters, in a backend (`native`) and in the reference. Adapter 0 changes all projections
    of all experts, adapter 1 only the down projections of the even ones.
    """

    def __init__(self, own: Toy, compiled, experts: int, top: int, width: int, inner: int, form: str = "float32",
                 group: int = 0, gates: str = "silu_mul", begin: int = 0, count: int = 0):
        """compiled(own): the backend's executor. begin, count: the experts of this rank; by default all."""
        here = count or experts
        x = own.op("rms_norm", (embedded(own, width),), width, (own.vector(width),), eps=1e-5, unit_offset=False)
        rows, scores = routed(own, x, experts, top, normalized=True)
        biased = gates != "silu_mul"

        def linear(of: int, n: int, k: int) -> int:
            weights = (stack(own, here, n, k, form, group), *((own.vector(here * n),) if biased else ()))
            return own.op("expert_linear", (of,), n, weights, rows, experts=here, expert_begin=begin)

        both = linear(x, 2 * inner, width)
        for half in range(2):
            own.op("expert_lora", (both, x), None, (), target=half * experts, experts=experts, offset=half * inner,
                   columns=inner)
        hidden = own.op(gates, (both,), inner, **ADAPTER_GATES[gates])
        y = linear(hidden, width, inner)
        own.op("expert_lora", (y, hidden), None, (), target=2 * experts, experts=experts, offset=0, columns=width)
        own.finish(own.op("combine_experts", (y, scores), width, rows=ALL))
        self.native = compiled(own)
        self.reference, rng, known = own.runner(), np.random.default_rng(3), []
        for index in range(2):
            filled, pairs = self.native.new_adapter(), {}
            for target in range(3 * experts):
                down, expert = target >= 2 * experts, target % experts
                if (index and (not down or expert % 2)) or not begin <= expert < begin + here:
                    continue
                k, n, rank = (inner if down else width), (width if down else inner), 1 + (11 * target + 5) % MOST_RANK
                # Of bfloat16, with a power of two as their scale, so that adapters of either type hold them.
                a = as_bf16(rng.normal(size=(rank, k)) * k**-0.5).astype(np.float32)
                b = as_bf16(rng.normal(size=(n, rank)) * rank**-0.5).astype(np.float32)
                assert filled.set(target, a, "F32", b, "F32", 0.5) == 0
                pairs[target] = (a.astype(float), 0.5 * b)
            self.native.set_adapter(index, filled)
            known.append(pairs)
        self.reference.set_adapter([known])


def gated_by_one(own: Toy, width: int) -> Toy:
    """sigmoid_mul: multiplies each row by the sigmoid of one value."""
    x = embedded(own, width)
    own.op("sigmoid_mul", (x, own.op("linear", (x,), 1, (own.matrix(1, width),))))
    own.finish(x)
    return own


def check_rows_that_are_no_numbers(own: Toy, compiled, data: bytes, last: list[int]) -> None:
    """Rows that are not finite get an error status, and their neighbours are unaffected.

    `compiled` makes a backend's program of a toy; `data` is a step of prompts that sample; `last` the last token of
    each.
    """
    x = embedded(own, 16)
    rows, scores = routed(own, x, 6, 2, normalized=True)
    own.finish(mlp(own, x, rows, scores, 6, 12))
    expected = compiled(own).step(data, True)
    own.weights[0] = own.weights[0].copy()
    own.weights[0][last[1]] = np.nan
    found, broken = compiled(own).step(data, True), np.array([token == last[1] for token in last])
    assert ((found.status != 0) == broken).all()
    np.testing.assert_array_equal(found.logits[~broken], expected.logits[~broken])


def contradictions(new) -> list[tuple[Toy, str]]:
    """Invalid programs, and a backend's error for each; `new` makes a toy."""
    other = new()
    x = embedded(other, 8)
    rows, scores = routed(other, x, 4, 2)
    both = other.op("expert_linear", (x,), 6, (stack(other, 2, 6, 8),), rows, experts=2)
    y = other.op("expert_linear", (both,), VOCAB, (stack(other, 2, VOCAB, 6),), experts=2, expert_begin=1)
    other.finish(other.op("combine_experts", (y, scores), VOCAB, rows=ALL))
    beyond = new()
    rows, scores = routed(beyond, embedded(beyond, 8), 4, 2)
    y = beyond.op("expert_linear", (0,), VOCAB, (stack(beyond, 3, VOCAB, 8),), rows, experts=3, expert_begin=2)
    beyond.finish(beyond.op("combine_experts", (y, scores), VOCAB, rows=ALL))
    return [(other, "other experts than those before"), (beyond, r"experts 2...4, the router has 4")]
