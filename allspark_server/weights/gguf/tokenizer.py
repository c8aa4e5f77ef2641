"""Converts the vocabulary and chat template in a GGUF file to a tokenizer.json and a tokenizer_config.json.

They are written to a directory in this user's cache, whose name is a digest of the vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from allspark_client.errors import AllSparkError, AsStatus, not_available
from allspark_server.models.config import Fields
from allspark_server.weights.files import replacing
from allspark_server.weights.gguf.file import GgufFile

logger = logging.getLogger(__name__)

FORMAT = 1  # version of the written files
CONTROL, USER_DEFINED, BYTE = 3, 4, 6  # token types
PREFIX = "tokenizer.ggml."

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_TEKKEN = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
           r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
# tokenizer.ggml.pre -> the regular expression that splits words; None: GPT-2's.
_WORDS = {"qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3,
          "smaug-bpe": _LLAMA3, "tekken": _TEKKEN, "gpt-2": None, "default": None, "smollm": None}
_WHOLE_WORDS = (_LLAMA3, _TEKKEN)  # a word that is a token needs no merges
_DIGITS = ("smollm",)  # digits are split before words


def tokenizer_directory(file: GgufFile) -> str | None:
    """A directory with the file's tokenizer; None if it has none, or (with a log line) one that is not supported."""
    values = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
    if PREFIX + "tokens" not in values:
        return None
    target = _cache() / _digest(values)
    if (target / "tokenizer.json").exists():
        return str(target)
    fields = Fields(values, file.path)
    try:
        backend, config = _backend(fields), _config(fields)
    except AllSparkError as error:
        if error.status is not AsStatus.ALLSPARK_INVALID_CALL_ERROR:
            raise
        logger.warning("%s; the model accepts token ids but no text", error.message)
        return None
    return _written(target, backend.to_str(), config)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "allspark" / "gguf"


def _digest(values: dict[str, Any]) -> str:
    found = hashlib.sha256(str(FORMAT).encode())
    for key in sorted(values):
        value = values[key]
        data = value.tobytes() if isinstance(value, np.ndarray) else json.dumps(value).encode()
        found.update(f"{key} {len(data)} ".encode() + data)
    return found.hexdigest()[:32]


def _written(target: Path, tokenizer: str, config: dict[str, Any]) -> str:
    """Writes the directory atomically and returns its path, which is in the cache if that can be written. AllSparkError
    if it cannot be written anywhere.
    """
    parent = target.parent
    try:
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = _filled("partial-", str(parent), tokenizer, config)
    except (OSError, AllSparkError) as error:
        logger.warning("%s cannot be written (%s): the tokenizer goes to a temporary directory", parent, error)
        try:
            return str(_filled("allspark-gguf-", None, tokenizer, config))
        except OSError as problem:
            raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR, f"the tokenizer of a GGUF file cannot be written to "
                                f"{parent} or {tempfile.gettempdir()}: {problem.strerror}") from problem
    try:
        os.rename(partial, target)
    except OSError:  # another rank was first
        shutil.rmtree(partial, ignore_errors=True)
    return str(target)


