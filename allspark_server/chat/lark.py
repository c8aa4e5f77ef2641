"""Pieces of the Lark grammars that answers are held to."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

#: how forced arguments are written: as json.dumps does, which is what templates show models
JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

#: the Lark text for a literal, which may be a special token
Literal = Callable[[str], str]


def is_token(mark: str, literal: Literal) -> bool:
    """Such a one is no part of a lexeme."""
    return literal(mark).startswith("<")


def after_text(name: str, mark: str, literal: Literal) -> str:
    """The Lark rule of this name: any text up to a mark, and that."""
    if is_token(mark, literal):
        return f"{name}: {name.upper()} {literal(mark)}\n{name.upper()}: /(?s:.*)/"
    return f"{name}[lazy]: /(?s:.*){escaped(mark)}/"


def text_without(mark: str, literal: Literal) -> str:
    """The Lark text for any text that has no such mark in it."""
    if is_token(mark, literal):
        return "/(?s:.*)/"
    return f"/(?s:.*)/ & ~/(?s:.*){escaped(mark)}(?s:.*)/"


def escaped(text: str) -> str:
    """As a part of a regular expression."""
    return re.escape(text).replace("/", r"\/")


def json_rule(schema: Any, options: dict[str, Any] = JSON) -> str:
    """The Lark rule of a JSON schema."""
    schema = schema if isinstance(schema, dict) and schema else {"type": "object"}
    return "%json " + json.dumps({**schema, "x-guidance": options})
