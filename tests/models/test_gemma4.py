"""Gemma 4 against transformers, and its properties: heads of two sizes in one pool of spans, values that are keys, keys
that several layers read, experts beside a dense MLP, and embeddings for every layer. The same bits in every batch, any
number of ranks, every weight format, and serialized.

By default only a part runs; -m "slow or not slow" runs all.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from engine.test_lora import Adapted

from allspark_client.errors import AllSparkError
from allspark_server import HuggingFaceModel
from allspark_server.models import build_graph, read_config
from allspark_server.models.adapters import with_adapters
from allspark_server.models.rotary import rotary_of
from allspark_server.runtime.device import Cpus, Gpu
from allspark_server.weights.checkpoint import open_model
from reference.loading import logits_after, model_runner
from support.checkpoints import (
    PROMPT_LENGTHS,
    check_logits,
    checkpoint,
    load_plain,
    prompt_of,
    reference_logits,
    reference_model,
)
from support.driver import Driver, together
from support.greedy import check_greedy_output
from support.tiny_configs import GEMMA4

FIRST = ("gemma4", "gemma4-moe", "gemma4-small")
FORMATS = [("float32", 0), ("bfloat16", 0), ("int8", 0), ("int4", 32), ("w8a8", 0), ("w4a8", 32)]
slow = pytest.mark.slow
QUICK = [name if name in FIRST else pytest.param(name, marks=slow) for name in GEMMA4]


# -- against transformers ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["gemma4", pytest.param("gemma4-biases", marks=slow)])
def test_frequencies_are_those_of_transformers(name):
    """Of layers without a window, those of a part of the pairs; the others do not turn."""
    config, expected = read_config(checkpoint(name)), reference_model(checkpoint(name)).model.rotary_emb
    for rope, dim, kind in ((config.rope, config.full_heads.head_dim, "full"),
                            (config.local_rope, config.head_dim, "sliding")):
        found = rotary_of(rope, dim).inv_freq
        np.testing.assert_array_max_ulp(found, getattr(expected, f"{kind}_attention_inv_freq").numpy(), 2)
        assert (found == 0).any() == (kind == "full")


@pytest.mark.parametrize("world", [pytest.param(1, marks=slow), 2, pytest.param(3, marks=slow)])
@pytest.mark.parametrize("name", QUICK)
def test_graph_describes_the_model(name, world):
    prompt = prompt_of(33)
    check_logits(logits_after(model_runner(checkpoint(name), world), prompt),
                 reference_logits(checkpoint(name), prompt))


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=slow), 3, pytest.param(4, marks=slow)])
@pytest.mark.parametrize("name", QUICK)
def test_logits(name, world):
    """Prompts shorter than the windows and longer ones."""
    with Driver(checkpoint(name), world) as driver:
        for length in (1, 33, 300):
            prompt = prompt_of(length)
            check_logits(driver.generate(prompt, 1)[1][0], reference_logits(checkpoint(name), prompt))


@slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", GEMMA4)
def test_logits_of_all_lengths(name, world):
    with Driver(checkpoint(name), world) as driver:
        for length in PROMPT_LENGTHS:
            prompt = prompt_of(length)
            check_logits(driver.generate(prompt, 1)[1][0], reference_logits(checkpoint(name), prompt))


@slow
@pytest.mark.timeout(1200)  # the first test computes the reference, token by token in float64
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", GEMMA4)
def test_greedy_output(name, world):
    """256 tokens; prompts in chunks of 48 rows, then token by token."""
    with Driver(checkpoint(name), world) as driver:
        for length in (1, 90):
            prompt = prompt_of(length, seed=1)
            check_greedy_output(driver.generate(prompt, 256, chunk=48)[0], checkpoint(name), prompt)


# -- bits --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, form, group", [
    each if each in (("gemma4", "float32", 0), ("gemma4-small", "w8a8", 0)) else pytest.param(*each, marks=slow)
    for each in ((name, form, group) for name in FIRST for form, group in FORMATS)])
def test_the_same_bits_alone_and_in_a_batch(name, form, group):
    prompts = [prompt_of(n, seed=9) for n in (1, 3, 40, 270)]
    fields = {"weight_dtype": form, "weight_group_size": group, "engine_max_batch": 4, "max_step_tokens": 1024}
    with Driver(checkpoint(name), 1, **fields) as driver:
        expected = [together(driver, [p], 1 << 20)[0] for p in prompts]
        for chunk in (1 << 20, 37):
            for row, wanted in zip(together(driver, prompts, chunk), expected):
                np.testing.assert_array_equal(row, wanted)
    with Driver(checkpoint(name), 1, **{**fields, "num_threads": 3}) as driver:
        for row, wanted in zip(together(driver, prompts, 50), expected):
            np.testing.assert_array_equal(row, wanted)


# -- formats and files -------------------------------------------------------------------------------------------------
@slow
@pytest.mark.parametrize("form, group, tolerance", [
    ("bfloat16", 0, 0.15), ("int8", 0, 0.2), ("int4", 32, 1.2), ("w8a8", 0, 0.4), ("w4a8", 32, 1.2)])
@pytest.mark.parametrize("name", GEMMA4)
def test_weight_formats(name, form, group, tolerance):
    """The table of embeddings for every layer is quantized as the others are, unless quantize_head says otherwise."""
    prompt = prompt_of(64)
    expected = reference_logits(checkpoint(name), prompt)
    for world in (1,) if group else (1, 2):  # ranks would cut inside groups
        with Driver(checkpoint(name), world, weight_dtype=form, weight_group_size=group) as driver:
            _, logits = driver.generate(prompt, 1)
        error = np.sqrt(np.mean((logits[0] - expected) ** 2)) / expected.std()
        print(f"{world} ranks: error {error:.3f}")
        assert error < tolerance


@pytest.mark.parametrize("name, form, group", [
    (name, form, group) if (name, form) == ("gemma4-small", "auto") else pytest.param(name, form, group, marks=slow)
    for name in GEMMA4 for form, group in (("auto", 0), *FORMATS[2:])])
def test_serialized_and_reloaded(name, form, group, tmp_path):
    """The same bits from a checkpoint as from its .asgraph and .asparam, on 1 and 2 ranks, and the same spans."""
    source = checkpoint(name)
    options = {} if form == "auto" else {"enable_quant": True, "customized_quant_config": {
        "weight_format": "uint4" if "4" in form else "int8", "group_size": group,
        "compute_method": "activate_quant" if form.startswith("w") else "weight_only"}}
    HuggingFaceModel(source, "m").serialize_to_path(None, tmp_path, **options)
    prompt, fields = prompt_of(300), {"weight_dtype": form, "weight_group_size": group}
    for world in (1,) if group else (1, 2):
        with Driver(source, world, **fields) as a, Driver(tmp_path / "m.asgraph", world) as b:
            np.testing.assert_array_equal(a.generate(prompt, 2)[1], b.generate(prompt, 2)[1])
            assert a.info.cache_bytes == b.info.cache_bytes and a.info.cache_windows == b.info.cache_windows
    a, b = (open_model(str(path)) for path in (source, tmp_path / "m.asgraph"))
    assert repr(a.graph.config) == repr(b.graph.config) and a.graph.ops == b.graph.ops


# -- with towers -------------------------------------------------------------------------------------------------------
TOWERS = {
    "Gemma4": {"vision_config": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
                                 "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8},
               "audio_config": None},
    "Gemma4Unified": {"vision_config": None, "audio_config": None}}


@pytest.mark.parametrize("family", TOWERS)
def test_the_text_of_a_model_that_sees(family, tmp_path, caplog):
    name = "gemma4-small" if family == "Gemma4" else "gemma4"
    fields = {n: value for n, value in GEMMA4[name].fields.items() if family == "Gemma4" or "per_layer_i" not in n}
    config = getattr(transformers, f"{family}Config")(text_config=fields, **TOWERS[family])
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    text = reference_model(checkpoint(name))
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.save_pretrained(tmp_path)
    with Driver(tmp_path, 1) as driver:
        prompt = prompt_of(129)
        check_logits(driver.generate(prompt, 1)[1][0], reference_logits(checkpoint(name), prompt))
        refused = "of Gemma 4's unified models, which see without a vision tower, only the text is served"
        assert driver.info.no_images_reason == (refused if family == "Gemma4Unified" else "")
    assert "does not use" not in caplog.text


@pytest.mark.parametrize("change, problem", [
    ({"hidden_activation": "silu"}, "'vision_config.hidden_activation'.* is 'silu': only gelu_pytorch_tanh is served"),
    ({"num_key_value_heads": 1}, "'vision_config.num_key_value_heads'.* is 1: only as many as num_attention_heads, 2"),
    ({"attention_bias": True}, "'vision_config.attention_bias'.* is true: only towers without biases"),
    ({"head_dim": 10}, "'vision_config.head_dim'.* is 10: it must be a multiple of 4"),
    ({"rope_parameters": {"rope_type": "default"}}, "'vision_config.rope_parameters.rope_type'.* is 'default': only"),
    ({"position_embedding_size": 0}, "'vision_config.position_embedding_size'.* is 0: it must be positive"),
])
def test_towers_that_are_refused(change, problem, tmp_path):
    vision = {**TOWERS["Gemma4"]["vision_config"], **change}
    values = {"architectures": ["Gemma4ForConditionalGeneration"], "vision_config": vision, "text_config": {
        **json.loads((checkpoint("gemma4-small") / "config.json").read_text()), "architectures": None}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(AllSparkError, match=problem):
        read_config(tmp_path)


# -- what the graph holds ----------------------------------------------------------------------------------------------
def test_adapters_may_change_every_projection():
    graph, targets = with_adapters(open_model(str(checkpoint("gemma4"))).graph)
    modules = {target.module for target in targets}
    for layer in range(graph.config.num_layers):
        of_layer = {module.rpartition(".")[2] for module in modules if module.startswith(f"model.layers.{layer}.self")}
        values = set() if layer == 5 else {"v_proj"}  # the layer without a window has keys as values
        assert of_layer == {"q_proj", "k_proj", "o_proj"} | values


@pytest.mark.parametrize("name", GEMMA4)
def test_no_device_lacks_an_op(name):
    graph = open_model(str(checkpoint(name))).graph
    for device in (Cpus, Gpu):
        assert device.missing(object.__new__(device), graph) is None


@torch.inference_mode()
@pytest.mark.parametrize("name, world", [
    pytest.param(name, world, marks=() if (name, world) in (("gemma4", 3), ("gemma4-moe", 2), ("gemma4-small", 2))
                 else slow) for name in GEMMA4 for world in (1, 2, 3)])
def test_adapters_are_those_of_peft(tmp_path, name, world):
    """Of every linear layer, those of layers that read others' keys and of embeddings for every layer among them."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(len(name))
    model = peft.get_peft_model(load_plain(checkpoint(name), torch.float32), peft.LoraConfig(
        r=3, lora_alpha=6, init_lora_weights=False, target_modules="all-linear"))
    model.save_pretrained(tmp_path / "one")
    exact = model.double().eval()
    with Adapted(name, tmp_path / "one", world) as driver:
        for length in (1, 40, 130):
            ids = prompt_of(length)
            check_logits(driver.generate(ids, 1)[1][0], exact(torch.tensor([ids])).logits[0, -1].numpy())


