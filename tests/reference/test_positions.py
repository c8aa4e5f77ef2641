"""Rotary tables and rope of the reference backend, against transformers' own functions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from reference.plan import HIDDEN
from reference.toy import Toy, item, plan, spans_for, start

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

HEADS, DIM, ROWS = 3, 20, 41


def rows(width=HEADS * DIM, n=ROWS):
    return np.random.default_rng(3).normal(size=(n, width)).astype(np.float32).astype(float)


def rotated(x, positions=None, prompt_len=0, frequencies=2, rotary_dim=DIM, table=None, **attributes):
    """Rotary embedding of rows x; frequencies: vectors, or how many tables of their own base."""
    toy = Toy()
    hidden = toy.embedding(3, x.shape[1])
    weights = [toy.vector(f) for f in frequencies]
    toy.op("rotary_table", (), None, weights, rotary_dim=rotary_dim, long_table=len(weights) == 2, **(table or {}))
    toy.emit(toy.op("rope", (hidden,), offset=0, heads=HEADS, head_dim=DIM, rotary_dim=rotary_dim, **attributes))
    return toy.emitted(embeddings=x, positions=positions, prompt_len=prompt_len)


def frequencies(dim=DIM, base=10000.0):
    return (1 / base ** (np.arange(0, dim, 2) / dim)).astype(np.float32)


def cos_sin(positions, freqs):
    """As transformers' modules give them: [1, rows, dim]."""
    angles = torch.tensor((np.asarray(positions, np.float32)[..., None] * freqs).astype(float))
    both = torch.cat((angles, angles), -1)
    return both.cos(), both.sin()


def heads(x):
    """[1, heads, rows, dim]."""
    return torch.tensor(x.reshape(len(x), HEADS, DIM).transpose(1, 0, 2)[None])


def flat(x):
    return x[0].numpy().transpose(1, 0, 2).reshape(x.shape[2], -1)


def test_halves():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    x, (cos, sin) = rows(), cos_sin([np.arange(ROWS)], frequencies())
    expected, _ = apply_rotary_pos_emb(heads(x), heads(x), cos, sin)
    found = rotated(x, frequencies=[frequencies()], table={"attention_factor": 1.0})
    np.testing.assert_allclose(found, flat(expected), rtol=1e-13, atol=1e-14)


def test_interleaved_and_partial_are_those_of_glm():
    from transformers.models.glm.modeling_glm import apply_rotary_pos_emb

    dim = DIM // 2
    x, (cos, sin) = rows(), cos_sin([np.arange(ROWS)], frequencies(dim))
    expected, _ = apply_rotary_pos_emb(heads(x), heads(x), cos, sin)
    found = rotated(x, frequencies=[frequencies(dim)], rotary_dim=dim, pairs="interleaved")
    np.testing.assert_allclose(found, flat(expected), rtol=1e-13, atol=1e-14)


def test_partial_halves_are_those_of_phi():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    dim = 8
    x, (cos, sin) = rows(), cos_sin([np.arange(ROWS)], frequencies(dim))
    q = heads(x)
    turned, _ = apply_rotary_pos_emb(q[..., :dim], q[..., :dim], cos, sin)
    expected = torch.cat((turned, q[..., dim:]), -1)
    found = rotated(x, frequencies=[frequencies(dim)], rotary_dim=dim)
    np.testing.assert_allclose(found, flat(expected), rtol=1e-13, atol=1e-14)


