"""Attention of the reference backend over spans, against one dense formula, and against transformers where possible."""

from __future__ import annotations

import numpy as np
import pytest

from reference.plan import HIDDEN
from reference.toy import Toy, embedded, item, plan, start

ROWS = 45


def rows(width, n=ROWS, seed=3):
    return np.random.default_rng(seed).normal(size=(n, width)).astype(np.float32).astype(float)


def dense(x, q_heads, kv_heads, dim, scale=None, window=0, soft_cap=0.0, sinks=None, slopes=None, logn=0):
    """All rows of one sequence at once by matrix products, without spans."""
    n = len(x)
    q, k, v = np.split(x, [q_heads * dim, (q_heads + kv_heads) * dim], 1)
    q = q.reshape(n, q_heads, dim).transpose(1, 0, 2) * (scale or dim**-0.5)
    k, v = (np.repeat(a.reshape(n, kv_heads, dim).transpose(1, 0, 2), q_heads // kv_heads, 0) for a in (k, v))
    i = np.arange(n)
    if logn:
        q = q * np.maximum(np.log(i + 1) / np.log(logn), 1.0)[None, :, None]
    scores = q @ k.transpose(0, 2, 1)
    if soft_cap:
        scores = soft_cap * np.tanh(scores / soft_cap)
    if slopes is not None:
        scores = scores + np.asarray(slopes)[:, None, None] * (i[None, :] - i[:, None])
    hidden = i[None, :] > i[:, None]
    if window:
        hidden |= i[:, None] - i[None, :] >= window
    weights = np.exp(np.where(hidden, -np.inf, scores))
    total = weights.sum(-1) + (0 if sinks is None else np.exp(np.asarray(sinks))[:, None])
    return (weights @ v / total[..., None]).transpose(1, 0, 2).reshape(n, -1)


VARIANTS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "window": {"window": 7},
    "soft cap": {"soft_cap": 0.9, "scale": 1.0},
    "sinks": {"sinks": [0.5, -1.0, 3.0, 0.0, 1.0, -2.0]},
    "alibi": {"slopes": [0.5**i for i in range(6)]},
    "logn": {"logn": 10},
    "all": {"window": 20, "soft_cap": 2.0, "sinks": [0.1] * 6, "slopes": [0.25] * 6, "logn": 3},
}


def declare(toy, qkv, q_heads, kv_heads, dim, sinks=None, slopes=None, **attributes):
    weights = [toy.vector(v) for v in (sinks, slopes) if v is not None]
    return toy.attention(qkv, q_heads, kv_heads, dim, weights, sinks=sinks is not None, alibi=slopes is not None,
                         **attributes)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("heads", [(6, 6, 5), (6, 2, 8), (6, 1, 3)])
def test_variants(name, heads):
    q_heads, kv_heads, dim = heads
    toy, x = Toy(), rows((q_heads + 2 * kv_heads) * dim)
    toy.emit(declare(toy, toy.embedding(3, x.shape[1]), *heads, **VARIANTS[name]))
    np.testing.assert_allclose(toy.emitted(embeddings=x), dense(x, *heads, **VARIANTS[name]), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["plain", "all"])
def test_chunks_do_not_matter_and_spans_are_found_by_their_table(name):
    """With spans in any order, two sequences per step and prompts cut anywhere, results equal dense attention."""
    heads = (6, 2, 4)
    toy, a, b = Toy(), rows(40, 45, 1), rows(40, 30, 2)
    toy.emit(declare(toy, toy.embedding(3, 40), *heads, **VARIANTS[name]))
    runner, order = toy.runner(span_size=8), np.random.default_rng(0).permutation(64).tolist()
    new, found = [start(0, range(45)), start(1, range(30))], {0: [], 1: []}
    sections, taken, done = [embedded(0, 0, a), embedded(1, 0, b)], [0, 0], [0, 0]
    for cut in ((5, 17), (11, 1), (1, 0), (28, 12)):
        work = []
        for slot, count in enumerate(cut):
            if not count:
                continue
            done[slot] += count
            needed = -(-done[slot] // 8)
            spans = [order.pop() for _ in range(taken[slot], needed)]
            taken[slot] = needed
            work.append(item(slot, count, HIDDEN, outputs=count, spans=spans))
        hidden = runner.step(plan(work, new, sections=sections)).hidden
        new, sections = [], []
        for each in work:
            found[each.slot].append(hidden[:each.rows])
            hidden = hidden[each.rows:]
    for slot, x in ((0, a), (1, b)):
        expected = dense(x, *heads, **VARIANTS[name])
        np.testing.assert_allclose(np.concatenate(found[slot]), expected, rtol=1e-12, atol=1e-13)


def test_layers_differ_in_geometry_window_and_cache_group():
    """Two attentions in one program; the second has a window and a cache group of its own."""
    toy, x = Toy(groups=(("full", 0), ("sliding", 9))), rows(40)
    hidden = toy.embedding(3, 40)
    first = toy.attention(hidden, 6, 2, 4)
    toy.emit(toy.attention(toy.op("linear", (first,), 25, (toy.matrix(25, 24),)), 3, 1, 5, cache_group=1, window=9))
    middle = dense(x, 6, 2, 4) @ toy.weights[1].T
    np.testing.assert_allclose(toy.emitted(embeddings=x), dense(middle, 3, 1, 5, window=9), rtol=1e-12, atol=1e-13)


def test_spans_that_a_window_has_left_behind_are_used_again():
    """A sliding group of three spans holds a sequence of twelve: a span is overwritten once no row sees it."""
    heads, x = (2, 1, 4), rows(16, 48)
    toy = Toy(groups=(("sliding", 8),))
    toy.emit(toy.attention(toy.embedding(3, 16), *heads, window=8))
    runner, found = toy.runner(span_size=4, num_spans=(3,)), []
    new, sections = [start(0, range(48))], [embedded(0, 0, x)]
    for step in range(12):
        work = item(0, 4, HIDDEN, outputs=4, spans=[step % 3])
        found.append(runner.step(plan([work], new, sections=sections)).hidden)
        new, sections = [], []
    np.testing.assert_allclose(np.concatenate(found), dense(x, *heads, window=8), rtol=1e-12, atol=1e-13)


def test_a_span_given_too_early_to_another_shows():
    """The purpose of the reference backend: wrong handling of spans changes values (here, a row that sees
    another's).
    """
    heads, x = (2, 1, 4), rows(16, 12)
    toy = Toy()
    toy.emit(toy.attention(toy.embedding(3, 16), *heads))
    runner = toy.runner(span_size=4)
    runner.step(plan([item(0, 8, 0, spans=[0, 1])], [start(0, range(12))], sections=[embedded(0, 0, x)]))
    runner.step(plan([item(1, 4, 0, spans=[1])], [start(1, range(4))], sections=[embedded(1, 0, rows(16, 4, 9))]))
    found = runner.step(plan([item(0, 4, HIDDEN, outputs=4, spans=[2])])).hidden
    assert np.abs(found - dense(x, *heads)[8:]).max() > 1e-3


def test_sinks_are_those_of_gpt_oss_and_soft_caps_those_of_gemma_2():
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss

    heads, x = (6, 2, 4), rows(40, 20)
    q, k, v = (torch.tensor(part.reshape(1, 20, -1, 4).transpose(0, 2, 1, 3)) for part in np.split(x, [24, 32], 1))
    mask = torch.triu(torch.full((20, 20), -1e30, dtype=torch.float64), 1)[None, None]
    module = torch.nn.Module()
    module.num_key_value_groups, module.training = 3, False
    module.sinks = torch.tensor(VARIANTS["sinks"]["sinks"], dtype=torch.float64)
    for function, more, variant in (
        (gpt_oss, {}, {"sinks": VARIANTS["sinks"]["sinks"]}),
        (gemma2, {"softcap": 1.5}, {"soft_cap": 1.5}),
    ):
        expected, _ = function(module, q, k, v, mask, scaling=0.5, dropout=0.0, **more)
        toy = Toy()
        toy.emit(declare(toy, toy.embedding(3, 40), *heads, scale=0.5, **variant))
        np.testing.assert_allclose(toy.emitted(embeddings=x), expected.reshape(20, -1).numpy(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("change, weights, problem", [
    ({"cache_group": 1}, 0, "a window of 0 over a cache group that keeps 9"),
    ({"cache_group": 1, "window": 10}, 0, "a window of 10 over a cache group that keeps 9"),
    ({"cache_group": 2}, 0, "cache group 2 is latent, which has no keys and values"),
    ({"sinks": True}, 0, "0 weights, expected 1 for its sinks and slopes"),
    ({"window": -1}, 0, "window is -1: expected an integer of 0 to"),
    ({}, 1, "1 weights, expected 0"),
])  # fmt: skip
def test_refusals(change, weights, problem):
    toy = Toy(groups=(("full", 0), ("sliding", 9), ("latent", 0)))
    x = toy.embedding(3, 16)
    with pytest.raises(ValueError, match=problem):
        toy.attention(x, 2, 1, 4, [toy.vector(2)] * weights, **change)
    toy.attention(x, 2, 1, 4)
    with pytest.raises(ValueError, match="layer 0 of cache group 0 is taken"):
        toy.attention(x, 2, 1, 4)


def test_a_kind_of_cache_that_no_op_has():
    toy = Toy(groups=(("full", 0), ("recurrent", 0)))
    toy.attention(toy.embedding(3, 16), 2, 1, 4)
    with pytest.raises(ValueError, match="does not have cache groups of kind recurrent"):
        toy.runner()
