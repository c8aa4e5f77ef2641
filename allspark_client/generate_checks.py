"""Checks of the values of GenerateConfig: each takes a field's name and value, and returns the value to store.

They raise ValueError or TypeError with the name, the value and what is allowed.
"""
from __future__ import annotations

import json
from typing import Any

from .errors import nearest_name
from .fields import as_float, as_int, valid_unicode, wrong_type

INT32_MAX = 2**31 - 1
#: most words and most ids in a word of stop_words_ids, bad_words_ids and eos_token_id: every token is compared with
#: each of them
MAX_WORDS, MAX_WORD_IDS = 1024, 256
#: most stop strings, and most characters in one: the output is searched for each of them
MAX_STOPS, MAX_STOP_CHARACTERS = 64, 1024
MAX_LOGIT_BIAS = 100.0


def check_strings(name: str, value: Any) -> list[str]:
    """`value` as a list of str."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
        raise wrong_type(name, value, "a list of str")
    return list(value)


def check_eos(name: str, value: Any) -> int | list[int]:
    """`value` as an id or a list of ids; -1: none."""
    if isinstance(value, (list, tuple)):
        if len(value) > MAX_WORDS:
            raise ValueError(f"{name} has {len(value)} ids; allowed: at most {MAX_WORDS}")
        return [as_int(f"{name}[{i}]", v, 0, INT32_MAX) for i, v in enumerate(value)]
    return as_int(name, value, -1, INT32_MAX)


def check_words(name: str, value: Any) -> list[list[int]]:
    """A list of non-empty lists of token ids."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise wrong_type(name, value, "a list of lists of token ids")
    if len(value) > MAX_WORDS:
        raise ValueError(f"{name} has {len(value)} words; allowed: at most {MAX_WORDS}")
    words = []
    for i, word in enumerate(value):
        if hasattr(word, "tolist"):
            word = word.tolist()
        if not isinstance(word, (list, tuple)):
            raise wrong_type(f"{name}[{i}]", word, "a list of token ids")
        if not word:
            raise ValueError(f"{name}[{i}] is empty; a word needs at least one token id")
        if len(word) > MAX_WORD_IDS:
            raise ValueError(f"{name}[{i}] has {len(word)} ids; allowed: at most {MAX_WORD_IDS}")
        words.append([as_int(f"{name}[{i}][{j}]", v, 0, INT32_MAX) for j, v in enumerate(word)])
    return words


def check_stop(name: str, value: Any) -> list[str]:
    """A list of stop strings; a str stands for a list of one."""
    value = [value] if isinstance(value, str) else value
    strings = check_strings(name, value)
    if len(strings) > MAX_STOPS:
        raise ValueError(f"{name} has {len(strings)} strings; allowed: at most {MAX_STOPS}")
    for i, string in enumerate(strings):
        if not 0 < len(string) <= MAX_STOP_CHARACTERS:
            raise ValueError(f"{name}[{i}] has {len(string)} characters; allowed: 1 to {MAX_STOP_CHARACTERS}")
        valid_unicode(f"{name}[{i}]", string)
    return strings


#: by the type of a response_format: the field that it needs besides "type", and the fields that it may have
RESPONSE_FORMATS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "text": (None, ()),
    "json_object": (None, ("disable_any_whitespace",)),
    "json_schema": ("json_schema", ("disable_any_whitespace",)),
    "regex": ("regex", ()),
    "grammar": ("grammar", ("syntax",)),
    "choice": ("choice", ()),
}
GRAMMAR_SYNTAXES = ("lark", "ebnf")


def check_response_format(name: str, value: Any) -> dict[str, Any]:
    """Checks the form. The engine checks the schema, expression or grammar itself."""
    if not isinstance(value, dict):
        raise wrong_type(name, value, "a dict such as {'type': 'json_object'}")
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as e:
        raise ValueError(f"{name} is not plain JSON: {e}") from None
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in RESPONSE_FORMATS:
        raise ValueError(f"{name}.type={kind!r} is not known; allowed: {', '.join(RESPONSE_FORMATS)}"
                         f"{nearest_name(str(kind), RESPONSE_FORMATS)}")
    needed, more = RESPONSE_FORMATS[kind]
    for key in value:
        if key not in ("type", needed, *more):
            raise ValueError(f"{name}.{key} does not belong to type={kind!r}")
    if needed is not None and needed not in value:
        raise ValueError(f"{name}.{needed} is missing; type={kind!r} needs it")
    held = value.get(needed)
    if kind == "json_schema":
        _schema(f"{name}.json_schema", held)
    elif kind in ("regex", "grammar") and (not isinstance(held, str) or not held):
        raise wrong_type(f"{name}.{kind}", held, "a str that is not empty")
    elif kind == "choice" and not (isinstance(held, list) and held and all(isinstance(v, str) for v in held)):
        raise wrong_type(f"{name}.choice", held, "a list of one or more str")
    if value.get("syntax", "lark") not in GRAMMAR_SYNTAXES:
        raise ValueError(f"{name}.syntax={value['syntax']!r} is not known; allowed: {', '.join(GRAMMAR_SYNTAXES)}")
    if not isinstance(value.get("disable_any_whitespace", False), bool):
        raise wrong_type(f"{name}.disable_any_whitespace", value["disable_any_whitespace"], "a bool")
    return value


def _schema(name: str, value: Any) -> None:
    """A JSON schema, itself or in OpenAI's {"name": ..., "strict": ..., "schema": ...}, or the text of one."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as e:
            raise ValueError(f"{name} is not valid JSON: {e}") from None
    if isinstance(value, dict) and "schema" in value and set(value) <= {"name", "description", "schema", "strict"}:
        name, value = f"{name}.schema", value["schema"]
    if not isinstance(value, (dict, bool)):
        raise wrong_type(name, value, "a JSON schema: a dict")


def check_vocab(name: str, value: Any) -> dict[str, int]:
    """`value`, a dict of token to id or a list of tokens, as a dict."""
    if isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value):
        value = {token: i for i, token in enumerate(value)}
    if not isinstance(value, dict):
        raise wrong_type(name, value, "a dict of token to id, or a list of tokens")
    return {str(k): as_int(f"{name}[{k!r}]", v, 0, INT32_MAX) for k, v in value.items()}


def check_logit_bias(name: str, value: Any) -> dict[int, float]:
    """`value` as a dict of token id to bias."""
    if not isinstance(value, dict):
        raise wrong_type(name, value, "a dict of token id to a number")
    if len(value) > MAX_WORDS:
        raise ValueError(f"{name} has {len(value)} ids; allowed: at most {MAX_WORDS}")
    biases = {}
    for token, bias in value.items():
        if isinstance(token, str) and token.isascii() and token.isdigit():      # keys in JSON are text
            token = int(token)
        token = as_int(f"a key of {name}", token, 0, INT32_MAX)
        biases[token] = as_float(f"{name}[{token}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    return biases


POOLINGS = ("auto", "cls", "last", "mean")


def check_pooling(name: str, value: Any) -> str:
    """`value`, if it is one of POOLINGS."""
    if not isinstance(value, str):
        raise wrong_type(name, value, "a str")
    if value not in POOLINGS:
        raise ValueError(f"{name}={value!r} is not offered; allowed: {', '.join(map(repr, POOLINGS))}, or None")
    return value
