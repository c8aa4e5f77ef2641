"""Converts vocabularies of tiktoken and sentencepiece to a tokenizer.json, for checkpoints without that file.

The tokenizers of such checkpoints are code in the checkpoint, which is never run. This file lists what that code adds
to the vocabulary (special tokens, a prefix, a chat template) for each class that tokenizer_config.json may name. Ids
equal those of the libraries tiktoken and sentencepiece; tests compare them. DeepSeek-V3.2 has code for chats only.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..weights.files import MAX_TOKENIZER_BYTES, read_file, read_json
from . import deepseek_v4, deepseek_v32

TIKTOKEN, MODEL, JSON = "qwen.tiktoken", "tokenizer.model", "tokenizer.json"
MAX_TOKENS, MAX_TOKEN = 1 << 24, 1 << 10  # limits of the number and the length of tokens
BLANK = "\u2581"  # how sentencepiece writes a space

_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|"
          r"\s*[\r\n]+|\s+(?!\S)|\s+")
_RANKS = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")


@dataclass(frozen=True)
class Family:
    """What a tokenizer's class adds to its vocabulary.

    `special`: texts of the ids after the vocabulary's. `prefix`: special tokens before every text. `digits`: how many
    digits tiktoken puts into one token at most. `composed`: text is normalized to NFC. `chat`: returns the chat
    template for a checkpoint's generation_config; `stops`: tokens that then end an answer, besides the end of sequence.
    """

    special: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    digits: str = ""
    composed: bool = False
    adds_bos: bool = False
    chat: Callable[[Mapping[str, Any], Mapping[str, int]], str | None] = field(default=lambda generation, vocab: None)
    stops: tuple[str, ...] = ()


_CHATML = ("{% if messages[0]['role'] != 'system' %}"
           "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}"
           "{% for message in messages %}"
           "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
           "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
_GLM_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_CHATGLM3 = ("[gMASK]sop{% for message in messages %}"
             "{{ '<|' + message['role'] + '|>\\n ' + message['content'] }}{% endfor %}"
             "{% if add_generation_prompt %}<|assistant|>{% endif %}")


def _qwen_chat(generation: Mapping[str, Any], vocab: Mapping[str, int]) -> str | None:
    return _CHATML if generation.get("chat_format") == "chatml" else None


def _baichuan_chat(generation: Mapping[str, Any], vocab: Mapping[str, int]) -> str | None:
    texts = {i: text for text, i in vocab.items()}
    user, assistant = (texts.get(generation.get(f"{role}_token_id", -1)) for role in ("user", "assistant"))
    if user is None or assistant is None:
        return None
    return ("{% for message in messages %}{% if message['role'] == 'user' %}" + user
            + "{% elif message['role'] == 'assistant' %}" + assistant
            + "{% endif %}{{ message['content'] }}{% endfor %}"
            "{% if add_generation_prompt %}" + assistant + "{% endif %}")


FAMILIES = {
    "QWenTokenizer": Family(("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))),
                            composed=True, chat=_qwen_chat, stops=("<|im_end|>", "<|im_start|>")),
    "ChatGLMTokenizer": Family(("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", *_GLM_ROLES), ("[gMASK]", "sop"),
                               chat=lambda generation, vocab: _CHATGLM3, stops=("<|user|>", "<|observation|>")),
    "ChatGLM4Tokenizer": Family(("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", *_GLM_ROLES),
                                ("[gMASK]", "<sop>"), digits="{1,3}"),
    "BaichuanTokenizer": Family(adds_bos=True, chat=_baichuan_chat),
    "BaiChuanTokenizer": Family(adds_bos=True, chat=_baichuan_chat),
}


def vocabulary_file(directory: str | Path) -> Path | None:
    """tokenizer.json, or the vocabulary that replaces it if the tokenizer's class is known."""
    directory = Path(directory)
    for name in (JSON, TIKTOKEN, MODEL):
        if os.path.lexists(directory / name) and (name == JSON or _class_of(directory) in FAMILIES):
            return directory / name
    return None


