"""A bound on the characters per token, with which texts that are too long are rejected before tokenizing."""

from __future__ import annotations

import json
from typing import Any

import tokenizers

_COMPOSED = 4  # most characters that NFC composes into one: Greek letters with three marks


def characters_per_token(backend: tokenizers.Tokenizer) -> int | None:
    """The most characters of a text that one token covers; None if there is no bound: a tokenizer may drop blanks,
    or map any number of characters to one unknown token.
    """
    if not isinstance(backend.model, tokenizers.models.BPE):
        return None
    parts = _parts(backend.normalizer, "normalizers") + _parts(backend.pre_tokenizer, "pretokenizers")
    added = backend.get_added_tokens_decoder().values()
    if not all(map(_keeps_all, parts)) or any(token.lstrip or token.rstrip for token in added):
        return None  # added tokens may absorb blanks around them
    vocabulary = backend.get_vocab(with_added_tokens=True)
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        needed = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    elif backend.model.byte_fallback:
        needed = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        return None
    if not all(text in vocabulary for text in needed):
        return None  # a byte may be unknown
    return max(map(len, vocabulary)) * (_COMPOSED if "NFC" in kinds else 1)


def _parts(component: Any, inner: str) -> list[dict[str, Any]]:
    """The parts of a normalizer or pre-tokenizer, in the form of tokenizer.json."""
    return [] if component is None else _flat(json.loads(component.__getstate__()), inner)


def _flat(part: dict[str, Any], inner: str) -> list[dict[str, Any]]:
    return [p for one in part[inner] for p in _flat(one, inner)] if part["type"] == "Sequence" else [part]


def _keeps_all(part: dict[str, Any]) -> bool:
    """Whether a normalizer or pre-tokenizer leaves every character of a text in place."""
    if part["type"] == "Replace":
        pattern = part["pattern"].get("String")
        return pattern is not None and len(part["content"]) >= len(pattern)
    if part["type"] in ("Split", "Punctuation"):
        return part.get("behavior") != "Removed"
    return part["type"] in ("NFC", "Prepend", "ByteLevel", "Metaspace", "Digits")