def test_each_rope_chooses_its_table():
    """Gemma 3's layers have a local base or a global one."""
    x, found = rows(), {}
    for chosen in (0, 7):
        toy = Toy()
        hidden = toy.embedding(3, x.shape[1])
        for table, base in ((0, 1e4), (7, 1e6)):
            toy.rotary(DIM, base, table=table)
        toy.emit(toy.op("rope", (hidden,), offset=0, heads=HEADS, head_dim=DIM, table=chosen))
        found[chosen] = toy.emitted(embeddings=x)
    np.testing.assert_array_equal(found[0], rotated(x, frequencies=[frequencies()]))
    np.testing.assert_array_equal(found[7], rotated(x, frequencies=[frequencies(base=1e6)]))
    assert np.abs(found[0] - found[7]).max() > 0.1
    with pytest.raises(ValueError, match="rotary_dim differs from rotary_table's"):
        toy.op("rope", (hidden,), offset=0, heads=HEADS, head_dim=DIM, table=1)


def three_parts():
    """Text, a picture of 3 x 4, text again."""
    grid = [(3, 3 + y, 3 + x) for y in range(3) for x in range(4)]
    return np.array([(i, i, i) for i in range(3)] + grid + [(i, i, i) for i in range(7, 7 + ROWS - 15)])


@pytest.mark.parametrize("family, sections", [("qwen2_vl", (2, 3, 5)), ("qwen3_vl", (6, 2, 2))])
def test_positions_of_three_parts(family, sections):
    """In Qwen 2 VL the parts' pairs come one after the other, in Qwen 3 VL in turn."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    kind = {"qwen2_vl": Qwen2VLRotaryEmbedding, "qwen3_vl": Qwen3VLTextRotaryEmbedding}[family]
    x, positions = rows(), three_parts()
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    module.mrope_section = sections
    angles = torch.tensor((positions.T[:, None, :, None].astype(np.float32) * frequencies()).astype(float))
    angles = module.recomposition_frequencies(angles)
    expected, _ = apply_rotary_pos_emb(heads(x), heads(x), angles.cos(), angles.sin())
    table = {**dict(zip(("temporal", "height", "width"), sections)), "interleaved_sections": family == "qwen3_vl"}
    found = rotated(x, positions, frequencies=[frequencies()], table=table)
    np.testing.assert_allclose(found, flat(expected), rtol=1e-13, atol=1e-14)


def test_positions_behind_those_given_go_on_from_there():
    x, positions = rows(), three_parts()
    table = {"temporal": 2, "height": 3, "width": 5}
    whole = rotated(x, positions, frequencies=[frequencies()], table=table)
    toy = Toy()
    hidden = toy.embedding(3, x.shape[1])
    toy.op("rotary_table", (), None, [toy.vector(frequencies())], rotary_dim=DIM, **table)
    toy.emit(toy.op("rope", (hidden,), offset=0, heads=HEADS, head_dim=DIM))
    from reference.plan import POSITIONS
    from reference.toy import embedded

    short, delta = positions[:15], positions[15, 0] - 15  # the model's "rope delta"
    found = toy.runner().step(plan(
        [item(0, ROWS, HIDDEN, outputs=ROWS, spans=spans_for(ROWS))], [start(0, range(ROWS))],
        sections=[embedded(0, 0, x), (POSITIONS, [0, 15, int(delta), *short.ravel().tolist()])])).hidden
    np.testing.assert_array_equal(found, whole)


def rope_config(kind, **scaling):
    from transformers import LlamaConfig

    return LlamaConfig(hidden_size=HEADS * DIM, num_attention_heads=HEADS, max_position_embeddings=32,
                       rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **scaling})


def of_transformers(config, length):
    """(frequencies, attention factor) for a request of that length."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config.standardize_rope_params()
    found, factor = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, torch.device("cpu"), length)
    return found.numpy(), factor


