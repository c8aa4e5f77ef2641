"""The models against transformers: the op lists in the reference backend, and the native executor on 1 to 4 ranks.

Ranks are threads here; tests/runtime/test_ranks.py runs the same checkpoints on real processes.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from allspark_client.errors import AllSparkError
from allspark_server.models import read_config
from allspark_server.models.rotary import rotary_of
from reference.loading import logits_after, model_runner
from support.checkpoints import PROMPT_LENGTHS, check_logits, checkpoint, prompt_of, reference_logits, reference_model
from support.driver import Driver
from support.greedy import check_greedy_output
from support.tiny_configs import CONFIGS, STORED

RANKS = (1, 2, 3, 4)
GREEDY_PROMPTS = (1, 90)


def one_each(names, worlds, long=()):
    """Each name with one of the numbers of ranks in turn; the other pairs, and those of `long`, are slow."""
    return [pytest.param(name, world, marks=() if name not in long and world == worlds[i % len(worlds)]
                         else pytest.mark.slow)
            for i, name in enumerate(names) for world in worlds]


# -- the description of the network, without native code ---------------------------------------------------------------
@pytest.mark.parametrize("name", CONFIGS)
def test_frequencies_are_those_of_transformers(name):
    config = read_config(checkpoint(name))
    rotary = rotary_of(config.rope, config.head_dim)
    expected = reference_model(checkpoint(name)).model.rotary_emb
    np.testing.assert_array_max_ulp(rotary.inv_freq, expected.inv_freq.numpy(), 2)
    assert rotary.attention_factor == pytest.approx(expected.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("name", CONFIGS)
def test_graph_describes_the_model(name):
    runner = model_runner(checkpoint(name))
    for length in (1, 7, 300):
        prompt = prompt_of(length)
        check_logits(logits_after(runner, prompt), reference_logits(checkpoint(name), prompt))


@pytest.mark.parametrize("name, world", one_each(CONFIGS, RANKS[1:]))
def test_shards_add_up_to_the_model(name, world):
    prompt = prompt_of(33)
    check_logits(logits_after(model_runner(checkpoint(name), world), prompt),
                 reference_logits(checkpoint(name), prompt))


# -- the native executor -----------------------------------------------------------------------------------------------
#: models whose reference takes long and whose parts are in the others', too: 256 tokens of them are for nightly tests
LONG = ("llama-linear", "llama-dynamic", "llama-biases", "mistral", "ministral", "qwen3-dynamic-bias")


@pytest.mark.parametrize("name, world", [
    pytest.param(name, world, marks=() if world in (1, RANKS[1 + i % 3]) else pytest.mark.slow)
    for i, name in enumerate(CONFIGS) for world in RANKS])
def test_logits(name, world):
    with Driver(checkpoint(name), world) as driver:
        for length in PROMPT_LENGTHS if world == 1 else (1, 33, 300):
            prompt = prompt_of(length)
            _, logits = driver.generate(prompt, 1)
            check_logits(logits[0], reference_logits(checkpoint(name), prompt))


@pytest.mark.parametrize("name, world", one_each(CONFIGS, RANKS, LONG))
def test_greedy_output(name, world):
    """256 tokens; prompts in chunks of 48 rows, then token by token."""
    with Driver(checkpoint(name), world) as driver:
        for length in GREEDY_PROMPTS:
            prompt = prompt_of(length, seed=1)
            tokens, _ = driver.generate(prompt, 256, chunk=48)
            check_greedy_output(tokens, checkpoint(name), prompt)


@pytest.mark.parametrize("world", (1, 2))
@pytest.mark.parametrize("name", [name for name, spec in STORED.items() if spec.dtype == "bfloat16"])
def test_bfloat16_error_is_no_larger_than_that_of_transformers(name, world):
    with Driver(checkpoint(name), world) as driver:
        assert driver.info.weight_dtype == driver.info.cache_dtype == "bfloat16"
        for length in (1, 33, 300):
            prompt = prompt_of(length)
            exact = reference_logits(checkpoint(name), prompt)
            allowed = np.abs(reference_logits(checkpoint(name), prompt, torch.bfloat16) - exact).max()
            _, logits = driver.generate(prompt, 1)
            assert np.abs(logits[0] - exact).max() <= allowed


@pytest.mark.parametrize("name", STORED)
def test_any_stored_type_computed_in_float32(name):
    with Driver(checkpoint(name), weight_dtype="float32") as driver:
        assert driver.info.weight_dtype == driver.info.cache_dtype == "float32"
        for length in (7, 129):
            prompt = prompt_of(length)
            _, logits = driver.generate(prompt, 1)
            check_logits(logits[0], reference_logits(checkpoint(name), prompt))


def test_float16_becomes_float32_by_itself():
    with Driver(checkpoint("llama-fp16-sharded")) as driver:
        assert driver.info.weight_dtype == "float32"


def test_float32_rounded_to_bfloat16():
    name, prompt = "llama3", prompt_of(64)
    with Driver(checkpoint(name), weight_dtype="bfloat16", cache_dtype="float32") as driver:
        assert (driver.info.weight_dtype, driver.info.cache_dtype) == ("bfloat16", "float32")
        _, logits = driver.generate(prompt, 1)
    exact = reference_logits(checkpoint(name), prompt)
    assert 0.001 < np.abs(logits[0] - exact).max() / exact.std() < 0.3


# -- spellings of config.json ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", CONFIGS)
def test_spelling_of_transformers_4(name, tmp_path):
    """rope_theta, rope_scaling (with the older "type") and torch_dtype give the same model."""
    directory = checkpoint(name)
    values = json.loads((directory / "config.json").read_text())
    rope = values.pop("rope_parameters")
    values["torch_dtype"] = values.pop("dtype")
    values["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    values["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    (tmp_path / "config.json").write_text(json.dumps(values))
    shutil.copy(directory / "generation_config.json", tmp_path)
    assert read_config(tmp_path) == read_config(directory)


def test_defaults_of_cwm(tmp_path):
    """Without layer_types and a rotary embedding, both are as transformers' config class makes them."""
    values = json.loads((checkpoint("cwm") / "config.json").read_text())
    for name in ("layer_types", "rope_parameters"):
        values.pop(name)
    (tmp_path / "config.json").write_text(json.dumps(values))
    config, expected = read_config(tmp_path), transformers.CwmConfig(num_hidden_layers=5)
    assert config.windows == tuple(61 * (kind == "sliding_attention") for kind in expected.layer_types)
    rope = expected.rope_parameters
    assert (config.rope.type, config.rope.theta, config.rope.factor, config.rope.original_max) == (
        rope["rope_type"], rope["rope_theta"], rope["factor"], rope["original_max_position_embeddings"])


def test_published_biases_of_internlm3(tmp_path):
    """Published checkpoints have other names for them, and transformers serves none with only one of the two."""
    values = json.loads((checkpoint("internlm3-biases") / "config.json").read_text())
    values |= {"qkv_bias": values.pop("attention_bias"), "bias": values.pop("mlp_bias")}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_config(tmp_path) == read_config(checkpoint("internlm3-biases"))
    (tmp_path / "config.json").write_text(json.dumps({**values, "bias": False}))
    with pytest.raises(AllSparkError, match="'qkv_bias'.* is True with bias=False: they must be equal"):
        read_config(tmp_path)
