"""The files of a tokenizer."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from allspark_server.tokenizer.tokenizer import Tokenizer
from fuzz import mutate
from fuzz.target import MESSAGES, REFUSALS, Target
from support.tiny_tokenizer import CHAT_TEMPLATE, add_tokenizer


class Tokenizers(Target):
    """tokenizer.json: a file that can be read encodes and decodes a text."""

    name, share = "tokenizer", 0.02

    def prepare(self) -> None:
        add_tokenizer(self.folder, 320)
        self.seed = json.loads((self.folder / "tokenizer.json").read_text())
        self.seed["model"]["merges"] = self.seed["model"]["merges"][:20]

    def one(self, rng: Random) -> bool:
        self.data = mutate.of_json(rng, self.seed if rng.random() < 0.5 else self._parts(rng))
        (self.folder / "tokenizer.json").write_bytes(self.data)
        try:
            tokenizer = Tokenizer.from_dir(self.folder)
            tokenizer.decode(tokenizer.encode("the quick brown fox: naïve 🙂 <|im_end|>"))
        except REFUSALS:
            return False
        return True

    def _parts(self, rng: Random) -> dict[str, Any]:
        """The seed with other parts, which most changes affect."""
        small = {"<unk>": 0, "a": 1, "b": 2, "ab": 3, "##a": 4, " ": 5}
        model = rng.choice((
            {"type": "BPE", "vocab": small, "merges": ["a b"], "unk_token": "<unk>", "byte_fallback": True,
             "dropout": None},
            {"type": "WordPiece", "vocab": small, "unk_token": "<unk>", "continuing_subword_prefix": "##",
             "max_input_chars_per_word": 100},
            {"type": "WordLevel", "vocab": small, "unk_token": "<unk>"},
            {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0], ["b", -2.0]],
             "byte_fallback": False},
        ))  # fmt: skip
        pre = rng.choice((
            None, {"type": "Whitespace"}, {"type": "ByteLevel", "add_prefix_space": True,
                                             "trim_offsets": True, "use_regex": True},
            {"type": "Split", "pattern": {"Regex": "\\s+(?!\\S)|[a-z]{1,3}"}, "behavior": "Isolated", "invert": False},
            {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
            {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True},
                                                   {"type": "Punctuation"}]},
        ))  # fmt: skip
        normalizer = rng.choice(
            (
                None,
                {"type": "NFC"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
                {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, {"type": "Prepend", "prepend": "a"}]},
            )
        )
        decoder = rng.choice(
            (
                None,
                {"type": "ByteLevel"},
                {"type": "Metaspace", "replacement": "▁"},
                {
                    "type": "Sequence",
                    "decoders": [
                        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                        {"type": "ByteFallback"},
                        {"type": "Fuse"},
                        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                    ],
                },
            )
        )
        post = rng.choice(
            (
                None,
                {
                    "type": "TemplateProcessing",
                    "single": [
                        {"SpecialToken": {"id": "<unk>", "type_id": 0}},
                        {"Sequence": {"id": "A", "type_id": 0}},
                    ],
                    "pair": [],
                    "special_tokens": {"<unk>": {"id": "<unk>", "ids": [0], "tokens": ["<unk>"]}},
                },
            )
        )
        return {
            **self.seed,
            "model": model,
            "pre_tokenizer": pre,
            "normalizer": normalizer,
            "decoder": decoder,
            "post_processor": post,
        }


class TokenizerConfigs(Target):
    """tokenizer_config.json with chat templates, which are rendered."""

    name, share = "tokenizer_config", 0.02

    def prepare(self) -> None:
        add_tokenizer(self.folder, 280)
        self.seed = {**json.loads((self.folder / "tokenizer_config.json").read_text()), "bos_token": {"content": "<s>"},
                     "chat_template": [{"name": "default", "template": CHAT_TEMPLATE}],
                     "extra_special_tokens": {"a": "b"},
                     "additional_special_tokens": ["<x>", {"content": "<y>"}], "model_max_length": 100}  # fmt: skip

    def one(self, rng: Random) -> bool:
        seed = self.seed
        if rng.random() < 0.5:
            template = seed["chat_template"][0]["template"].encode()
            template = mutate.of_bytes(rng, template, template).decode(errors="replace")
            seed = {**seed, "chat_template": template}
        self.data = mutate.of_json(rng, seed)
        (self.folder / "tokenizer_config.json").write_bytes(self.data)
        try:
            Tokenizer.from_dir(self.folder).encode_chat(MESSAGES)
        except REFUSALS:
            return False
        return True
