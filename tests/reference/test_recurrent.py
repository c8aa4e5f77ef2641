"""The references of recurrent layers against one another and against transformers' functions.

transformers computes in float32, so it is compared with a tolerance; the forms of one formula agree to float64's
rounding. test_a_fault_is_found makes sure that these comparisons can fail.
"""

from __future__ import annotations

import numpy as np
import pytest

from reference.recurrent import (
    bounded_decay,
    causal_convolution,
    delta_chunked,
    delta_deferred,
    delta_recurrent,
    gated_rms_norm,
    l2_normalized,
    output_gate,
    sigmoid,
    silu,
    softplus_decay,
    ssd_deferred,
    ssd_recurrent,
)

ROWS = (1, 2, 63, 64, 65, 127, 131, 193)
EXACT, SINGLE = 1e-11, 2e-5  # of the largest value
HEADS, KEY_HEADS, KEY, VALUE = 6, 2, 20, 12


def inputs(rows, channels=False, seed=0, strongest=3.0):
    """q, k, v, decay and beta of random rows, and a state before them. Decays are from e^-0 to e^-strongest."""
    rng = np.random.default_rng((rows, channels, seed))
    q, k = (l2_normalized(rng.standard_normal((rows, KEY_HEADS, KEY))) for _ in range(2))
    v = rng.standard_normal((rows, HEADS, VALUE))
    decay = -strongest * rng.random((rows, HEADS, KEY) if channels else (rows, HEADS)) ** 4
    return (q, k, v, decay, rng.random((rows, HEADS))), rng.standard_normal((HEADS, KEY, VALUE))


def check(found, expected, tolerance=EXACT):
    found, expected = np.asarray(found, float), np.asarray(expected, float)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


# -- the forms of the gated delta rule ---------------------------------------------------------------------------------
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_chunks_are_as_the_recurrence(rows, channels):
    row_inputs, state = inputs(rows, channels)
    out, end = delta_recurrent(*row_inputs, state)
    for chunk in (64, 7):
        found, states = delta_chunked(*row_inputs, state, chunk)
        check(found, out)
        check(states[-1], end)
        for number, each in enumerate(states[:-1]):
            check(each, delta_recurrent(*(x[: (number + 1) * chunk] for x in row_inputs), state)[1])


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_deferred_rows_are_as_the_recurrence(rows, channels):
    row_inputs, state = inputs(rows, channels)
    found, held = delta_deferred(*row_inputs, state)
    check(found, delta_recurrent(*row_inputs, state)[0])
    committed = rows // 64 * 64
    assert len(held.k) == rows - committed
    check(held.state, delta_recurrent(*(x[:committed] for x in row_inputs), state)[1])


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("cut", [1, 31, 64, 100])
def test_a_state_continues_a_sequence(cut, channels):
    row_inputs, _ = inputs(131, channels)
    out, end = delta_recurrent(*row_inputs)
    first, state = delta_recurrent(*(x[:cut] for x in row_inputs))
    second, found = delta_recurrent(*(x[cut:] for x in row_inputs), state)
    check(np.concatenate([first, second]), out)
    check(found, end)


@pytest.mark.parametrize("channels", [False, True])
def test_strong_decays_stay_finite(channels):
    """A chunk's decay of e^-6000 has no inverse: only differences of logarithms of later and earlier rows occur."""
    row_inputs, state = inputs(65, channels, strongest=500.0)
    expected, _ = delta_recurrent(*row_inputs, state)
    assert np.isfinite(expected).all()
    check(delta_chunked(*row_inputs, state)[0], expected)
    check(delta_deferred(*row_inputs, state)[0], expected)


def test_a_decay_of_each_channel_that_is_equal_is_one_of_the_head():
    (q, k, v, decay, beta), state = inputs(65)
    each = np.repeat(decay[..., None], KEY, -1)
    for form in (delta_recurrent, delta_chunked, delta_deferred):
        check(form(q, k, v, each, beta, state)[0], form(q, k, v, decay, beta, state)[0])


def test_without_decay_a_key_is_answered_with_its_last_value():
    """What the delta rule is for: with beta 1, a value replaces the one that its key had before."""
    k = np.eye(3)[[0, 1, 0, 2]][:, None]
    v = np.arange(1.0, 5.0)[:, None, None]
    _, state = delta_recurrent(k, k, v, np.zeros((4, 1)), np.ones((4, 1)))
    check(state[0, :, 0], [3.0, 2.0, 4.0])