@pytest.mark.parametrize("prompt_len", [20, 33])
def test_longrope_chooses_a_table_by_the_request_s_length(prompt_len):
    """The original length is 32 positions; a longer prompt uses the long factors from its first position on."""
    short, long = [1.0 + 0.05 * i for i in range(DIM // 2)], [1.5 + i for i in range(DIM // 2)]
    config = rope_config("longrope", short_factor=short, long_factor=long, factor=4.0,
                         original_max_position_embeddings=32)
    wanted, factor = of_transformers(config, prompt_len)
    tables = [of_transformers(config, length)[0] for length in (32, 33)]
    x = rows(n=20)
    found = rotated(x, prompt_len=prompt_len, frequencies=tables,
                    table={"original_max": 32, "attention_factor": factor})
    np.testing.assert_array_equal(found, rotated(x, frequencies=[wanted], table={"attention_factor": factor}))
    assert (prompt_len > 32) == bool((wanted == tables[1]).all())


@pytest.mark.parametrize("prompt_len", [20, 33, 77])
def test_dynamic_base_grows_with_the_request_s_length(prompt_len):
    wanted, _ = of_transformers(rope_config("dynamic", factor=3.0), prompt_len)
    x = rows(n=20)
    table = {"dynamic": True, "base": 10000.0, "factor": 3.0, "original_max": 32}
    found = rotated(x, prompt_len=prompt_len, frequencies=[frequencies()], table=table)
    np.testing.assert_allclose(found, rotated(x, frequencies=[wanted]), atol=2e-5)
    assert (np.abs(found - rotated(x, frequencies=[frequencies()])).max() > 1e-3) == (prompt_len > 32)


@pytest.mark.parametrize("prompt_len", [20, 33, 65, 120])
def test_dynamic_base_in_powers_of_two_is_that_of_qwen(prompt_len):
    """modeling_qwen.py: get_ntk_alpha and RotaryEmbedding.update_rotary_pos_emb_cache."""
    alpha = max(2 ** math.ceil(math.log(prompt_len / 32, 2) + 1) - 1, 1) if prompt_len > 32 else 1
    base = 10000.0 * alpha ** (DIM / (DIM - 2))
    wanted = (1.0 / base ** (np.arange(0, DIM, 2) / DIM)).astype(np.float32)
    table = {"dynamic": True, "base": 10000.0, "original_max": 32, "growth": "powers"}
    x = rows(n=20)
    found = rotated(x, prompt_len=prompt_len, frequencies=[frequencies()], table=table)
    np.testing.assert_allclose(found, rotated(x, frequencies=[wanted]), atol=2e-5)


def test_requests_in_one_batch_have_each_its_own_table():
    x = rows(n=20)
    toy = Toy()
    hidden = toy.embedding(64, x.shape[1], np.random.default_rng(8).normal(size=(64, x.shape[1])))
    toy.op("rotary_table", (), None, [toy.vector(frequencies()), toy.vector(frequencies() / 4)], rotary_dim=DIM,
           original_max=32, long_table=True)
    toy.emit(toy.op("rope", (hidden,), offset=0, heads=HEADS, head_dim=DIM))
    short, long = list(range(20)), list(range(20, 60))
    alone = [toy.emitted(short, prompt_len=20), toy.emitted(long, prompt_len=40)]
    together = toy.runner().step(plan(
        [item(1, 40, HIDDEN, outputs=40, spans=spans_for(40)), item(0, 20, HIDDEN, outputs=20, spans=spans_for(20, 8))],
        [start(0, short), start(1, long)])).hidden
    np.testing.assert_array_equal(together, np.concatenate(alone[::-1]))


@pytest.mark.parametrize("attributes, weights, problem", [
    ({"temporal": 1}, 1, "sections of 1 pairs, expected 10"),
    ({"long_table": True}, 2, "a long_table needs an original_max"),
    ({}, 2, "2 weights, expected 1"),
    ({"growth": "slow"}, 1, "growth is 'slow': expected one of linear, powers"),
    ({"table": 256}, 1, "table is 256: expected an integer of 0 to 255"),
])  # fmt: skip
def test_refusals(attributes, weights, problem):
    toy = Toy()
    with pytest.raises(ValueError, match=problem):
        toy.op("rotary_table", (), None, [toy.vector(DIM // 2)] * weights, rotary_dim=DIM, **attributes)
