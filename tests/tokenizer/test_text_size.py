"""How many characters a token may stand for: texts that are too long to be tokenized."""

from __future__ import annotations

import sys
import unicodedata

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from allspark_server.tokenizer.text_size import characters_per_token


def test_nfc_makes_one_of_four_characters_at_most():
    from allspark_server.tokenizer import text_size

    every = (chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000)
    assert max(len(unicodedata.normalize("NFD", c)) for c in every) <= text_size._COMPOSED


def byte_level(**changes) -> tokenizers.Tokenizer:
    vocabulary = {c: i for i, c in enumerate([*pre_tokenizers.ByteLevel.alphabet(), "sevenxx"])}
    made = tokenizers.Tokenizer(changes.pop("model", models.BPE(vocabulary, [])))
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    made.add_special_tokens(changes.pop("added", []))
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def byte_fallback(bytes_known=256):
    vocabulary = {c: i for i, c in enumerate(["<unk>", *(f"<0x{b:02X}>" for b in range(bytes_known)), "sevenxx"])}
    return models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)


SPLIT = tokenizers.Regex(r"\\s+")


@pytest.mark.parametrize("changes, bound", [
    ({}, 7), ({"normalizer": normalizers.NFC()}, 28), ({"normalizer": normalizers.Strip()}, None),
    ({"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.NFKC()])}, None),
    ({"normalizer": normalizers.Replace("  ", "")}, None), ({"normalizer": normalizers.Replace(" ", "_")}, 7),
    ({"pre_tokenizer": pre_tokenizers.Sequence([
        pre_tokenizers.Split(SPLIT, "isolated"), pre_tokenizers.ByteLevel()])}, 7),
    ({"pre_tokenizer": pre_tokenizers.Sequence([
        pre_tokenizers.Split(SPLIT, "removed"), pre_tokenizers.ByteLevel()])}, None),
    ({"pre_tokenizer": pre_tokenizers.Whitespace()}, None), ({"pre_tokenizer": None}, None),
    ({"added": [tokenizers.AddedToken("<|longer|>")]}, 10),
    ({"added": [tokenizers.AddedToken("x", rstrip=True)]}, None),
    ({"model": models.WordPiece({"x": 0}, unk_token="x")}, None),
    ({"model": byte_fallback(), "pre_tokenizer": pre_tokenizers.Metaspace()}, 7),
    ({"model": byte_fallback(255), "pre_tokenizer": None}, None),
])  # fmt: skip
def test_characters_per_token(changes, bound):
    assert characters_per_token(byte_level(**changes)) == bound
