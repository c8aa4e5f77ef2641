"""Embedding, norms, activations and soft caps of the reference backend, against torch and transformers."""

from __future__ import annotations

import numpy as np
import pytest

from reference.plan import HIDDEN
from reference.toy import ALL, Toy, embedded, item, plan, spans_for, start

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

ROWS, WIDTH = 7, 13


def inputs(rows=ROWS, width=WIDTH, seed=5, scale=1.0):
    """Rows for sections, which are exact in single precision."""
    return (np.random.default_rng(seed).normal(size=(rows, width)) * scale).astype(np.float32).astype(float)


def through(width_out, name, x, weights=(), **attributes):
    """Output of one op for rows x."""
    toy = Toy()
    rows = toy.embedding(3, x.shape[1])
    handles = [toy.vector(w) if np.ndim(w) == 1 else toy.matrix(*np.shape(w), w) for w in weights]
    toy.emit(toy.op(name, (rows,), width_out, handles, **attributes))
    return toy.emitted(embeddings=x)


def test_embedding_is_scaled_and_rows_may_be_given_instead():
    """Gemma's scale applies to tokens alone; an image's rows stay unscaled."""
    toy, table, given = Toy(), inputs(11, 6, 1), inputs(2, 6, 2)
    toy.emit(toy.embedding(11, 6, table, scale=6**0.5))
    tokens = [4, 9, 0, 10]
    found = toy.runner().step(plan([item(0, 4, HIDDEN, outputs=4, spans=spans_for(4))], [start(0, tokens)],
                                   sections=[embedded(0, 1, given)])).hidden
    expected = table[tokens] * 6**0.5
    expected[1:3] = given
    np.testing.assert_array_equal(found, expected)


def test_weights_of_norms_may_be_what_is_added_to_one():
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

    x, weight = inputs(), inputs(1)[0]
    norm = Gemma2RMSNorm(WIDTH, eps=1e-5)
    norm.weight.data = torch.tensor(weight, dtype=torch.float32)
    expected = norm(torch.tensor(x, dtype=torch.float32)).detach().numpy()
    found = through(WIDTH, "rms_norm", x, [weight], eps=1e-5, unit_offset=True)
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    plain = through(WIDTH, "rms_norm", x, [weight], eps=1e-5)
    np.testing.assert_allclose(plain, x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5) * weight, rtol=1e-14)


def test_head_norm_leaves_the_other_columns():
    x, weight = inputs(), inputs(1, 3)[0]
    found = through(None, "head_norm", x, [weight], eps=1e-6, head_dim=3, offset=4, heads=2, unit_offset=True)
    heads = x[:, 4:10].reshape(ROWS, 2, 3)
    expected = x.copy()
    expected[:, 4:10] = (heads / np.sqrt((heads**2).mean(-1, keepdims=True) + 1e-6) * (1 + weight)).reshape(ROWS, 6)
    np.testing.assert_allclose(found, expected, rtol=1e-14)


def test_gelu_tanh_mul():
    x = inputs(width=2 * WIDTH, scale=3)
    gate, up = torch.tensor(x).split(WIDTH, 1)
    expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
    np.testing.assert_allclose(through(WIDTH, "gelu_tanh_mul", x), expected.numpy(), rtol=1e-12, atol=1e-14)


def test_silu_mul():
    x = inputs(width=2 * WIDTH, scale=30)
    gate, up = torch.tensor(x).split(WIDTH, 1)
    expected = torch.nn.functional.silu(gate) * up
    np.testing.assert_allclose(through(WIDTH, "silu_mul", x), expected.numpy(), rtol=1e-12, atol=1e-11)


def test_clamped_silu_mul_is_that_of_gpt_oss():
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    x = inputs(width=2 * WIDTH, scale=9)
    interleaved = torch.tensor(x.reshape(ROWS, 2, WIDTH).transpose(0, 2, 1).reshape(ROWS, -1))
    experts = GptOssExperts.__new__(GptOssExperts)
    torch.nn.Module.__init__(experts)
    experts.alpha, experts.limit = 1.702, 7.0
    expected = experts._apply_gate(interleaved).numpy()
    assert (np.abs(x) > 7).any()
    found = through(WIDTH, "clamped_silu_mul", x, alpha=1.702, limit=7.0)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_scale_and_soft_cap():
    x = inputs(scale=50)
    np.testing.assert_array_equal(through(None, "scale", x, factor=0.25), x / 4)
    np.testing.assert_allclose(through(None, "soft_cap", x, cap=30.0), 30 * np.tanh(x / 30), rtol=1e-15)


def test_a_gate_of_the_shared_expert():
    toy, x, w = Toy(), inputs(), inputs(1, seed=9)
    rows = toy.embedding(3, WIDTH)
    y = toy.op("rms_norm", (rows,), WIDTH, (toy.vector(np.ones(WIDTH)),), eps=0.0)
    toy.emit(toy.op("sigmoid_mul", (y, toy.op("linear", (rows,), 1, (toy.matrix(1, WIDTH, w),)))))
    expected = x / np.sqrt((x**2).mean(1, keepdims=True)) / (1 + np.exp(-x @ w.T))
    np.testing.assert_allclose(toy.emitted(embeddings=x), expected, rtol=1e-12)


@pytest.mark.parametrize("name, width, attributes, problem", [
    ("gelu_tanh_mul", WIDTH, {}, "input is 13 wide, expected 26"),
    ("soft_cap", None, {"cap": 0}, "cap is 0: expected a number of 1e-30"),
    ("sigmoid_mul", None, {}, "wrong number of inputs"),
])  # fmt: skip
def test_refusals(name, width, attributes, problem):
    toy = Toy()
    rows = toy.embedding(3, WIDTH)
    with pytest.raises(ValueError, match=problem):
        toy.op(name, (rows,), width, rows=ALL, **attributes)
