"""Tokenizers for llguidance: the checkpoint's, or one for a vocabulary that comes with a request (DashInfer)."""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import LLTokenizer

from allspark_client.types import VocabType

from ..tokenizer.detokenizer import BYTE_CHARACTERS, is_mark

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPECIAL = re.compile(r"<\|.*\|>|<[a-z/_]+>|\[[A-Z]+\]", re.DOTALL)


MAX_TOKEN_BYTES = 512  # llguidance's limit is 1,023
_NO_TEXT = "\ufdd0"  # a code point that is not a character


def without_marks(tokenizer: str) -> tuple[str, int]:
    """A tokenizer.json in which no text is tokenized to a marking token (<|im_end|>, <tool_call>), and its number of
    ids.

    llguidance finds forced tokens by tokenizing the forced text. That may yield marking tokens, which llguidance itself
    accepts only where the grammar has <[id]>.
    """
    value = json.loads(tokenizer)
    renamed = {}
    for token in value.get("added_tokens") or []:
        content = token["content"]
        if token.get("special") or is_mark(content):
            renamed[content] = token["content"] = _NO_TEXT + content
            token["special"] = True
    vocab = value["model"].get("vocab")
    if isinstance(vocab, dict):
        value["model"]["vocab"] = {renamed.get(text, text): i for text, i in vocab.items()}
    elif isinstance(vocab, list):
        value["model"]["vocab"] = [[renamed.get(text, text), score] for text, score in vocab]
    value["post_processor"] = None
    size = len(vocab) if isinstance(vocab, list) else 1 + max((vocab or {}).values(), default=0)
    return json.dumps(value), max([size, *(1 + token["id"] for token in value.get("added_tokens") or [])])


class _Vocabulary:
    """The interface that llguidance expects of an unknown tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], eos_id: int):
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, eos_id
        self._ids = {token: i for i, token in reversed(list(enumerate(tokens))) if token}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        """The ids of a text, longest tokens first. Only drafts depend on it."""
        data = text.encode() if isinstance(text, str) else text
        ids: list[int] = []
        while data:
            length = next((n for n in range(min(self._longest, len(data)), 0, -1) if data[:n] in self._ids), 0)
            if not length:
                break
            ids.append(self._ids[data[:length]])
            data = data[length:]
        return ids


def tokenizer_of_vocab(
    vocab: dict[str, int], vocab_type: VocabType | None, vocab_size: int, eos_ids: list[int]
) -> LLTokenizer:
    """A tokenizer of these tokens. Ids without a token, and end-of-sequence ids, stand for no text. `vocab_type`: None
    for the spelling of byte-level BPE. ValueError for ids that the model does not have, and for very long tokens.
    """
    tokens, special = [b""] * vocab_size, sorted(eos_ids)
    for token, i in vocab.items():
        if i >= vocab_size:
            raise ValueError(f"vocab has id {i} ({token!r}); the model's go to {vocab_size - 1}")
        tokens[i] = token_bytes(token, vocab_type)
        if len(tokens[i]) > MAX_TOKEN_BYTES:
            raise ValueError(f"vocab has a token of {len(tokens[i])} bytes, of id {i}; allowed: {MAX_TOKEN_BYTES}")
        if i not in eos_ids and _SPECIAL.fullmatch(token):
            special.append(i)
    for i, spelling in enumerate(tokens):
        if not spelling:
            tokens[i] = f"<[{i}]>".encode()
            special.append(i)
    vocabulary: Any = _Vocabulary(tokens, sorted(set(special)), eos_ids[0])
    return LLTokenizer(vocabulary, n_vocab=vocab_size, eos_token=eos_ids)


def token_bytes(token: str, vocab_type: VocabType | None) -> bytes:
    """The bytes of a token, as tokenizers of this family spell them."""
    if vocab_type in (VocabType.VOCAB_TYPE_SPM, VocabType.VOCAB_TYPE_UGM):
        byte = _BYTE.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()
    if vocab_type == VocabType.VOCAB_TYPE_WPM:
        # Decoding puts spaces between words; grammars do without them.
        return token.removeprefix("##").encode()
    if all(character in BYTE_CHARACTERS for character in token):
        return bytes(BYTE_CHARACTERS[character] for character in token)
    return token.encode()
