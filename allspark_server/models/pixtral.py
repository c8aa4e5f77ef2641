"""Pixtral and Mistral 3: Mistral's text model, with rows of images between its tokens, and Pixtral's vision tower.
LLaVA: a text model of Llama or Mistral, and CLIP's tower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from allspark_server.models.architecture import Architecture, text_part
from allspark_server.models.fields import Fields
from allspark_server.models.llama import llama
from allspark_server.models.network import ModelConfig
from allspark_server.models.vision import clip_tower, pixtral_tower

#: transformers' values of absent fields
_DEFAULTS: dict[str, Any] = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                             "vocab_size": 32_000, "rms_norm_eps": 1e-6}
_MISTRAL: dict[str, Any] = {**_DEFAULTS, "intermediate_size": 14_336, "num_key_value_heads": 8,
                            "max_position_embeddings": 131_072}
_LLAMA: dict[str, Any] = {**_DEFAULTS, "intermediate_size": 11_008, "max_position_embeddings": 2048}


def _text(fields: Fields) -> Fields:
    text = text_part(fields)
    kind = text.get("model_type", str, "llama" if _has_clip(fields) else "mistral")
    if kind == "llama" and fields.get("model_type", str) != "mistral3":
        values = {**_LLAMA, **text.values, "sliding_window": None}
    elif kind == "mistral":
        values = {**_MISTRAL, **text.values}
    else:
        raise text.error("model_type", f"is {kind!r}: served with images are 'mistral' and, of LLaVA, 'llama'")
    if values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    return Fields(values, text.path, text.prefix)


def _has_clip(fields: Fields) -> bool:
    """Whether the tower is CLIP, not Pixtral's."""
    if fields.get("model_type", str) == "llava":
        return fields.inner("vision_config", {}).get("model_type", str, "pixtral") != "pixtral"
    return fields.get("model_type", str) == "llava_next"


def _tower(architecture: str) -> Callable[[Fields], ModelConfig]:
    return lambda fields: (clip_tower if _has_clip(fields) else pixtral_tower)(fields, architecture)


ARCHITECTURES = {
    name: Architecture(llama, kind, served, windows=True, window=4096, layer_types=False, translate=_text,
                       has_bias_fields=True, tower=_tower(name), stored_as="text_part")
    for name, kind, served in (("Mistral3ForConditionalGeneration", "mistral3", "Mistral 3 (Small 3.1, 3.2)"),
                               ("LlavaForConditionalGeneration", "llava", "Pixtral, LLaVA 1.5"),
                               ("LlavaNextForConditionalGeneration", "llava_next", "LLaVA-NeXT (1.6)"))
}
