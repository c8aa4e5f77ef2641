"""Layers with a state on the GPU: each op against float64, bits over chunks, batches and drafts, states in spans, and
whole models against transformers.
"""

from __future__ import annotations

import numpy as np
import pytest

from allspark_server.runtime.plan import STATES
from reference.plan import GIVEN, SAMPLE
from reference.toy import item, plan, spans_for, start
from support.gpu_toys import EXACT, IN_PARTS, SEED, VOCAB, compare, compiled, embedded, logits_of_rows, tokens_of, toy
from support.recurrent_toys import SHAPES, SSD_SHAPES, STATE_KINDS, recurrent_model, with_conv, with_delta, with_ssd

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("taps, bias, activated", [(1, False, True), (2, True, False), (4, False, True),
                                                   (4, True, True), (7, False, False)])
@pytest.mark.parametrize("channels", [1, 7, 64, 131])
def test_causal_conv(channels, taps, bias, activated):
    own = toy()
    own.finish(with_conv(own, embedded(own, channels), channels, taps, bias, activated))
    compare(own)


@pytest.mark.parametrize("rate", [-3.0, 0.0, 4.0])
@pytest.mark.parametrize("channels, bound", [(False, 0.0), (True, 0.0), (True, -5.0)])
@pytest.mark.parametrize("shape", [*SHAPES, (4, 2, 128, 36), (2, 2, 36, 200)])
def test_gated_delta(shape, channels, bound, rate):
    own = toy()
    own.finish(with_delta(own, embedded(own, 31), *shape, channels, rate, bound))
    compare(own, IN_PARTS)


def test_bounded_decays_of_heads_are_refused():
    own = toy()
    own.finish(with_delta(own, embedded(own, 31), *SHAPES[0], False, 0.0, -5.0))
    with pytest.raises(ValueError, match="bounded decays of whole heads"):
        compare(own, IN_PARTS)


@pytest.mark.parametrize("rate, limits", [(-3.0, {}), (0.0, {"least_step": 0.3, "most_step": 0.9}), (4.0, {})])
@pytest.mark.parametrize("shape", [*SSD_SHAPES, (64, 1, 128, 64), (4, 2, 36, 200)])
def test_ssd(shape, rate, limits):
    own = toy()
    own.finish(with_ssd(own, embedded(own, 31), *shape, rate, **limits))
    compare(own, IN_PARTS)


@pytest.mark.parametrize("width", [1, 33, 640])
def test_relu_square(width):
    own = toy()
    own.finish(own.op("relu_square", (own.embedding(VOCAB, width, own.rng.normal(size=(VOCAB, width))),)))
    compare(own)


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
@pytest.mark.parametrize("heads, dim", [(1, 1), (2, 4), (3, 7), (5, 33), (7, 36), (2, 64), (3, 100), (5, 128), (2, 131),
                                        (2, 512), (2, 700), (1, 1100)])
def test_gates(heads, dim, gate, gate_first):
    own = toy()
    width = heads * dim
    x = own.embedding(VOCAB, width, 4 * own.rng.normal(size=(VOCAB, width)))
    gates = own.op("linear", (x,), width, (own.matrix(width, width),))
    weight = own.vector(width if gate_first else dim)
    normed = own.op("gated_rms_norm", (x, gates), None, (weight,), eps=1e-3, head_dim=dim, gate=gate,
                    gate_first=gate_first)
    own.finish(own.op("sigmoid_gate", (normed, gates)))
    compare(own, 2 * EXACT)     # sums of many features after each other: up to 0.8 of EXACT in 24 runs, once above it


@pytest.mark.parametrize("kind", STATE_KINDS)
@pytest.mark.parametrize("count", [1, 2, 8, 9, 63, 64, 65, 129])
def test_bits_do_not_depend_on_chunks_and_batches(count, kind):
    """Rows of prompts of several chunks, at once and `count` at a time, alone and together."""
    prompts = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (1, 63, 64, 65, 129, 330)]
    own = recurrent_model(7, kind)
    gpu = compiled(own, long=True, outputs=2048)
    expected = []
    for used, prompt in enumerate(prompts):
        free(gpu, used)
        expected += logits_of_rows(gpu, [prompt], lambda: 1000)
    free(gpu, 1)
    assert logits_of_rows(gpu, prompts, lambda: count) == expected
    exact = own.runner(num_spans=(128,), max_length=2048, max_rows=2048).step(
        plan([item(0, 330, SAMPLE, spans=spans_for(330))], [start(0, prompts[-1])])).logits[0]
    found = np.frombuffer(expected[-1], np.float32)[-VOCAB:]
    assert np.abs(found - exact).max() <= EXACT * np.sqrt(np.mean(exact**2))


@pytest.mark.parametrize("kind, shape", [("delta", (32, 16, 128, 128)), ("delta", (16, 16, 36, 130)),
                                         ("delta of channels", (32, 32, 128, 128)),
                                         ("delta of channels", (16, 8, 36, 130)),
                                         ("ssd", (64, 8, 128, 64)), ("ssd", (48, 4, 20, 40))])
