"""JSON that may be long, made in pieces: writing all of it at once would hold up the event loop."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

quoted = json.encoder.encode_basestring_ascii   # a str as JSON, in the fastest way


def json_list(values: Iterable[Any], at_once: int = 256) -> Iterator[str]:
    """A list as JSON in pieces, each of `at_once` values."""
    yield "["
    rest, begun = iter(values), False
    while part := list(itertools.islice(rest, at_once)):
        yield (", " if begun else "") + json.dumps(part, ensure_ascii=False)[1:-1]
        begun = True
    yield "]"


def json_object(fields: dict[str, Any]) -> Iterator[str]:
    """An object as JSON in pieces. A field that is an iterator of pieces is JSON already."""
    comma = "{"
    for name, value in fields.items():
        yield f"{comma}{json.dumps(name)}: "
        comma = ", "
        if isinstance(value, Iterator):
            yield from value
        else:
            yield json.dumps(value, ensure_ascii=False)
    yield "}"


def joined(parts: Iterable[Iterator[str]]) -> Iterator[str]:
    """A list as JSON in pieces, whose items are given in pieces."""
    comma = "["
    for part in parts:
        yield comma
        yield from part
        comma = ", "
    yield "[]" if comma == "[" else "]"