def _filled(prefix: str, parent: str | None, tokenizer: str, config: dict[str, Any]) -> Path:
    """A new directory with the two files."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        for name, text in (("tokenizer.json", tokenizer),
                           ("tokenizer_config.json", json.dumps(config, ensure_ascii=False))):
            with replacing(folder / name) as file:
                file.write(text.encode())
    except AllSparkError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


# -- contents of the files ---------------------------------------------------------------------------------------------
def _strings(fields: Fields, name: str) -> list[str]:
    values = fields.need(PREFIX + name, list)
    if not values:
        raise fields.error(PREFIX + name, "is empty: expected strings")
    return values


def _numbers(fields: Fields, name: str, count: int) -> list:
    values = fields.values.get(PREFIX + name)
    if not isinstance(values, np.ndarray) or len(values) != count:
        found = f"has {len(values)} values" if isinstance(values, (np.ndarray, list)) else "is not an array of numbers"
        raise fields.error(PREFIX + name, f"{found}: expected a number for each of {count} tokens")
    return values.tolist()


def _backend(fields: Fields) -> Any:
    import tokenizers

    kind = fields.need(PREFIX + "model", str)
    tokens = _strings(fields, "tokens")
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if ids[token] != i)
        raise fields.error(PREFIX + "tokens", f"holds {twice!r} twice")
    types = _numbers(fields, "token_type", len(tokens)) if PREFIX + "token_type" in fields.values else []
    if kind not in ("gpt2", "llama"):
        raise not_available(f"The tokenizer {kind!r} of {fields.path} (known are 'gpt2', 'llama')")
    try:
        backend = _byte_level(fields, ids) if kind == "gpt2" else _sentence_piece(fields, tokens, ids)
        added = [tokenizers.AddedToken(token, special=number == CONTROL, normalized=False)
                 for token, number in zip(tokens, types) if number in (CONTROL, USER_DEFINED) and token]
        backend.add_tokens(added)
    except AllSparkError:
        raise
    except Exception as error:  # the library raises Exception itself; the file is untrusted
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"tokenizers {tokenizers.__version__} cannot make the "
                                                           f"tokenizer of {fields.path}: {error}") from error
    _add_ends(fields, backend, tokens, kind == "llama")
    return backend


def _byte_level(fields: Fields, ids: dict[str, int]) -> Any:
    """Byte-level BPE; tokenizer.ggml.pre selects how words are split."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = fields.get(PREFIX + "pre", str, "default")
    if pre not in _WORDS:
        raise not_available(f"The tokenizer {PREFIX}pre={pre!r} of {fields.path} (known are {', '.join(_WORDS)})")
    merges: list[Any] = [tuple(merge.split(" ")) for merge in _strings(fields, "merges")]
    wrong = next((merge for merge in merges if len(merge) != 2), None)
    if wrong is not None:
        raise fields.error(PREFIX + "merges", f"holds {' '.join(wrong)!r}: expected two tokens each")
    words = _WORDS[pre]
    backend = Tokenizer(models.BPE(ids, merges, fuse_unk=False, ignore_merges=words in _WHOLE_WORDS))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre in _DIGITS else []
    if words is not None:
        steps.append(pre_tokenizers.Split(Regex(words), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if words == _QWEN2:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentence_piece(fields: Fields, tokens: list[str], ids: dict[str, int]) -> Any:
    """SentencePiece's BPE: pieces with scores, and bytes for characters that are in no piece."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = dict(zip(tokens, _numbers(fields, "scores", len(tokens))))
    unknown = fields.get(PREFIX + "unknown_token_id", int, 0)
    if not 0 <= unknown < len(tokens):
        raise fields.error(PREFIX + "unknown_token_id", f"is {unknown}: there are {len(tokens)} tokens")
    backend = Tokenizer(models.BPE(ids, list(_merges(ids, scores)), unk_token=tokens[unknown], fuse_unk=True,
                                   byte_fallback=True))
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    begins: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.get(PREFIX + "add_space_prefix", bool, True):
        steps.insert(0, normalizers.Prepend("▁"))
        begins.append(decoders.Strip(" ", 1, 0))
    backend.normalizer, backend.decoder = normalizers.Sequence(steps), decoders.Sequence(begins)
    return backend


def _merges(ids: dict[str, int], scores: dict[str, float]) -> Iterable[tuple[str, str]]:
    """Pairs of pieces whose concatenation is a piece, the highest score first."""
    found: list[tuple[float, str, str]] = []
    for piece, score in scores.items():
        pairs = [(piece[:i], piece[i:]) for i in range(1, min(len(piece), 256))]
        known = [(ids[a], ids[b], a, b) for a, b in pairs if a in ids and b in ids]
        found.extend((score, a, b) for _, _, a, b in sorted(known))
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(first, second) for _, first, second in found]


def _special(fields: Fields, name: str, tokens: list[str]) -> str | None:
    number = fields.get(f"{PREFIX}{name}_token_id", int)
    if number is None:
        return None
    if not 0 <= number < len(tokens):
        raise fields.error(f"{PREFIX}{name}_token_id", f"is {number}: there are {len(tokens)} tokens")
    return tokens[number]


def _add_ends(fields: Fields, backend: Any, tokens: list[str], begins: bool) -> None:
    """Adds the tokens before and after a text."""
    from tokenizers import processors

    first = _special(fields, "bos", tokens) if fields.get(PREFIX + "add_bos_token", bool, begins) else None
    last = _special(fields, "eos", tokens) if fields.get(PREFIX + "add_eos_token", bool, False) else None
    ends = [token for token in (first, last) if token is not None]
    if ends:
        backend.post_processor = processors.TemplateProcessing(
            single=[token for token in (first, "$A", last) if token is not None],
            special_tokens=[(token, tokens.index(token)) for token in dict.fromkeys(ends)])


def _config(fields: Fields) -> dict[str, Any]:
    tokens = _strings(fields, "tokens")
    found = {f"{ours}_token": _special(fields, name, tokens)
             for ours, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))}
    config: dict[str, Any] = {name: token for name, token in found.items() if token is not None}
    template = fields.get("tokenizer.chat_template", str)
    names = fields.get("tokenizer.chat_templates", list, [])
    more = {name: fields.get(f"tokenizer.chat_template.{name}", str) for name in names if isinstance(name, str)}
    templates = {"default": template, **more}
    config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items() if text is not None]
    return config
