"""What formats share whose calls write each argument between marks of its own, as plain text or JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from .format import ChatFormat, Literal, after_text, escaped, json_rule, slashes_escaped
from .parser import OutputParser, Steps


class TaggedParser(OutputParser):
    """A value is plain text if the function's schema makes it a string, otherwise JSON, or text that is no JSON.

    `padded`: a newline stands before and after each value.
    """

    padded = False

    def _argument(
        self, arguments: Callable[[str], None], function: str, key: str, end: str, text: bool | None = None
    ) -> Steps:
        """Emits the value of the argument `key`, which the mark `end` ends, as JSON. `text`: whether it is plain text;
        None: the function's schema says it.
        """
        properties = self.functions.get(function, {}).get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        if not (is_text(schema) if text is None else text):
            value, _ = yield from self._collect((end,))
            value = value.strip("\n") if self.padded else value
            arguments(json_or_text(value, schema if text is None else None))
            return
        first, held = self.padded, ""

        def emit(text: str) -> None:
            nonlocal first, held
            text = held + text
            if first and text:
                first, text = False, text.removeprefix("\n")
            held = "\n" if self.padded and text.endswith("\n") else ""
            arguments(json.dumps(text.removesuffix(held), ensure_ascii=False)[1:-1])

        arguments('"')
        if (yield from self._scan((end,), emit)):
            arguments('"')


class TaggedFormat(ChatFormat):
    """The grammar writes a rule for each argument of each function.

    `key`: the regular expression of a key that no schema names. `value_end`: the mark that ends a value. `pad`: what
    stands before that mark and at the beginning of a value. `gap`: what stands after that mark.
    """

    key, value_end, pad, gap = "[^<]+", "", "", "\n"

    def block_rules(self, parallel: bool, literal: Literal) -> str:
        """The Lark rule `calls`, of one `call` or several."""
        raise NotImplementedError

    def call(self, name: str, arguments: str, literal: Literal) -> str:
        """The Lark text of a call. `arguments`: the Lark text of its arguments."""
        raise NotImplementedError

    def argument(self, key: str, text: bool | None, literal: Literal) -> str:
        """The Lark text of what stands before a value. `key`: a Lark string or regular expression. `text`: whether the
        value is plain text; None if no schema says it.
        """
        raise NotImplementedError

    def call_rules(self, functions: list[dict[str, Any]], parallel: bool, literal: Literal) -> str:
        """See ChatFormat."""
        lines = [self.block_rules(parallel, literal),
                 f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}"]
        pad, gap = f"{json.dumps(self.pad)} " if self.pad else "", f" {json.dumps(self.gap)}" if self.gap else ""
        for i, function in enumerate(functions):
            schema = function.get("parameters")
            if schema is None:
                lines.append(f"call_{i}: {self.call(function['name'], 'pair*', literal)}")
                continue
            parts = []
            for j, (key, value) in enumerate((schema.get("properties") or {}).items()):
                part = f"{self.argument(json.dumps(key), is_text(value), literal)} {pad}value_{i}_{j}{gap}"
                parts.append(part if key in schema.get("required", ()) else f"({part})?")
                lines.append(self._value(f"value_{i}_{j}", value, schema, literal))
            lines.append(f"call_{i}: {self.call(function['name'], ' '.join(parts), literal)}")
        if any(function.get("parameters") is None for function in functions):
            lines += [f"pair: {self.argument(f'/{self.key}/', None, literal)} value{gap}",
                      after_text("value", self.value_end, literal)]
        return "\n".join(lines)

    def _value(self, name: str, value: Any, schema: dict[str, Any], literal: Literal) -> str:
        """The Lark rule of this name: a value by its schema `value`, which is a part of `schema`, and its end."""
        if is_text(value) and not _choices(value):
            fewest, most = value.get("minLength", 0), value.get("maxLength", "")
            count = f"{{{fewest},{most}}}" if fewest or most != "" else "*"
            if "pattern" not in value:
                return after_text(name, self.pad + self.value_end, literal, count)
            # An intersection cannot be lazy: it takes all that it can, so it has no "<", and the pad belongs to it.
            pad, pattern = escaped(self.pad), slashes_escaped(str(value["pattern"]))
            begin, finish = ("" if anchored else "(?s:.*)" for anchored in (pattern[:1] == "^", _ENDED.search(pattern)))
            matching = f"{begin}(?:{_ENDED.sub('', pattern.removeprefix('^'))}){finish}"
            return (f"{name}: {name.upper()} {literal(self.value_end)}\n"
                    f"{name.upper()}: /[^<]{count}{pad}/ & /{matching}{pad}/")
        return f"{name}: ({value_rule(value, schema, plain=True)}) {literal(self.pad + self.value_end)}"


_ENDED = re.compile(r"(?<!\\)\$\Z")     # in a pattern that is anchored at its end


def json_or_text(value: str, schema: Any = None) -> str:
    """The value as JSON: itself if it is JSON, otherwise a text. `schema`: of the value; where it allows texts, JSON of
    a type that it does not allow is a text.
    """
    try:
        found = json.loads(value)
        kinds = _kinds(schema)
        if "string" not in kinds or kinds & _TYPES[type(found)]:
            return json.dumps(found, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        pass
    return json.dumps(value, ensure_ascii=False)


_TYPES = {str: {"string"}, bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, list: {"array"},
          dict: {"object"}, type(None): {"null"}}


def _kinds(schema: Any) -> set[str]:
    """The types that a schema names, in its options too; empty if one of them names none."""
    if not isinstance(schema, dict):
        return set()
    options = [option for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list) for option in schema[key]]
    named = [part.get("type") if isinstance(part, dict) else None for part in options or [schema]]
    listed: list[Any] = [[kind] if isinstance(kind, str) else kind for kind in named]
    if not all(isinstance(kinds, list) for kinds in listed):
        return set()
    return {kind for kinds in listed for kind in kinds if isinstance(kind, str)}


def value_rule(value: Any, schema: dict[str, Any], plain: bool) -> str:
    """The Lark text of a value by its schema `value`, which is a part of `schema`: JSON. `plain`: but text as it is,
    without markup.
    """
    if plain and is_text(value):
        if choices := _choices(value):
            return " | ".join(map(json.dumps, choices))
        most = value.get("maxLength", "")
        return f"/[^<]{{{value.get('minLength', 0)},{most}}}/"
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return json_rule({**value, **definitions} if isinstance(value, dict) else value)


def is_text(value: Any) -> bool:
    """Whether the schema of a value says that it is text."""
    if not isinstance(value, dict):
        return False
    choices = _choices(value)
    return value.get("type") == "string" or ("type" not in value and bool(choices)
                                             and all(isinstance(choice, str) for choice in choices))


def _choices(value: dict[str, Any]) -> list[Any]:
    """The values that a schema lists."""
    listed = value.get("enum")
    return listed if isinstance(listed, list) else [value["const"]] if "const" in value else []


def separated_arguments(
    name: str, schema: dict[str, Any], equals: str, rule: Callable[[Any, dict[str, Any]], str],
    separator: str = ", ",
) -> list[str]:
    """Lark rules of the arguments of a function, the first named `name`: the schema's properties in their order, with a
    separator between those that are written. `rule`: the Lark text of a value and the function's schema.
    """
    properties, required = schema.get("properties") or {}, schema.get("required", ())
    lines, between = [], json.dumps(separator)
    for j, (key, value) in enumerate(properties.items()):
        lines.append(f"{name}_value_{j}: {rule(value, schema)}")
        pair = f"{json.dumps(key + equals)} {name}_value_{j} {name}_more_{j + 1}"
        skip, more = (("", "") if key in required else (f" | {_at(name, j + 1)}", f" | {name}_more_{j + 1}"))
        lines.append(f"{_at(name, j)}: {pair}{skip}")
        lines.append(f"{name}_more_{j}: {between} {pair}{more}")
    ends = [_at(name, len(properties)), f"{name}_more_{len(properties)}"] if properties else [name]
    return lines + [f'{end}: ""' for end in ends]


def _at(name: str, index: int) -> str:
    return f"{name}_{index}" if index else name
