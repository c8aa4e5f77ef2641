"""GLM-4.5: `<tool_call>name`, a pair of `<arg_key>` and `<arg_value>` for each argument, `</tool_call>`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .format import ChatFormat, Literal, after_text, json_rule
from .parser import OutputParser, Steps


class GlmParser(OutputParser):
    """A value is plain text if the function's schema makes it a string, otherwise JSON."""

    def _run(self) -> Steps:
        while (yield from self._scan(("<tool_call>",), self._content)):
            name, marker = yield from self._collect(("\n", "<arg_key>", "</tool_call>"))
            while marker == "\n" and not name.strip():
                name, marker = yield from self._collect(("\n", "<arg_key>", "</tool_call>"))
            name = name.strip()
            if not name or marker is None:
                self._content(f"<tool_call>{name}{marker or ''}")
                continue
            arguments = self._begin(name)
            properties = self.functions.get(name, {}).get("properties")
            if marker == "\n":
                marker = yield from self._next()
            opening = "{"
            while marker == "<arg_key>":
                key, _ = yield from self._collect(("</arg_key>",))
                schema = properties.get(key) if isinstance(properties, dict) else None
                is_text = isinstance(schema, dict) and schema.get("type") == "string"
                if (yield from self._scan(("<arg_value>", "</tool_call>"), lambda text: None)) != "<arg_value>":
                    break
                arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
                opening = ", "
                if is_text:
                    arguments('"')
                    def emit(text: str, arguments: Callable[[str], None] = arguments) -> None:
                        arguments(_escaped(text))

                    if (yield from self._scan(("</arg_value>",), emit)):
                        arguments('"')
                else:
                    value, _ = yield from self._collect(("</arg_value>",))
                    arguments(_json_or_text(value))
                marker = yield from self._next()
            if marker is not None:
                arguments("{}" if opening == "{" else "}")

    def _next(self) -> Steps:
        return (yield from self._scan(("<arg_key>", "</tool_call>"), lambda text: None))


class GlmFormat(ChatFormat):
    """The grammar writes a rule for each argument of each function."""

    name = "glm45"
    parser_class = GlmParser
    trigger = "<tool_call>"
    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
               "<think>", "</think>")
    template_signs = ("<arg_key>",)
    architectures = ("glm4_moe",)

    def call_rules(self, functions: list[dict[str, Any]], parallel: bool, literal: Literal) -> str:
        """See ChatFormat."""
        several = rf' ("\n" {literal("<tool_call>")} call)*' if parallel else ""
        lines = [f"calls: begin call{several}",
                 f'call: ({" | ".join(f"call_{i}" for i in range(len(functions)))}) '
                 f'{literal("</tool_call>")}']
        for i, function in enumerate(functions):
            schema = function.get("parameters")
            if schema is None:
                lines.append(f"call_{i}: {json.dumps(function['name'] + chr(10))} pair*")
                continue
            parts = [json.dumps(function["name"] + "\n")]
            for j, (key, value) in enumerate((schema.get("properties") or {}).items()):
                part = (rf'{literal("<arg_key>")} {json.dumps(key)} {literal("</arg_key>")} "\n" '
                        rf'{literal("<arg_value>")} value_{i}_{j} {literal("</arg_value>")} "\n"')
                parts.append(part if key in schema.get("required", ()) else f"({part})?")
                lines.append(f"value_{i}_{j}: {_glm_value(value, schema)}")
            lines.append(f"call_{i}: " + " ".join(parts))
        if any(function.get("parameters") is None for function in functions):
            key = rf'{literal("<arg_key>")} /[^<]+/ {literal("</arg_key>")}'
            lines += [rf'pair: {key} "\n" {literal("<arg_value>")} value "\n"',
                      after_text("value", "</arg_value>", literal)]
        return "\n".join(lines)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_or_text(value: str) -> str:
    try:
        return json.dumps(json.loads(value), ensure_ascii=False)
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)


def _glm_value(value: Any, schema: dict[str, Any]) -> str:
    """A value: text as it is, without markup; otherwise JSON."""
    if isinstance(value, dict) and value.get("type") == "string":
        if "enum" in value or "const" in value:
            return " | ".join(map(json.dumps, value.get("enum", [value.get("const")])))
        most = value.get("maxLength", "")
        return f"/[^<]{{{value.get('minLength', 0)},{most}}}/"
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return json_rule({**value, **definitions} if isinstance(value, dict) else value)
