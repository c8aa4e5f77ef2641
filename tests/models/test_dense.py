"""Dense families that differ from Llama (Phi-3, GLM-4, Gemma 2 and 3, OLMo 2 and 3, EXAONE 4, Arcee and others) against
transformers, and their properties: the same bits in every batch, any number of ranks, every weight format, and
serialized.

By default only a part runs; -m "slow or not slow" runs all.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from allspark_client import AsModelConfig, GenerateConfig
from allspark_client.errors import AllSparkError
from allspark_client.request import RequestSpec
from allspark_server import HuggingFaceModel
from allspark_server.models import build_graph, read_config
from allspark_server.models.rotary import rotary_of
from allspark_server.weights.checkpoint import open_model
from allspark_server.weights.safetensors import write_safetensors
from reference.loading import logits_after, model_runner
from support.checkpoints import PROMPT_LENGTHS, check_logits, checkpoint, prompt_of, reference_logits, reference_model
from support.driver import Driver, together
from support.greedy import Greedy, check_greedy, check_greedy_output
from support.published import PUBLISHED
from support.tiny_configs import DENSE

FIRST = ("phi3-longrope", "glm4", "gemma2", "gemma3", "olmo2")  # one of each kind of network
SECOND = ("seed-oss-plain", "granite-biases", "ernie-biases", "hunyuan-biases")
slow = pytest.mark.slow


def some(names, chosen):
    """All names; those that are not chosen are marked slow."""
    return [name if name in chosen else pytest.param(name, marks=slow) for name in names]


# -- the description of the network, without native code ---------------------------------------------------------------
@pytest.mark.parametrize("name", DENSE)
def test_frequencies_are_those_of_transformers(name):
    config = read_config(checkpoint(name))
    expected = reference_model(checkpoint(name)).model.rotary_emb
    for rope, kind in ((config.rope, "full_attention_"), (config.local_rope, "sliding_attention_")):
        if rope is None:
            continue
        kind = kind if config.local_rope is not None else ""
        rotary = rotary_of(rope, config.head_dim)
        np.testing.assert_array_max_ulp(rotary.inv_freq, getattr(expected, f"{kind}inv_freq").numpy(), 2)
        factor = getattr(expected, f"{kind}attention_scaling")
        assert rotary.attention_factor == pytest.approx(factor, rel=1e-12)


@slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", DENSE)
def test_graph_describes_the_model(name, world):
    runner = model_runner(checkpoint(name), world)
    for length in (1, 7, 300) if world == 1 else (33,):
        prompt = prompt_of(length)
        check_logits(logits_after(runner, prompt), reference_logits(checkpoint(name), prompt))


# -- the native executor -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [pytest.param(name, marks=slow) if name in SECOND else name for name in DENSE])
def test_logits(name):
    with Driver(checkpoint(name), 1) as driver:
        for length in (1, 33, 300):
            prompt = prompt_of(length)
            _, logits = driver.generate(prompt, 1)
            check_logits(logits[0], reference_logits(checkpoint(name), prompt))


@slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", DENSE)
def test_logits_of_all_lengths(name, world):
    with Driver(checkpoint(name), world) as driver:
        for length in PROMPT_LENGTHS:
            prompt = prompt_of(length)
            _, logits = driver.generate(prompt, 1)
            check_logits(logits[0], reference_logits(checkpoint(name), prompt))


@pytest.mark.parametrize("name", some(DENSE, FIRST))
def test_ranks(name):
    prompt = prompt_of(129)
    with Driver(checkpoint(name), 3) as driver:
        check_logits(driver.generate(prompt, 1)[1][0], reference_logits(checkpoint(name), prompt))


@slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", DENSE)
def test_greedy_output(name, world):
    """256 tokens; prompts in chunks of 48 rows, then token by token."""
    with Driver(checkpoint(name), world) as driver:
        for length in (1, 90):
            prompt = prompt_of(length, seed=1)
            check_greedy_output(driver.generate(prompt, 256, chunk=48)[0], checkpoint(name), prompt)


# -- beyond the original length ----------------------------------------------------------------------------------------
@torch.inference_mode()
def grown(directory, prompt, n):
    """Like reference_greedy, with all positions computed again for each token, as transformers does up to the original
    length.
    """
    model, ids, gaps = reference_model(directory, torch.float64), list(prompt), []
    for _ in range(n):
        logits = model(torch.tensor([ids])).logits[0, -1].double()
        best = torch.topk(logits, 2).values
        ids.append(int(logits.argmax()))
        gaps.append(float((best[0] - best[1]) / logits.std()))
    return Greedy(ids[len(prompt):], gaps)


@slow
def test_a_history_that_grows_beyond_the_original_length_is_computed_anew(engine_of):
    """LongRoPE: equal to transformers, with the same bits however the length was reached."""
    engine, bits = engine_of("engine"), []
    prompt, other = prompt_of(240), prompt_of(250, seed=4)
    fields = {"model_path": str(checkpoint("phi3-longrope")), "num_threads": 1, "engine_max_length": 768}
    config = {"max_new_tokens": 40, "eos_token_id": -1, "logprobs": True, "top_logprobs": 2}
    kinds = [{}, {"speculation": "prompt_lookup", "max_step_tokens": 37}, {"enable_prefix_cache": True}]
    for number, more in enumerate(kinds):
        name = f"longrope-{number}"
        engine.install_model(AsModelConfig(model_name=name, **fields, **more))
        engine.start_model(name)
        for _again in range(1 + ("enable_prefix_cache" in more)):
            first = engine.start_request(name, {"input_ids": prompt}, {**config, "do_sample": False})[2]
            careful = {**config, "seed": 5, "stop_words_ids": [[1, 1]]}
            second = engine.start_request(name, {"input_ids": other}, careful)[2]
            found = []
            for answer in (first, second):
                parts = list(answer)
                found.append(([i for part in parts for i in part.ids_from_generate],
                              [p for part in parts for p in part.token_logprobs_list]))
            bits.append(found)
        ids, logprobs = bits[0][1]
        for done in (3, 6, 20) if number == 2 else ():  # before, at and beyond
            spec = RequestSpec(name, input_ids=other, config=GenerateConfig(**config, seed=5), generated=ids[:done])
            parts = list(engine._start(spec)[2])
            assert [i for part in parts for i in part.ids_from_generate] == ids[done:]
            assert [p for part in parts for p in part.token_logprobs_list] == logprobs[done:]
        engine.release_model(name)
    assert all(each == bits[0] for each in bits)
    assert check_greedy(bits[0][0][0], grown(checkpoint("phi3-longrope"), prompt, 40)) > 25


# -- bits --------------------------------------------------------------------------------------------------------------
FORMATS = [("float32", 0), ("bfloat16", 0), ("int8", 0), ("int4", 32), ("w8a8", 0), ("w4a8", 32)]
BITS = [(name, form, group) for name in FIRST for form, group in FORMATS]


@pytest.mark.parametrize("name, form, group", [each if each[1:] in (("float32", 0), ("w8a8", 0)) and each[0] != "gemma3"
                                               else pytest.param(*each, marks=slow) for each in BITS])
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
@pytest.mark.parametrize("name", DENSE)
def test_weight_formats(name, form, group, tolerance):
    prompt = prompt_of(64)
    expected = reference_logits(checkpoint(name), prompt)
    for world in (1,) if group else (1, 2):  # ranks would cut inside groups
        with Driver(checkpoint(name), world, weight_dtype=form, weight_group_size=group) as driver:
            _, logits = driver.generate(prompt, 1)
        error = np.sqrt(np.mean((logits[0] - expected) ** 2)) / expected.std()
        print(f"{world} ranks: error {error:.3f}")
        assert error < tolerance


@pytest.mark.parametrize("name, form, group", [
    (name, form, group) if (name, form) == ("phi3-longrope", "auto") else pytest.param(name, form, group, marks=slow)
    for name in DENSE for form, group in (("auto", 0), *FORMATS[2:])])
def test_serialized_and_reloaded(name, form, group, tmp_path):
    """The same bits from a checkpoint as from its .asgraph and .asparam, on 1 and 2 ranks."""
    source = checkpoint(name)
    options = {} if form == "auto" else {"enable_quant": True, "customized_quant_config": {
        "weight_format": "uint4" if "4" in form else "int8", "group_size": group,
        "compute_method": "activate_quant" if form.startswith("w") else "weight_only"}}
    HuggingFaceModel(source, "m").serialize_to_path(None, tmp_path, **options)
    prompt, fields = prompt_of(300), {"weight_dtype": form, "weight_group_size": group}
    for world in (1,) if group else (1, 2):
        with Driver(source, world, **fields) as a, Driver(tmp_path / "m.asgraph", world) as b:
            np.testing.assert_array_equal(a.generate(prompt, 2)[1], b.generate(prompt, 2)[1])
    a, b = (open_model(str(path)) for path in (source, tmp_path / "m.asgraph"))
    assert repr(a.graph.config) == repr(b.graph.config) and a.graph.ops == b.graph.ops


# -- with a vision tower -----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """A Gemma 3 with a vision part, as transformers 5 writes it."""
    import transformers

    text = dict(DENSE["gemma3"].fields)
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}
    model = transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=5))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = 0.2 if "norm" in name else (0.5 if "embed_tokens" in name else 1.3) * parameter.shape[-1] ** -0.5
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    directory = tmp_path_factory.mktemp("seeing") / "m"
    model.save_pretrained(directory)
    return directory, model.eval()


def older_names(directory, target):
    """The configuration in transformers 4's form, and as published: text_config holds what differs from the
    defaults.
    """
    source = open_model(str(directory)).source.source
    tensors = {}
    for name in source.names():
        new = name.replace("model.language_model.", "language_model.model.").replace("model.vision", "vision")
        tensors[new] = np.asarray(source.get(name).data)
    target.mkdir()
    write_safetensors(target / "model.safetensors", [(n, "F32", a.shape) for n, a in tensors.items()], {},
                      [[a] for a in tensors.values()])
    values = json.loads((directory / "config.json").read_text())
    text = values["text_config"]
    defaults = {"rms_norm_eps": 1e-6}
    values["text_config"] = {name: value for name, value in text.items() if defaults.get(name) != value}
    (target / "config.json").write_text(json.dumps(values))
    return target


@pytest.mark.parametrize("older", [False, True])
def test_the_text_of_a_model_that_sees(older, seeing, tmp_path, caplog):
    directory, model = seeing
    with Driver(older_names(directory, tmp_path / "m") if older else directory, 1) as driver:
        for length in (7, 129):
            prompt = prompt_of(length)
            with torch.inference_mode():
                expected = model(torch.tensor([prompt])).logits[0, -1].double().numpy()
            check_logits(driver.generate(prompt, 1)[1][0], expected)
    assert "does not use" not in caplog.text


# -- config.json -------------------------------------------------------------------------------------------------------
def changed(tmp_path, name, change):
    values = json.loads((checkpoint(name) / "config.json").read_text())
    change(values)
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


@pytest.mark.parametrize("name", DENSE)
def test_spelling_of_transformers_4(name, tmp_path):
    """rope_theta, rope_scaling, rope_local_base_freq, torch_dtype and no layer_types give the same model."""
    def older(values):
        rope = values.pop("rope_parameters")
        values["torch_dtype"] = values.pop("dtype")
        if "full_attention" in rope:
            values["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            rope = rope["full_attention"]
        values["rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            values["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        kind = rope.pop("rope_type")
        if kind == "longrope":
            values["original_max_position_embeddings"] = rope.pop("original_max_position_embeddings")
        values["rope_scaling"] = None if kind == "default" else {"type": "su" if kind == "longrope" else kind, **rope}
        if name in ("gemma2", "gemma3", "olmo3", "exaone4", "exaone4-mha"):  # whose layers are as they are by default
            values.pop("layer_types")
        if name == "gemma3":
            values["sliding_window_pattern"] = values.pop("_sliding_window_pattern")
        if name == "gemma2":
            values["hidden_act"] = values.pop("hidden_activation")

    found = changed(tmp_path, name, older)
    (tmp_path / "generation_config.json").write_bytes((checkpoint(name) / "generation_config.json").read_bytes())
    assert read_config(found) == read_config(checkpoint(name))


@pytest.mark.parametrize("name, change, problem", [
    ("phi3-longrope", {"rope_parameters": {"rope_type": "yarn"}}, "'yarn': known types are default, longrope"),
    ("phi3-longrope", {"rope_parameters": {"rope_type": "longrope"}}, "'rope_parameters.short_factor'.* is missing"),
    ("phi3-longrope", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
     "short_factor'.* holds 1 numbers: expected 12"),
    ("phi3-longrope", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 11 + ["x"]}},
     r"'rope_parameters.short_factor\[11\]'.* is 'x': expected float"),
    ("phi3-longrope", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1] * 11 + [0]}},
     r"short_factor\[11\]'.* is 0.0: it must be positive"),
    ("phi3-longrope", {"rope_parameters": {"partial_rotary_factor": 0.3}}, "it rotates 7 features, which must be even"),
    ("phi3-longrope", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "rotates 36 features"),
    ("phi3-longrope", {"rope_parameters": {"rope_type": "longrope"}, "original_max_position_embeddings": None},
     "'rope_parameters.original_max_position_embeddings'.* is missing"),
    ("phi3-window", {"sliding_window": -2}, "'sliding_window'.* is -2: it must be positive"),
    ("phi3-window", {"sliding_window": 1.5}, "'sliding_window'.* is 1.5: expected int"),
    ("glm", {"head_dim": 7}, "'head_dim'.* is 7: the rotary embedding needs an even"),
    ("glm", {"hidden_act": "gelu"}, "'hidden_act'.* is 'gelu': only 'silu'"),
    ("glm4", {"layer_types": ["sliding_attention"] * 3}, "a sliding window is not available yet"),
    ("gemma2", {"hidden_activation": "gelu"}, "'hidden_activation'.* is 'gelu': only 'gelu_pytorch_tanh'"),
    ("gemma2", {"final_logit_softcapping": 0}, "'final_logit_softcapping'.* is 0.0: it must be positive"),
    ("gemma2", {"attn_logit_softcapping": "50"}, "'attn_logit_softcapping'.* is '50': expected float"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "'query_pre_attn_scalar'.* is 0.0: it must be positive"),
    ("gemma2", {"layer_types": ["full_attention", "chunked_attention"]}, "2 layers of chunked_attention: expected 4"),
    ("gemma2", {"use_bidirectional_attention": True}, "in both directions .* is not available yet"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping'.* is 50.0: Gemma 3 has none"),
    ("gemma3", {"layer_types": None, "sliding_window_pattern": 0}, "'sliding_window_pattern'.* is 0: it must be"),
    ("gemma3", {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
     "'rope_parameters.sliding_attention.rope_type'.* is 'linear': layers with a window support only 'default'"),
    ("gemma3", {"rope_parameters": None, "rope_local_base_freq": 0}, "'rope_local_base_freq'.* is 0.0: it must be"),
    ("olmo2", {"rope_parameters": {"rope_type": "longrope"}}, "'longrope': known types are default"),
    ("olmo3", {"sliding_window": None}, "'sliding_window'.* is missing: layer_types holds sliding_attention"),
    ("exaone4", {"sliding_window": None}, "'sliding_window'.* is missing: layer_types holds sliding_attention"),
    ("exaone4", {"layer_types": None, "sliding_window_pattern": "LLLG"},
     "'sliding_window_pattern'.* is 'LLLG': expected int"),
    ("arcee", {"hidden_act": "silu"}, "'hidden_act'.* is 'silu': only 'relu2' is supported"),
    ("granite", {"logits_scaling": 0}, "'logits_scaling'.* is 0.0: it must be positive"),
    ("hunyuan", {"use_cla": True}, "'use_cla'.* is True: only False is served"),
    ("hunyuan", {"rope_parameters": {"rope_type": "dynamic", "alpha": -1}}, "alpha'.* is -1.0: it must be positive"),
    ("hunyuan", {"rope_parameters": {"rope_type": "dynamic", "alpha": 2}, "head_dim": 2}, "it must be at least 4"),
])  # fmt: skip
def test_configs_that_are_refused(name, change, problem, tmp_path):
    with pytest.raises(AllSparkError, match=problem):
        read_config(changed(tmp_path, name, lambda values: values.update(change)))


@slow
@pytest.mark.parametrize("name", [*DENSE, *PUBLISHED, "glm4-moe", "minimax-m2", "ernie-moe", "bamba",
                                  "falcon-h1", "olmoe", "granite-moe", "dots1", "exaone-moe", "hunyuan-moe",
                                  "afmoe"])
def test_no_value_of_a_field_is_a_surprise(name, tmp_path):
    """Any value of a field is either read or refused with an explanation."""
    config = PUBLISHED.get(name) or json.loads((checkpoint(name) / "config.json").read_text())
    odd = [None, -1, 0, "x", [], {}, True, 2.5, 1 << 40, 1e300, [1, "a", None], {"a": [1]}, float("nan"), "1e400"]

    def paths(values, before=()):
        for key, value in values.items():
            yield (*before, key)
            if isinstance(value, dict):
                yield from paths(value, (*before, key))

    for path in paths(config):
        for value in odd:
            changed = json.loads(json.dumps(config))
            at = changed
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = value
            (tmp_path / "config.json").write_text(json.dumps(changed).replace('"1e400"', "1e400"))
            try:
                build_graph(read_config(tmp_path))
            except (AllSparkError, ValueError) as error:
                assert str(error)


def test_rescaled_keeps_what_it_does_not_change(tmp_path):
    """set_rope_scale_method on heads that are partly rotated, and on layers with rotary embeddings of their own."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    glm, gemma = read_config(checkpoint("glm"), yarn), read_config(checkpoint("gemma3"), yarn)
    assert (glm.rope.type, glm.rope.dim, glm.max_position_embeddings) == ("yarn", 10, 2048)
    assert (gemma.rope.type, gemma.rope.theta, gemma.local_rope.theta) == ("yarn", 1e6, 1e4)
