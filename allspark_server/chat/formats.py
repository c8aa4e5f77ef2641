"""The registry of chat formats, and which of them a checkpoint uses."""

from __future__ import annotations

from collections.abc import Mapping

from .format import FORMATS, ChatFormat
from .glm45 import GlmFormat
from .harmony import HarmonyFormat
from .hermes import HermesFormat
from .llama3 import LlamaFormat
from .mistral import MistralFormat
from .xml_calls import MiniMaxFormat, SeedFormat, XmlFormat

FORMATS.update((known.name, known) for known in (
    HermesFormat(), LlamaFormat(), MistralFormat(), GlmFormat(), HarmonyFormat(), XmlFormat(), SeedFormat(),
    MiniMaxFormat(), ChatFormat()))

# The order in which templates are searched for the formats' signs: a template may have signs of later ones, too.
_SEARCHED = ("harmony", "glm45", "mistral", "minimax_m2", "seed_oss", "qwen3_coder", "hermes", "llama3")


def chat_format_of(templates: Mapping[str, str], architecture: str) -> str:
    """The name of the format that a checkpoint's templates use; if none is recognized, its architecture's."""
    for name in _SEARCHED:
        signs = FORMATS[name].template_signs
        if any(sign in template for sign in signs for template in templates.values()):
            return name
    found = (known.name for known in FORMATS.values() if architecture.lower().startswith(known.architectures))
    return next(found, "hermes")
