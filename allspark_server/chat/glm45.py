"""GLM-4.5: `<tool_call>name`, a pair of `<arg_key>` and `<arg_value>` for each argument, `</tool_call>`."""

from __future__ import annotations

import json

from .format import Literal
from .parser import Steps
from .tagged import TaggedFormat, TaggedParser


class GlmParser(TaggedParser):
    """Parses answers of GLM-4.5."""

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
            if marker == "\n":
                marker = yield from self._next()
            opening = "{"
            while marker == "<arg_key>":
                key, _ = yield from self._collect(("</arg_key>",))
                if (yield from self._scan(("<arg_value>", "</tool_call>"), lambda text: None)) != "<arg_value>":
                    break
                arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
                opening = ", "
                yield from self._argument(arguments, name, key, "</arg_value>")
                marker = yield from self._next()
            if marker is not None:
                arguments("{}" if opening == "{" else "}")

    def _next(self) -> Steps:
        return (yield from self._scan(("<arg_key>", "</tool_call>"), lambda text: None))


class GlmFormat(TaggedFormat):
    """Calls follow each other; a newline stands between them."""

    name = "glm45"
    parser_class = GlmParser
    trigger = "<tool_call>"
    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
               "<think>", "</think>")
    template_signs = ("<arg_key>",)
    architectures = ("glm4_moe", "glm4moe")
    value_end = "</arg_value>"

    def block_rules(self, parallel: bool, literal: Literal) -> str:
        """See TaggedFormat."""
        end = literal("</tool_call>")
        return f"calls: begin call {end}" + (rf' ("\n" {literal("<tool_call>")} call {end})*' if parallel else "")

    def call(self, name: str, arguments: str, literal: Literal) -> str:
        """See TaggedFormat."""
        return f"{json.dumps(name + chr(10))} {arguments}"

    def argument(self, key: str, literal: Literal) -> str:
        """See TaggedFormat."""
        return rf'{literal("<arg_key>")} {key} {literal("</arg_key>")} "\n" {literal("<arg_value>")}'