# -- config.json -------------------------------------------------------------------------------------------------------
def changed(tmp_path, name, change):
    values = json.loads((checkpoint(name) / "config.json").read_text())
    change(values)
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


def published(**fields):
    """The fields that published models have for their heads, in place of per_layer_config."""
    def change(values):
        values.pop("per_layer_config")
        values |= fields

    return change


def test_published_spellings(tmp_path):
    expected = read_config(checkpoint("gemma4"))
    heads = published(global_head_dim=36, num_global_key_value_heads=2)
    assert read_config(changed(tmp_path, "gemma4", heads)).full_heads == expected.full_heads
    small = read_config(changed(tmp_path, "gemma4-small", published(global_head_dim=36)))
    assert small.full_heads == read_config(checkpoint("gemma4-small")).full_heads
    bare = read_config(changed(tmp_path, "gemma4", lambda values: [
        values.pop(name) for name in ("layer_types", "rope_parameters", "rms_norm_eps", "sliding_window")]))
    assert (bare.rope, bare.local_rope) == (expected.rope, expected.local_rope)
    assert bare.windows == (512,) * 5 + (0,)


@pytest.mark.parametrize("name, change, problem", [
    ("gemma4", {"use_bidirectional_attention": "all"}, "in both directions .* is not available yet"),
    ("gemma4", {"per_layer_config": {"0": {"head_dim": 36}}}, "'per_layer_config'.* and no other layer"),
    ("gemma4", {"per_layer_config": {"5": {"sliding_window": 9}}}, "'per_layer_config'.* expected an even head_dim"),
    ("gemma4", {"per_layer_config": {"5": {"head_dim": 37}}}, "'per_layer_config'.* expected an even head_dim"),
    ("gemma4", {"per_layer_config": {"5": {"num_key_value_heads": 3}}}, "that divides num_attention_heads \\(14\\)"),
    ("gemma4", {"num_kv_shared_layers": 6}, "'num_kv_shared_layers'.* is 6: it must be from 0 to 5"),
    ("gemma4", {"num_kv_shared_layers": 1}, "no layer of full_attention is left whose keys"),
    ("gemma4", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
     "'yarn': known types are default, proportional"),
    ("gemma4", {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.5}}},
     "partial_rotary_factor'.* is 1.5: it must be positive and at most 1"),
    ("gemma4", {"final_logit_softcapping": 0}, "'final_logit_softcapping'.* is 0.0: it must be positive"),
    ("gemma4", {"hidden_activation": "silu"}, "'hidden_activation'.* is 'silu': only 'gelu_pytorch_tanh'"),
    ("gemma4-moe", {"top_k_experts": 11}, "'top_k_experts'.* is 11: it must be positive and at most 10"),
    ("gemma4-moe", {"num_experts": None}, "'num_experts'.* is missing"),
    ("gemma4-small", {"vocab_size_per_layer_input": 0}, "'vocab_size_per_layer_input'.* is 0: it must be positive"),
    ("gemma4-small", {"hidden_size_per_layer_input": -1}, "'hidden_size_per_layer_input'.* is -1: it must be positive"),
])  # fmt: skip
def test_configs_that_are_refused(name, change, problem, tmp_path):
    with pytest.raises(AllSparkError, match=problem):
        read_config(changed(tmp_path, name, lambda values: values.update(change)))


@slow
@pytest.mark.parametrize("name", GEMMA4)
def test_no_value_of_a_field_is_a_surprise(name, tmp_path):
    """Any value of a field is either read or refused with an explanation."""
    config = json.loads((checkpoint(name) / "config.json").read_text())
    for field in [*config, "global_head_dim", "num_global_key_value_heads"]:
        for value in (None, -1, 0, "x", [], {}, True, 2.5, 1 << 40, 1e300, [1, "a", None], {"5": [1]}, float("nan")):
            (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
            try:
                build_graph(read_config(tmp_path))
            except (AllSparkError, ValueError) as error:
                assert str(error)