def tokenizer_json(directory: str | Path) -> bytes:
    """A checkpoint's tokenizer.json, or one made from its vocabulary. FileNotFoundError if it has neither, ValueError
    or AllSparkError for a file that cannot be read.
    """
    file = vocabulary_file(directory)
    if file is None:
        raise FileNotFoundError(
            f"{Path(directory) / JSON} does not exist; a tokenizer needs a tokenizer.json, or the vocabulary of one of "
            f"these classes: {', '.join(FAMILIES)} (another one's is not enough: save it once with transformers' fast "
            "tokenizer)")
    return read_file(file, MAX_TOKENIZER_BYTES) if file.name == JSON else json.dumps(_converted(file)).encode()


def _converted(file: Path) -> dict[str, Any]:
    directory = file.parent
    family, config = FAMILIES[_class_of(directory)], _read(directory, "tokenizer_config.json")
    data = read_file(file, MAX_TOKENIZER_BYTES)
    found = _tiktoken(file, data, family) if _RANKS.match(data) else _sentencepiece(file, data)
    vocab = found["model"]["vocab"]
    first = 1 + max(vocab.values())
    special = {text: first + i for i, text in enumerate(family.special)}
    listed = config.get("added_tokens_decoder")
    for i, token in listed.items() if isinstance(listed, dict) else ():
        text = _text(token)
        if not re.fullmatch(r"[0-9]{1,7}", i) or text is None:
            raise ValueError(f"added_tokens_decoder of {directory / 'tokenizer_config.json'} holds {i!r}: {token!r}: "
                             "expected an id and its token")
        special[text] = int(i)
    vocab.update(special)
    known = {token["id"] for token in found["added_tokens"]}
    found["added_tokens"] += [_added(i, text, True) for text, i in special.items() if i not in known]
    found["added_tokens"].sort(key=lambda token: token["id"])
    prefix = list(family.prefix)
    bos = _text(config.get("bos_token")) or "<s>"
    if family.adds_bos and config.get("add_bos_token", True) and bos in vocab:
        prefix = [bos]
    if prefix:
        found["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": t, "type_id": 0}} for t in prefix]
            + [{"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {t: {"id": t, "ids": [vocab[t]], "tokens": [t]} for t in prefix}}
    return found


def chat_of(directory: str | Path, vocab: Mapping[str, int]) -> tuple[str, list[int]] | None:
    """The chat template in a checkpoint's code, and ids that end an answer; None if there is none."""
    programs = {"deepseek_v32": deepseek_v32.CHAT, "deepseek_v4": deepseek_v4.CHAT}
    if (program := programs.get(str(_read(directory, "config.json").get("model_type")))) is not None:
        return program, []
    family = FAMILIES.get(_class_of(directory)) or Family()
    template = family.chat(_read(directory, "generation_config.json"), vocab)
    return None if template is None else (template, [vocab[text] for text in family.stops if text in vocab])


def _read(directory: str | Path, name: str) -> dict[str, Any]:
    path = Path(directory) / name
    return read_json(path) if os.path.lexists(path) else {}


def _class_of(directory: str | Path) -> str:
    return str(_read(directory, "tokenizer_config.json").get("tokenizer_class"))


def _text(token: Any) -> str | None:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _added(identity: int, text: str, special: bool) -> dict[str, Any]:
    return {"id": identity, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": special}


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **more: Any) -> dict[str, Any]:
    return {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            **more, "vocab": vocab, "merges": [list(pair) for pair in merges]}


def _merges(order: dict[Any, Any], tokens: list[Any]) -> list[tuple[Any, Any]]:
    """The BPE merges: every pair of parts that makes one of `tokens`, which are in merge order. `order`: the rank of
    every part. ValueError for a token that is too long.
    """
    found = []
    longest = max(map(len, tokens), default=0)
    if longest > MAX_TOKEN:
        raise ValueError(f"the vocabulary has a token of {longest} bytes or characters: at most {MAX_TOKEN} are read")
    for token in tokens:
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        found += sorted((pair for pair in pairs if pair[0] in order and pair[1] in order),
                        key=lambda pair: (order[pair[0]], order[pair[1]]))
    return found


# -- tiktoken ----------------------------------------------------------------------------------------------------------
def _tiktoken(file: Path, data: bytes, family: Family) -> dict[str, Any]:
    """Reads lines of a token in base64 and its rank, which is its id."""
    from .detokenizer import BYTE_CHARACTERS  # which imports `tokenizers`: not needed to serve ids

    characters = {byte: character for character, byte in BYTE_CHARACTERS.items()}
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        try:
            text, rank = line.split()
            ranks[base64.b64decode(text, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ValueError(f"line {number} of {file} is not a token in base64 with its rank: {error}") from None
    if len(set(ranks.values())) != len(ranks) or not all(0 <= rank < MAX_TOKENS for rank in ranks.values()):
        raise ValueError(f"{file} has ranks that are not different numbers below {MAX_TOKENS}")
    if not all(bytes([byte]) in ranks for byte in range(256)):
        raise ValueError(f"{file} lacks a token for some byte values")

    def spelled(token: bytes) -> str:
        return "".join(map(characters.__getitem__, token))

    tokens = sorted(ranks, key=ranks.__getitem__)
    merges = [(spelled(a), spelled(b)) for a, b in _merges(ranks, tokens)]
    words = {"type": "Split", "pattern": {"Regex": _WORDS.format(digits=family.digits)}, "behavior": "Isolated",
             "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
            "normalizer": {"type": "NFC"} if family.composed else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, level]}, "post_processor": None,
            "decoder": level, "model": _bpe({spelled(token): ranks[token] for token in tokens}, merges,
                                            ignore_merges=True)}


# -- sentencepiece -----------------------------------------------------------------------------------------------------
def _sentencepiece(file: Path, data: bytes) -> dict[str, Any]:
    """Reads a model of kind BPE: pieces with better scores are made first."""
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError:
        raise ValueError(f"{file} is a sentencepiece model, and sentencepiece is not installed: pip install "
                         "sentencepiece") from None
    pb: Any = sentencepiece_model_pb2
    model, kinds = pb.ModelProto(), pb.ModelProto.SentencePiece
    try:
        model.ParseFromString(data)
    except Exception as error:  # a DecodeError of one of protobuf's implementations
        raise ValueError(f"{file} is neither a sentencepiece model nor tiktoken's ranks: {error}") from None
    trainer, normal = model.trainer_spec, model.normalizer_spec
    if not model.pieces or len(model.pieces) > MAX_TOKENS:
        raise ValueError(f"{file} is not a sentencepiece model of 1 to {MAX_TOKENS} pieces")
    if trainer.model_type != pb.TrainerSpec.BPE or trainer.treat_whitespace_as_suffix or not normal.escape_whitespaces:
        raise ValueError(f"{file} is not a sentencepiece model of kind BPE with blanks as prefixes")
    vocab = {piece.piece: i for i, piece in enumerate(model.pieces)}
    made = {piece.piece: -piece.score for piece in model.pieces if piece.type == kinds.NORMAL}
    added = [_added(i, piece.piece, piece.type != kinds.USER_DEFINED) for i, piece in enumerate(model.pieces)
             if piece.type in (kinds.UNKNOWN, kinds.CONTROL, kinds.USER_DEFINED)]
    unknown = next((piece.piece for piece in model.pieces if piece.type == kinds.UNKNOWN), None)
    steps: list[dict[str, Any]] = []
    if normal.precompiled_charsmap:
        steps.append({"type": "Precompiled",
                      "precompiled_charsmap": base64.b64encode(normal.precompiled_charsmap).decode()})
    if normal.remove_extra_whitespaces:
        steps += [{"type": "Replace", "pattern": {"Regex": pattern}, "content": content}
                  for pattern, content in ((r"\A +| +\z", ""), (" {2,}", " "))]
    if normal.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": BLANK})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": BLANK})
    back = [{"type": "Replace", "pattern": {"String": BLANK}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}]
    if normal.add_dummy_prefix:
        back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    merges = _merges(made, sorted(made, key=made.__getitem__))
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
            "normalizer": {"type": "Sequence", "normalizers": steps}, "pre_tokenizer": None, "post_processor": None,
            "decoder": {"type": "Sequence", "decoders": back},
            "model": _bpe(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=trainer.byte_fallback)}


def pair_template_of(directory: str | Path) -> str | None:
    """The chat template of rerankers whose checkpoint has it in its model card alone; None for others."""
    from ..models.yes_no_reranker import TEMPLATE, is_yes_no_reranker

    has_modules = os.path.lexists(Path(directory, "modules.json"))
    return TEMPLATE if not has_modules and is_yes_no_reranker(directory) else None
