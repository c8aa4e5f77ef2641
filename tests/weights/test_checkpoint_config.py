"""config.json, generation_config.json and tokenizers of a checkpoint: what is read, and which errors are named."""

from __future__ import annotations

import json

import pytest

from allspark_client import GenerateConfig
from allspark_client.errors import AllSparkError
from allspark_server import HuggingFaceModel
from allspark_server.models import read_config
from allspark_server.weights.checkpoint import open_model
from support.checkpoint_edits import edit_config

pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.checkpoints import checkpoint


# -- config.json -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("field", ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                                   "num_key_value_heads", "vocab_size", "rms_norm_eps", "max_position_embeddings"))
def test_missing_field_is_named_with_its_file(copy, field):
    directory = copy()
    edit_config(directory, **{field: ...})
    with pytest.raises(AllSparkError, match=f"field '{field}' of .*config.json is missing"):
        read_config(directory)


@pytest.mark.parametrize("changes, problem", [
    ({"architectures": ["MambaForCausalLM"]},
     "'MambaForCausalLM', which is not supported: known architectures are Qwen2ForCausalLM, Qwen2For"),
    ({"architectures": ..., "model_type": ...}, "field 'architectures' .* is missing"),
    ({"architectures": ..., "model_type": "gpt2"}, "'gpt2', which is not supported"),
    ({"hidden_size": "112"}, "field 'hidden_size' of .* is '112': expected int"),
    ({"hidden_size": -1}, "must be positive"), ({"num_hidden_layers": True}, "is True: expected int"),
    ({"num_key_value_heads": 3}, r"is 3: it must divide num_attention_heads \(14\)"),
    ({"hidden_size": 113}, "must be a multiple of num_attention_heads"),
    ({"hidden_act": "gelu"}, "'gelu': only 'silu'"),
    ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types.* sliding_attention"),
    ({"layer_types": ..., "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
     "use_sliding_window.* sliding_window=64 from layer 1: a sliding window is not available yet"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope': known types are default, linear, dynamic, llama3"),
    ({"rope_parameters": {"rope_type": "linear"}}, "field 'rope_parameters.factor' of .* is missing"),
    ({"rope_parameters": ..., "rope_scaling": {"type": "llama3", "factor": 8}},
     "'rope_scaling.low_freq_factor'.* is missing"),
    ({"rope_parameters": {"rope_theta": 0.0}}, "rope_theta.* must be positive"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "only 1.0 is supported"),
])
def test_config_that_cannot_be_served(copy, changes, problem):
    directory = copy()
    edit_config(directory, **changes)
    with pytest.raises(AllSparkError, match=problem):
        read_config(directory)


def test_config_that_is_not_json(copy):
    directory = copy()
    for text, problem in (("{", "config.json is not valid JSON"), ("[]", "holds a list: expected an object")):
        (directory / "config.json").write_text(text)
        with pytest.raises(AllSparkError, match=problem):
            read_config(directory)
    (directory / "config.json").unlink()
    with pytest.raises(AllSparkError, match="config.json does not exist"):
        read_config(directory)


def test_fields_that_may_be_absent(copy):
    directory = copy()
    plain = read_config(directory)
    edit_config(directory, architectures=..., tie_word_embeddings=..., use_sliding_window=True, sliding_window=64,
                 max_window_layers=3, layer_types=..., hidden_act=..., rope_parameters=...)
    (directory / "generation_config.json").unlink()
    found = read_config(directory)
    assert (found.architecture, found.tie_word_embeddings, found.rope.theta) == ("Qwen2ForCausalLM", False, 10000.0)
    assert found.eos_token_ids == plain.eos_token_ids == (2,)
    llama = copy("llama-biases")
    edit_config(llama, num_key_value_heads=..., head_dim=...)
    assert read_config(llama) == read_config(checkpoint("llama-biases"))


def test_sampling_settings_of_generation_config_come_with_the_builder(copy):
    directory = copy()
    settings = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05,
                "no_repeat_ngram_size": 4}
    path = directory / "generation_config.json"
    path.write_text(json.dumps({**settings, "eos_token_id": [7, 8], "min_length": None, "transformers_version": "5"}))
    model = HuggingFaceModel(directory, "m").read_model_config()
    runtime = model.create_reference_runtime_config_builder("m").max_length(77).build()
    config = model.create_reference_generation_config_builder(runtime).build()
    assert {name: config[name] for name in settings} == settings
    assert (config.eos_token_id, config.max_length) == ([7, 8], 77)
    assert {**dict(GenerateConfig()), **settings, "eos_token_id": [7, 8], "max_length": 77} == dict(config)
    path.write_text('{"temperature": 0.0}')
    with pytest.raises(AllSparkError, match="PARAM_ERROR: .*generation_config.json: temperature=0 .*do_sample=False"):
        model.create_reference_generation_config_builder(runtime)


def test_end_of_sequence_ids_of_generation_config_come_first(copy):
    directory = copy()
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert read_config(directory).eos_token_ids == (7, 8)
    (directory / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(AllSparkError, match="field 'eos_token_id' of .*generation_config.json is 'x'"):
        read_config(directory)


# -- tokenizers --------------------------------------------------------------------------------------------------------
def test_tokenizer_goes_with_the_serialized_model(copy):
    tokenizers = pytest.importorskip("tokenizers")
    directory = copy("llama-linear")
    words = {"<unk>": 0, "one": 1, "two": 2}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    model = HuggingFaceModel(directory, "m").serialize_to_path(None, directory / "out")
    assert model.get_tokenizer().encode("two one") == [2, 1]
    opened = open_model(str(directory / "out" / "m.asgraph"))
    assert opened.tokenizer_dir == str(directory / "out" / "m.tokenizer")
    assert open_model(str(directory)).tokenizer_dir == str(directory)


def test_tokenizer_without_transformers(copy, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    directory = copy("llama-linear")
    words = tokenizers.models.WordLevel({"<unk>": 0, "one": 1}, "<unk>")
    tokenizers.Tokenizer(words).save(str(directory / "tokenizer.json"))
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    tokenizer = HuggingFaceModel(directory, "m").init_tokenizer().get_tokenizer()
    assert list(tokenizer.encode("one")) == [1] and tokenizer.decode([1]) == "one"
