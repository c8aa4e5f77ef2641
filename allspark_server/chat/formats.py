"""The registry of chat formats, and which of them a checkpoint uses."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from .call_lists import GraniteFormat, NemotronFormat, PhiFormat
from .dsml import Dsml4Format, DsmlFormat
from .format import FORMATS, ChatFormat
from .gemma import Gemma4Format, GemmaFormat
from .glm45 import Glm47Format, GlmFormat
from .harmony import HarmonyFormat
from .hermes import HermesFormat
from .hunyuan import HunyuanFormat
from .llama3 import LlamaFormat
from .mistral import MistralFormat
from .pythonic import LfmFormat, OlmoFormat, PythonicFormat
from .sections import DeepSeek31Format, DeepSeekFormat, KimiFormat
from .xml_calls import MiniMaxFormat, SeedFormat, XmlFormat

logger = logging.getLogger(__name__)

FORMATS.update((known.name, known) for known in (
    HermesFormat(), LlamaFormat(), MistralFormat(), GlmFormat(), Glm47Format(), HarmonyFormat(), XmlFormat(),
    SeedFormat(), MiniMaxFormat(), DsmlFormat(), Dsml4Format(), DeepSeekFormat(), DeepSeek31Format(), KimiFormat(),
    GraniteFormat(), PhiFormat(), NemotronFormat(), PythonicFormat(), LfmFormat(), OlmoFormat(), GemmaFormat(),
    Gemma4Format(), HunyuanFormat(), ChatFormat()))

# The order in which templates are searched for the formats' signs: a template may have signs of later ones, too.
_SEARCHED = ("harmony", "glm47", "glm45", "mistral", "minimax_m2", "seed_oss", "qwen3_coder", "deepseek_v32",
             "deepseek_v4", "deepseek_v3", "deepseek_v31", "kimi_k2", "lfm2", "functiongemma", "gemma4", "granite",
             "phi4_mini", "nemotron_json", "pythonic", "olmo3", "hunyuan", "hermes", "llama3")


def has_unknown_calls(templates: Mapping[str, str]) -> bool:
    """Whether a checkpoint's templates have tool calls of a form that is not known."""
    return _recognized(templates) is None and any("tool_calls" in template for template in templates.values())


def _recognized(templates: Mapping[str, str]) -> str | None:
    return next((name for name in _SEARCHED if any(map(FORMATS[name].recognizes, templates.values()))), None)


def chat_format_of(templates: Mapping[str, str], architecture: str) -> str:
    """The name of the format that a checkpoint's templates use; if none is recognized, its architecture's. A template
    with tools of another format is logged.
    """
    if (recognized := _recognized(templates)) is not None:
        return recognized
    named = (known.name for known in FORMATS.values() if architecture.lower().startswith(known.architectures))
    found = next(named, "hermes")
    if has_unknown_calls(templates):
        logger.warning("the form of tool calls in the chat template is not known: answers are parsed as %r unless a "
                       "request names a chat_format (%s)", found, ", ".join(FORMATS))
    return found
