"""What formats share whose calls write each argument between marks of its own, as plain text or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .format import ChatFormat, Literal, after_text, escaped, json_rule
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
        if text is None:
            properties = self.functions.get(function, {}).get("properties")
            text = is_text(properties.get(key) if isinstance(properties, dict) else None)
        if not text:
            value, _ = yield from self._collect((end,))
            arguments(json_or_text(value.strip("\n") if self.padded else value))
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
                begin, end = self.argument(json.dumps(key), is_text(value), literal), literal(self.value_end)
                part = f"{begin} {pad}value_{i}_{j} {end}{gap}"
                parts.append(part if key in schema.get("required", ()) else f"({part})?")
                lines.append(f"value_{i}_{j}: {value_rule(value, schema, plain=True, end=self.pad)}")
            lines.append(f"call_{i}: {self.call(function['name'], ' '.join(parts), literal)}")
        if any(function.get("parameters") is None for function in functions):
            lines += [f"pair: {self.argument(f'/{self.key}/', None, literal)} value{gap}",
                      after_text("value", self.value_end, literal)]
        return "\n".join(lines)


def json_or_text(value: str) -> str:
    """The value as JSON: itself if it is JSON, otherwise a text."""
    try:
        return json.dumps(json.loads(value), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)


def value_rule(value: Any, schema: dict[str, Any], plain: bool, end: str = "") -> str:
    """The Lark text of a value by its schema `value`, which is a part of `schema`: JSON. `plain`: but text as it is,
    without markup. `end`: what follows it; a lexeme of text takes all that it can, so this belongs to it.
    """
    follows = f" {json.dumps(end)}" if end else ""
    if plain and is_text(value):
        if "enum" in value or "const" in value:
            return " | ".join(json.dumps(text) + follows for text in value.get("enum", [value.get("const")]))
        most = value.get("maxLength", "")
        return f"/[^<]{{{value.get('minLength', 0)},{most}}}{escaped(end)}/"
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return json_rule({**value, **definitions} if isinstance(value, dict) else value) + follows


def is_text(value: Any) -> bool:
    """Whether the schema of a value says that it is text."""
    return isinstance(value, dict) and value.get("type") == "string"


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
