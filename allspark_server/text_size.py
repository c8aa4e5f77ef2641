"""How much text a token can stand for, from a tokenizer.json: what is longer than all tokens need not be tokenized."""

from __future__ import annotations

from typing import Any, Optional

_COMPOSED = 4  # characters that NFC makes one of, at most: Greek letters with three marks


def characters_per_token(description: dict[str, Any]) -> Optional[int]:
    """The most characters of a text that one token covers, or None where that has no bound that is sure: a tokenizer
    may drop blanks, or make one unknown token of any number of characters."""
    model = description.get("model") or {}
    normalizers = _flat(description.get("normalizer"), "normalizers")
    pre_tokenizers = _flat(description.get("pre_tokenizer"), "pretokenizers")
    added = description.get("added_tokens") or []
    if (
        model.get("type") != "BPE"
        or not all(map(_keeps_all, normalizers + pre_tokenizers))
        or any(token.get("lstrip") or token.get("rstrip") for token in added)  # these swallow blanks around them
    ):
        return None
    vocabulary = model.get("vocab") or {}
    if any(part["type"] == "ByteLevel" for part in normalizers + pre_tokenizers):
        complete = all(character in vocabulary for character in _byte_alphabet())
    else:
        complete = model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    if not complete:
        return None
    longest = max(map(len, [*vocabulary, *(token["content"] for token in added)]))
    return longest * (_COMPOSED if any(part["type"] == "NFC" for part in normalizers) else 1)


def _flat(part: Optional[dict[str, Any]], inner: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return [p for one in part[inner] for p in _flat(one, inner)] if part["type"] == "Sequence" else [part]


def _keeps_all(part: dict[str, Any]) -> bool:
    """Whether a normalizer or pre-tokenizer leaves every character of a text in place."""
    if part["type"] == "Replace":
        pattern = part["pattern"].get("String")
        return pattern is not None and len(part["content"]) >= len(pattern)
    if part["type"] in ("Split", "Punctuation"):
        return part.get("behavior") != "Removed"
    return part["type"] in ("NFC", "Prepend", "ByteLevel", "Metaspace", "Digits")


def _byte_alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel.alphabet()
