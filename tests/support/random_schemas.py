"""Random JSON schemas that bound every string, number, array and depth, and the longest texts they allow."""

from __future__ import annotations

import importlib.metadata
import random
from typing import Any

WORDS = ("name", "age", "city", "title", "tags", "of", "id", "\u00e9t\u00e9", "a b", "x", "items", "price", "kind",
         "note")
MOST = 700  # characters of a text
# llguidance refuses some numbers with limits and a step before 1.8.
STEPS = tuple(map(int, importlib.metadata.version("llguidance").split(".")[:2])) >= (1, 8)


def random_schema(draw: random.Random) -> dict[str, Any]:
    """An object schema whose texts have at most MOST characters."""
    while True:
        schema = _object(draw, draw.randrange(1, 4))
        if longest_text(schema) <= MOST:
            return schema


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(WORDS, draw.randrange(0, 5))
    properties = {name: _value(draw, depth - 1) for name in names}
    required = [name for name in names if draw.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(draw: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format"]
    if depth > 0:
        kinds += ["object", "array", "any", "array"]
    kind = draw.choice(kinds)
    if kind == "string":
        low = draw.randrange(0, 4)
        return {"type": "string", "minLength": low, "maxLength": low + draw.randrange(0, 12)}
    if kind in ("integer", "number"):
        low = draw.randrange(-1000, 1000)
        schema: dict[str, Any] = {"type": kind, "minimum": low, "maximum": low + draw.randrange(0, 2000)}
        if kind == "number" and STEPS:
            schema["multipleOf"] = 0.25
        return schema
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind == "enum":
        values = ["red", "green", 5, None, True, "\u00e4 \"b\"", -1.5, [1, "x"]]
        return {"enum": draw.sample(values, draw.randrange(1, 5))}
    if kind == "const":
        return {"const": draw.choice(["yes", 0, False, {"a": [1]}, "\\n"])}
    if kind == "pattern":
        return {"type": "string", "pattern": draw.choice(["^[a-z]{1,5}$", "^(ab|cd){1,3}$", "^[0-9]{3}-[A-Z]{2}$"])}
    if kind == "format":
        return {"type": "string", "format": draw.choice(["date", "time", "uuid", "ipv4"])}
    if kind == "object":
        return _object(draw, depth)
    if kind == "any":
        return {"anyOf": [_value(draw, depth - 1) for _ in range(draw.randrange(1, 4))]}
    low = draw.randrange(0, 3)
    return {"type": "array", "items": _value(draw, depth - 1), "minItems": low, "maxItems": low + draw.randrange(0, 3)}


def longest_text(schema: dict[str, Any]) -> int:
    """The number of tokens that hold any text of the schema: one per byte, six for each escaped character, and the
    end.
    """
    return _longest(schema) + 2


def _longest(schema: dict[str, Any]) -> int:
    if "anyOf" in schema:
        return max(map(_longest, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return max(len(repr(value).encode()) + 12 for value in schema.get("enum", [schema.get("const")]))
    kind = schema["type"]
    if kind == "object":
        return 2 + sum(4 + len(name.encode()) * 2 + _longest(value) for name, value in schema["properties"].items())
    if kind == "array":
        return 2 + schema["maxItems"] * (1 + _longest(schema["items"]))
    if kind == "string":
        return 2 + (6 * schema["maxLength"] if "maxLength" in schema else 40)
    return 24
