"""Pixtral and Mistral 3: Mistral's text model, with rows of images between its tokens, and Pixtral's vision tower."""

from __future__ import annotations

from collections.abc import Callable

from allspark_server.models.architecture import Architecture, text_part
from allspark_server.models.fields import Fields
from allspark_server.models.llama import llama
from allspark_server.models.network import ModelConfig
from allspark_server.models.vision import pixtral_tower


def _text(fields: Fields) -> Fields:
    text = text_part(fields)
    kind = text.get("model_type", str, "mistral")
    if kind != "mistral":
        raise text.error("model_type", f"is {kind!r}: only 'mistral' is served with images")
    return text


def _tower(architecture: str) -> Callable[[Fields], ModelConfig]:
    return lambda fields: pixtral_tower(fields, architecture)


ARCHITECTURES = {
    name: Architecture(llama, kind, served, windows=True, window=4096, layer_types=False, translate=_text,
                       tower=_tower(name), stored_as="text_part")
    for name, kind, served in (("Mistral3ForConditionalGeneration", "mistral3", "Mistral 3 (Small 3.1, 3.2)"),
                               ("LlavaForConditionalGeneration", "llava", "Pixtral"))
}