FAULTS = {
    "the decay of the previous row": lambda q, k, v, decay, beta: (q, k, v, np.roll(decay, 1, 0), beta),
    "no decay in one row": lambda q, k, v, decay, beta: (q, k, v, decay * (np.arange(len(v)) != 5)[:, None], beta),
    "one beta of 1": lambda q, k, v, decay, beta: (q, k, v, decay, np.where(np.arange(len(v)) == 5, 1, beta.T).T),
    "keys of the next head": lambda q, k, v, decay, beta: (q, k[:, ::-1], v, decay, beta),
    "values of the next row": lambda q, k, v, decay, beta: (q, k, np.roll(v, -1, 0), decay, beta),
    "an unscaled query": lambda q, k, v, decay, beta: (q * KEY**0.5, k, v, decay, beta),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("form", [delta_chunked, delta_deferred])
def test_a_fault_is_found(form, fault):
    row_inputs, state = inputs(65)
    expected = delta_recurrent(*row_inputs, state)[0]
    with pytest.raises(AssertionError):
        check(form(*FAULTS[fault](*row_inputs), state)[0], expected, SINGLE)


# -- Mamba2's selective state space ------------------------------------------------------------------------------------
def ssd_inputs(rows):
    """x, B, C, dt, A and D of random rows, and a state before them."""
    rng = np.random.default_rng((rows, 7))
    b, c = (rng.standard_normal((rows, KEY_HEADS, KEY)) for _ in range(2))
    return (rng.standard_normal((rows, HEADS, VALUE)), b, c, 2 * rng.random((rows, HEADS)) ** 4,
            -5 * rng.random(HEADS) ** 2, rng.standard_normal(HEADS)), rng.standard_normal((HEADS, KEY, VALUE))


@pytest.mark.parametrize("rows", ROWS)
def test_deferred_rows_are_as_the_recurrence_of_state_spaces(rows):
    given, state = ssd_inputs(rows)
    (x, b, c, dt, *rest), committed = given, rows // 64 * 64
    found, end = ssd_deferred(*given, state)
    check(found, ssd_recurrent(*given, state)[0])
    check(end, ssd_recurrent(*(part[:committed] for part in (x, b, c, dt)), *rest, state)[1])


# -- the convolution ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("taps", [1, 2, 3, 4])
@pytest.mark.parametrize("activated", [False, True])
def test_a_convolution_continues_at_any_row(taps, activated):
    rng = np.random.default_rng(taps)
    x, weight, bias = rng.standard_normal((67, 9)), rng.standard_normal((9, taps)), rng.standard_normal(9)
    whole, end = causal_convolution(x, weight, bias, activated=activated)
    for cut in (0, 1, 2, 3, 66, 67):
        first, state = causal_convolution(x[:cut], weight, bias, activated=activated)
        second, found = causal_convolution(x[cut:], weight, bias, state, activated)
        np.testing.assert_array_equal(np.concatenate([first, second]), whole)
        np.testing.assert_array_equal(found, end)


def test_a_convolution_sees_only_earlier_rows():
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal((20, 5)), rng.standard_normal((5, 4))
    changed = x.copy()
    changed[10] += 1
    difference = np.abs(causal_convolution(changed, weight)[0] - causal_convolution(x, weight)[0]).max(1)
    assert (difference[:10] == 0).all() and (difference[10:14] > 0).all() and (difference[14:] == 0).all()


# -- transformers ------------------------------------------------------------------------------------------------------
torch = pytest.importorskip("torch")
qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
glm = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")


mamba = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")


def single(*arrays):
    """One sequence of each, in float32."""
    return [torch.tensor(x, dtype=torch.float32)[None] for x in arrays]


def check_delta(function, q, k, v, decay, beta, state) -> None:
    """A function of transformers' against the reference, with queries and keys of any length."""
    out, end = function(*single(3 * q, 2 * k, v), g=single(decay)[0], beta=single(beta)[0],
                        initial_state=single(state)[0], output_final_state=True, use_qk_l2norm_in_kernel=True)
    expected, state = delta_recurrent(l2_normalized(3 * q), l2_normalized(2 * k), v, decay, beta, state)
    check(out[0], expected, SINGLE)
    check(end[0], state, SINGLE)


@pytest.mark.parametrize("form", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
@pytest.mark.parametrize("rows", ROWS)
def test_a_decay_of_heads_is_as_in_qwen3_next(rows, form):
    given, state = inputs(rows)
    check_delta(getattr(qwen, form), *given, state)


@pytest.mark.parametrize("form", ["recurrent_kimi_delta_attention", "chunk_kimi_delta_attention"])
@pytest.mark.parametrize("rows", ROWS)
def test_a_decay_of_channels_is_as_in_kimi_linear(rows, form):
    (q, k, *rest), state = inputs(rows, channels=True)
    q, k = (np.repeat(x, HEADS // KEY_HEADS, 1) for x in (q, k))  # which has as many key heads as heads
    check_delta(getattr(kimi, form), q, k, *rest, state)


@pytest.mark.skipif(not hasattr(mamba, "mamba2_chunk_scan"), reason="transformers has no function of it")
@pytest.mark.parametrize("rows", ROWS)
def test_a_state_space_is_as_in_mamba2(rows):
    (x, b, c, dt, a, d), state = ssd_inputs(rows)
    out, end = mamba.mamba2_chunk_scan(*single(x, dt), single(a)[0][0], *single(b, c), chunk_size=64, D=single(d)[0][0],
                                       initial_states=single(state.swapaxes(1, 2))[0], return_final_states=True)
    expected, state = ssd_recurrent(x, b, c, dt, a, d, state)
    check(out[0], expected, SINGLE)
    check(end[0], state.swapaxes(1, 2), SINGLE)


@pytest.mark.parametrize("module, activation", [(qwen.Qwen3NextRMSNormGated, silu),
                                                (kimi.KimiLinearRMSNormGated, sigmoid)])
def test_gated_norms(module, activation):
    rng = np.random.default_rng(2)
    x, gate, weight = rng.standard_normal((7, 3, 20)), rng.standard_normal((7, 3, 20)), rng.standard_normal(20)
    norm = module(20, eps=1e-2)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor(weight))
        found = norm(torch.tensor(x, dtype=torch.float32), torch.tensor(gate, dtype=torch.float32))
    check(found, gated_rms_norm(x, gate, weight, 1e-2, activation), SINGLE)


@pytest.mark.parametrize("bound", [0.0, -5.0])
def test_the_decay_of_channels(bound):
    sizes = {"hidden_size": 24, "linear_head_dim": 20, "linear_num_heads": 3}
    gate = (glm.Glm5NextTextForgetGate(glm.Glm5NextTextConfig(linear_lower_bound=bound, **sizes)) if bound else
            kimi.KimiLinearForgetGate(kimi.KimiLinearConfig(**sizes)))
    rng = np.random.default_rng(5)
    x = rng.standard_normal((9, 24))
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.copy_(torch.tensor(rng.standard_normal(parameter.shape)))
        found = gate(single(x)[0])[0]
    values = {name: parameter.detach().double().numpy() for name, parameter in gate.named_parameters()}
    a = (x @ values["f_a_proj.weight"].T @ values["f_b_proj.weight"].T).reshape(9, 3, 20)
    weights = values["A_log"].reshape(3, 1), values["dt_bias"].reshape(3, 20)
    check(found, bounded_decay(a, *weights, bound) if bound else softplus_decay(a, *weights), SINGLE)


@torch.no_grad()
def test_a_layer_of_qwen3_next():
    """Convolution, decay, rule and norm in the layer's order, with its packing of columns."""
    hidden, key_heads, heads, key, value = 24, KEY_HEADS, HEADS, KEY, VALUE
    config = qwen.Qwen3NextConfig(
        hidden_size=hidden, linear_num_key_heads=key_heads, linear_num_value_heads=heads, linear_key_head_dim=key,
        linear_value_head_dim=value, linear_conv_kernel_dim=4, num_hidden_layers=1, layer_types=["linear_attention"])
    layer, rng = qwen.Qwen3NextGatedDeltaNet(config, 0), np.random.default_rng(3)
    for parameter in layer.parameters():
        parameter.copy_(torch.tensor(rng.standard_normal(parameter.shape)))
    x = rng.standard_normal((131, hidden))
    found = layer(single(x)[0])[0]

    w = {name: parameter.double().numpy() for name, parameter in layer.named_parameters()}
    times, rows = heads // key_heads, len(x)
    packed = (x @ w["in_proj_qkvz.weight"].T).reshape(rows, key_heads, -1)
    q, k, v, z = np.split(packed, np.cumsum([key, key, times * value]), -1)
    b, a = np.split((x @ w["in_proj_ba.weight"].T).reshape(rows, key_heads, -1), 2, -1)
    mixed = np.concatenate([part.reshape(rows, -1) for part in (q, k, v)], -1)
    mixed, _ = causal_convolution(mixed, w["conv1d.weight"][:, 0])
    q, k, v = np.split(mixed, [key_heads * key, 2 * key_heads * key], -1)
    q, k = (l2_normalized(part.reshape(rows, key_heads, key)) for part in (q, k))
    decay = softplus_decay(a.reshape(rows, heads), w["A_log"], w["dt_bias"])
    out, _ = delta_chunked(q, k, v.reshape(rows, heads, value), decay, sigmoid(b.reshape(rows, heads)))
    out = gated_rms_norm(out, z.reshape(rows, heads, value), w["norm.weight"], config.rms_norm_eps)
    check(found, out.reshape(rows, -1) @ w["out_proj.weight"].T, 1e-4)


@torch.no_grad()
def test_the_gate_of_attention_in_qwen3_next():
    """With one row, attention's output is that row's value."""
    config = qwen.Qwen3NextConfig(hidden_size=24, num_attention_heads=3, num_key_value_heads=3, head_dim=8,
                                  num_hidden_layers=1, layer_types=["full_attention"])
    config._attn_implementation = "eager"
    layer, rng = qwen.Qwen3NextAttention(config, 0), np.random.default_rng(4)
    for parameter in layer.parameters():
        parameter.copy_(torch.tensor(rng.standard_normal(parameter.shape)))
    x = rng.standard_normal((1, 24))
    angles = torch.zeros(1, 1, 8)
    found = layer(single(x)[0], position_embeddings=(angles + 1, angles), attention_mask=None)[0][0]
    w = {name: parameter.double().numpy() for name, parameter in layer.named_parameters()}
    gate = (x @ w["q_proj.weight"].T).reshape(3, 2, 8)[:, 1].reshape(1, -1)
    check(found, output_gate(x @ w["v_proj.weight"].T, gate) @ w["o_proj.weight"].T, SINGLE)
