"""config.json of LLaVA 1.5 and LLaVA-NeXT: published ones, which leave out what transformers has by default, and what
is refused. What the models compute is compared in tests/engine/test_prompts_with_images.py.
"""

from __future__ import annotations

import json

import pytest

transformers = pytest.importorskip("transformers")

from allspark_client.errors import AllSparkError
from allspark_server.models import build_graph, read_config

VISION = {"hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model",
          "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "vocab_size": 32000}


def written(tmp_path, name: str, kind: str, text: dict, **more):
    (tmp_path / "config.json").write_text(json.dumps({
        "architectures": [name], "model_type": kind, "text_config": text, "vision_config": VISION, **more}))
    return tmp_path


@pytest.mark.parametrize("name, kind, text", [
    ("LlavaForConditionalGeneration", "llava", {"model_type": "llama", "max_position_embeddings": 4096,
                                                "rms_norm_eps": 1e-5, "vocab_size": 32064}),
    ("LlavaNextForConditionalGeneration", "llava_next", {
        "model_type": "mistral", "intermediate_size": 14336, "max_position_embeddings": 32768,
        "num_key_value_heads": 8, "rope_theta": 1e6, "sliding_window": None, "vocab_size": 32064}),
    ("LlavaNextForConditionalGeneration", "llava_next", {"model_type": "mistral"}),
])
def test_absent_fields_are_those_of_transformers(name, kind, text, tmp_path):
    config = read_config(written(tmp_path, name, kind, text))
    expected = transformers.AutoConfig.from_pretrained(tmp_path).get_text_config()
    for own, theirs in (("hidden_size",) * 2, ("intermediate_size",) * 2, ("num_layers", "num_hidden_layers"),
                        ("num_heads", "num_attention_heads"), ("num_kv_heads", "num_key_value_heads"),
                        ("vocab_size",) * 2, ("rms_norm_eps",) * 2, ("max_position_embeddings",) * 2):
        assert getattr(config, own) == getattr(expected, theirs), own
    window = getattr(expected, "sliding_window", None)
    assert config.windows == ((window,) * config.num_layers if window else ())
    tower = config.tower
    assert (tower.num_layers, tower.vision.tokens, tower.vision.outputs) == (23, 577, 4096)
    build_graph(config)


@pytest.mark.parametrize("change, problem", [
    ({"text_config": {"model_type": "qwen2"}}, "'text_config.model_type'.* is 'qwen2': served with images are 'mis"),
    ({"vision_config": {**VISION, "model_type": "siglip_vision_model"}}, "'siglip_vision_model': served are 'clip_"),
    ({"vision_config": {**VISION, "hidden_act": "relu"}}, "hidden_act'.* is 'relu': served are quick_gelu and gelu"),
    ({"vision_config": {**VISION, "num_attention_heads": 15}}, "num_attention_heads'.* is 15: they must divide 1024"),
    ({"vision_feature_layer": [-2, -5]}, r"vision_feature_layer'.* is \[-2, -5\]: expected one layer of 24"),
    ({"vision_feature_layer": -25}, "vision_feature_layer'.* is -25: expected one layer of 24"),
    ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy'.* is not 'default', which alone"),
    ({"projector_hidden_act": "relu"}, "projector_hidden_act'.* is not 'gelu'"),
])
def test_configs_that_are_refused(change, problem, tmp_path):
    fields = {"text_config": {"model_type": "llama"}, **change}
    text = fields.pop("text_config")
    with pytest.raises(AllSparkError, match=problem):
        read_config(written(tmp_path, "LlavaNextForConditionalGeneration", "llava_next", text, **fields))
