"""config.json of LLaVA and LLaVA-NeXT: published ones, which leave out what transformers has by default, and what is
refused. What the models compute is compared in tests/engine/test_prompts_with_images.py.
"""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from allspark_client.errors import AllSparkError
from allspark_server import HuggingFaceModel
from allspark_server.models import build_graph, read_config
from allspark_server.models.vision import build_tower
from support.checkpoints import LOGIT_TOLERANCE, randomize
from support.driver import Driver

VISION = {"hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model",
          "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "vocab_size": 32000}


#: of llava-hf/llava-interleave-qwen-0.5b-hf
SIGLIP = {"hidden_size": 1152, "image_size": 384, "intermediate_size": 4304, "model_type": "siglip_vision_model",
          "num_attention_heads": 16, "num_hidden_layers": 26, "patch_size": 14, "vision_use_head": False}


def written(tmp_path, name: str, kind: str, text: dict, **more):
    (tmp_path / "config.json").write_text(json.dumps({
        "architectures": [name], "model_type": kind, "text_config": text, "vision_config": VISION, **more}))
    return tmp_path


def check_text(config, tmp_path) -> None:
    """The sizes of the text model are those that transformers reads."""
    expected = transformers.AutoConfig.from_pretrained(tmp_path).get_text_config()
    for own, theirs in (("hidden_size",) * 2, ("intermediate_size",) * 2, ("num_layers", "num_hidden_layers"),
                        ("num_heads", "num_attention_heads"), ("num_kv_heads", "num_key_value_heads"),
                        ("vocab_size",) * 2, ("rms_norm_eps",) * 2, ("max_position_embeddings",) * 2):
        assert getattr(config, own) == getattr(expected, theirs), own
    window = getattr(expected, "sliding_window", None)
    assert config.windows == ((window,) * config.num_layers if window else ())


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
    check_text(config, tmp_path)
    tower = config.tower
    assert (tower.num_layers, tower.vision.tokens, tower.vision.outputs) == (23, 577, 4096)
    build_graph(config)


@pytest.mark.parametrize("text", [
    {"model_type": "qwen2"},
    {"model_type": "qwen2", "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16,
     "num_hidden_layers": 24, "num_key_value_heads": 16, "tie_word_embeddings": True, "vocab_size": 152000,
     "use_sliding_window": False, "max_window_layers": 21, "sliding_window": 32768, "rope_theta": 1e6}])
@pytest.mark.parametrize("name, kind", [("LlavaForConditionalGeneration", "llava"),
                                        ("LlavaNextForConditionalGeneration", "llava_next")])
@pytest.mark.parametrize("sees", [True, False])
def test_qwen2_and_siglip(name, kind, text, sees, tmp_path):
    """SigLIP up to its last layer, without the norm after it; Qwen2 has biases but for the output projection's."""
    more = {"vision_config": SIGLIP, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    config = read_config(written(tmp_path, name, kind, text, **more if sees else {}))
    check_text(config, tmp_path)
    tower = config.tower
    assert (tower.num_layers, tower.vision.tokens) == ((26, 729) if sees else (23, 577))
    assert tower.vision.outputs == config.hidden_size
    assert config.tie_word_embeddings == text.get("tie_word_embeddings", False)
    weights = build_graph(config).weights
    biases = {name.split(".", 3)[-1] for name in weights if name.endswith("bias")}
    assert biases == {"self_attn.q_proj+k_proj+v_proj.bias"}, biases
    assert not [name for name in build_tower(tower).weights if "post_layernorm" in name]


@pytest.mark.parametrize("serialized", [False, True])
def test_the_text_of_onevision_is_served(tmp_path, serialized):
    """Its images are refused by name."""
    text = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 93, "vocab_size": 300, "max_position_embeddings": 512}
    vision = {"model_type": "siglip_vision_model", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "intermediate_size": 24, "image_size": 28, "patch_size": 14}
    config = transformers.LlavaOnevisionConfig(text_config=text, vision_config=vision, image_token_index=299,
                                               video_token_index=298)
    model = transformers.LlavaOnevisionForConditionalGeneration(config).eval()
    randomize(model, "llava_onevision", 5)
    model.save_pretrained(tmp_path)
    ids = np.random.default_rng(1).integers(0, 290, 40).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0, -1].numpy()
    if serialized:
        HuggingFaceModel(tmp_path, "m").serialize_to_path(None, tmp_path)
    with Driver(tmp_path / "m.asgraph" if serialized else tmp_path, 1) as driver:
        found = driver.generate(ids, 1)[1][0]
        assert np.abs(found - expected).max() <= LOGIT_TOLERANCE * expected.std()
        assert re.match("the tiles of LLaVA-OneVision .* are not served", driver.info.no_images_reason)


@pytest.mark.parametrize("change, problem", [
    ({"text_config": {"model_type": "qwen3"}}, "'text_config.model_type'.* is 'qwen3': served with images are 'mis"),
    ({"text_config": {"model_type": "qwen2", "use_sliding_window": True}}, "use_sliding_window'.* is true: a sliding"),
    ({"text_config": {"model_type": "qwen2", "use_sliding_window": True, "num_hidden_layers": 2,
                      "layer_types": ["full_attention", "sliding_attention"]}}, "use_sliding_window'.* is true"),
    ({"vision_config": {**VISION, "model_type": "dinov2"}}, "'dinov2': served are 'clip_vision_model', 'siglip_vis"),
    ({"vision_config": {**VISION, "model_type": "siglip_vision_model"}},
     "vision_feature_select_strategy'.* is not 'full', which alone is served with siglip_vision_model"),
    ({"vision_config": {"model_type": "siglip_vision_model", "hidden_act": "relu"},
      "vision_feature_select_strategy": "full"}, "hidden_act'.* is 'relu': served are gelu_pytorch_tanh and gelu"),
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
