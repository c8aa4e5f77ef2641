"""Pixtral and Mistral 3: Mistral's text model, with rows of images between its tokens, and Pixtral's vision tower.
LLaVA: a text model of Llama, Mistral or Qwen2, and the tower of CLIP or SigLIP. LLaVA-OneVision: the text alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from allspark_server.models.architecture import Architecture, text_part
from allspark_server.models.fields import MAX_LAYERS, Fields
from allspark_server.models.graph import Graph
from allspark_server.models.llama import llama
from allspark_server.models.network import ModelConfig
from allspark_server.models.qwen2 import qwen2
from allspark_server.models.vision import llava_tower, pixtral_tower

#: transformers' values of absent fields
_DEFAULTS: dict[str, Any] = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                             "vocab_size": 32_000, "rms_norm_eps": 1e-6}
_MISTRAL: dict[str, Any] = {**_DEFAULTS, "intermediate_size": 14_336, "num_key_value_heads": 8,
                            "max_position_embeddings": 131_072}
_LLAMA: dict[str, Any] = {**_DEFAULTS, "intermediate_size": 11_008, "max_position_embeddings": 2048}
_QWEN2: dict[str, Any] = {**_DEFAULTS, "intermediate_size": 22_016, "num_key_value_heads": 32,
                          "max_position_embeddings": 32_768, "vocab_size": 151_936}


def _text(fields: Fields) -> Fields:
    text = text_part(fields)
    default = "qwen2" if fields.get("model_type", str) == "llava_onevision" else "mistral"
    kind = text.get("model_type", str, "llama" if _is_llava(fields) else default)
    if kind == "mistral":
        values = {**_MISTRAL, **text.values}
    elif kind == "llama" and fields.get("model_type", str) != "mistral3":
        values = {**_LLAMA, **text.values, "sliding_window": None}
    elif kind == "qwen2" and fields.get("model_type", str) != "mistral3":
        values = {**_QWEN2, **text.values, "sliding_window": None, "attention_bias": True, "mlp_bias": False}
        _refuse_windows(Fields({**_QWEN2, **text.values}, text.path, text.prefix))
    else:
        raise text.error("model_type", f"is {kind!r}: served with images are 'mistral' and, of LLaVA, 'llama' and "
                                       "'qwen2'")
    if values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    return Fields(values, text.path, text.prefix)


def _refuse_windows(text: Fields) -> None:
    """Raises AllSparkError if layers of Qwen2 have a sliding window."""
    layers = text.need_positive("num_hidden_layers", most=MAX_LAYERS)
    windows = "sliding_attention" in text.get("layer_types", list, []) or (
        text.get("layer_types", list) is None and text.get("max_window_layers", int, 28) < layers
        and text.values.get("sliding_window", 4096) is not None)
    if text.get("use_sliding_window", bool, False) and windows:
        raise text.error("use_sliding_window", "is true: a sliding window is not available with Qwen2")


def _is_llava(fields: Fields) -> bool:
    """Whether the model is a LLaVA, whose tower is not Pixtral's."""
    if fields.get("model_type", str) == "llava":
        return fields.inner("vision_config", {}).get("model_type", str, "pixtral") != "pixtral"
    return fields.get("model_type", str) == "llava_next"


def _more(fields: Fields) -> dict[str, Any]:
    """Biases: Qwen2's projections of queries, keys and values have some, and its output projection has none."""
    return {"output_bias": fields.get("model_type", str) != "qwen2" and fields.get("attention_bias", bool, False)}


def _build(config: ModelConfig) -> Graph:
    return (qwen2 if config.attention_bias and not config.output_bias else llama)(config)


def _tower(architecture: str) -> Callable[[Fields], ModelConfig]:
    return lambda fields: (llava_tower if _is_llava(fields) else pixtral_tower)(fields, architecture)


_COMMON: dict[str, Any] = {"windows": True, "window": 4096, "layer_types": False, "translate": _text,
                           "has_bias_fields": True, "more": _more, "stored_as": "text_part"}
ARCHITECTURES = {
    name: Architecture(_build, kind, served, tower=_tower(name), **_COMMON)
    for name, kind, served in (("Mistral3ForConditionalGeneration", "mistral3", "Mistral 3 (Small 3.1, 3.2)"),
                               ("LlavaForConditionalGeneration", "llava", "Pixtral, LLaVA 1.5, LLaVA-Interleave"),
                               ("LlavaNextForConditionalGeneration", "llava_next", "LLaVA-NeXT (1.6)"))
} | {"LlavaOnevisionForConditionalGeneration": Architecture(
    _build, "llava_onevision", "LLaVA-OneVision (text part)", **_COMMON,
    no_images_reason="the tiles of LLaVA-OneVision (anyres_max), whose rows are interpolated, are not served")}