def test_rows_of_many_sequences_have_the_bits_of_one(kind, shape):
    """So many sequences that single rows have a kernel of their own, and its CTAs one head or several."""
    own = toy()
    x = embedded(own, 24)
    y = (with_ssd(own, x, *shape, -1.0) if kind == "ssd" else
         with_delta(own, x, *shape, kind.endswith("channels"), -1.0))
    own.op("add", (x, own.op("linear", (y,), 24, (own.matrix(24, shape[0] * shape[3]),))))
    qkv = own.op("linear", (x,), 24, (own.matrix(24, 24),))
    own.op("add", (x, own.op("linear", (own.attention(qkv, 1, 1, 8),), 24, (own.matrix(24, 8),))))
    own.finish(own.op("linear", (x,), VOCAB, (own.matrix(VOCAB, 24),)))
    gpu = compiled(own, long=True, slots=32, outputs=2048)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (1, 2, 9, 63, 64, 65, 66, 131, *rng.integers(1, 80, 24))]
    expected = []
    for used, prompt in enumerate(prompts):
        free(gpu, used)
        expected += logits_of_rows(gpu, [prompt], lambda: 1)
    free(gpu, 1)
    for many in (12, 32):
        assert logits_of_rows(gpu, prompts[:many], lambda: 1) == expected[:many], many
        gpu.step(plan([], free=list(range(many))), False)


def free(gpu, used: int) -> None:
    """Frees slot 0 if it has been used."""
    if used:
        gpu.step(plan([], free=[0]), False)


@pytest.mark.parametrize("kind", STATE_KINDS)
@pytest.mark.parametrize("length", [1, 40, 57, 60, 62, 63, 64, 65, 100])
def test_rejected_drafts_leave_no_trace_in_states(length, kind):
    """Random drafts, also beyond a multiple of 64 positions, against none; with and without graphs."""
    prompts = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (length, length + 1)]
    found = [tokens_of(compiled(recurrent_model(9, kind), graphs=graphs), prompts, flags, drafts=drafts,
                       do_sample=False)
             for graphs, flags, drafts in ((True, 0, 0), (False, 0, 0), (True, GIVEN, 3), (True, GIVEN, 12))]
    assert all(each == found[0] for each in found[1:])


@pytest.mark.parametrize("kind", STATE_KINDS)
def test_a_state_is_saved_and_loaded_with_its_bits(kind):
    """Through spans of the cache to another slot: the next rows' logits are those of the sequence itself."""
    gpu, size = compiled(recurrent_model(9, kind), long=True), 150
    prompt = np.random.default_rng(SEED).integers(0, VOCAB, size).tolist()
    own, state = spans_for(size), list(range(20, 220))
    expected = gpu.step(plan([item(0, size, SAMPLE, spans=own)], [start(0, prompt)]), True).logits
    gpu.step(plan([], free=[0], sections=[(STATES, [1, len(state), 0, 128, *state])]), False)
    found = gpu.step(plan([item(1, size - 128, SAMPLE, spans=own)], [start(1, prompt, cached=128)],
                          sections=[(STATES, [0, len(state), 1, 128, *state])]), True).logits
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(ValueError, match="has its recurrent state at position 128, not 64"):
        gpu.step(plan([], sections=[(STATES, [1, len(state), 1, 64, *state])]), False)


# -- whole models ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["qwen3-next", "qwen3-5", "qwen3-5-moe", "nemotron-h", "nemotron-h-latent",
                                  "granite-hybrid", "granite-hybrid-dense", "bamba", "falcon-h1", "kimi-linear",
                                  "kimi-linear-plain"])
def test_model_in_float32(name):
    pytest.importorskip("transformers.models.qwen3_5_moe")
    from support.checkpoints import check_logits, checkpoint, prompt_of, reference_logits
    from support.driver import Driver

    with Driver(checkpoint(name), compute_unit="CUDA:0", weight_dtype="float32") as gpu:
        for length in (1, 33, 63, 65, 300):
            prompt = prompt_of(length)
            check_logits(gpu.generate(prompt, 1)[1][0], reference_logits(checkpoint(name), prompt))


@pytest.mark.parametrize("name, form, group", [("qwen3-5-moe", "bfloat16", 0), ("qwen3-5-moe", "int8", 0),
                                               ("qwen3-5-moe", "int4", 32), ("qwen3-5", "w8a8", 0),
                                               ("nemotron-h", "bfloat16", 0), ("nemotron-h", "int8", 0),
                                               ("nemotron-h", "w8a8", 0), ("granite-hybrid", "bfloat16", 0),
                                               ("granite-hybrid", "int4", 32), ("bamba", "w8a8", 0),
                                               ("falcon-h1", "bfloat16", 0), ("kimi-linear", "bfloat16", 0),
                                               ("kimi-linear-plain", "int8", 0), ("kimi-linear", "w8a8", 0),
                                               ("kimi-linear", "int4", 32)])
def test_bits_of_models_in_every_format(name, form, group):
    pytest.importorskip("transformers.models.qwen3_5_moe")
    from support.checkpoints import checkpoint, prompt_of
    from support.driver import Driver, together

    prompts = [prompt_of(n, seed=9) for n in (1, 3, 40, 270)]
    with Driver(checkpoint(name), compute_unit="CUDA:0", weight_dtype=form, weight_group_size=group,
                engine_max_batch=4) as gpu:
        expected = [together(gpu, [p], 1 << 10)[0] for p in prompts]
        for row, wanted in zip(together(gpu, prompts, 37), expected):
            np.testing.assert_array_equal(row, wanted)
