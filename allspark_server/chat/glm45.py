"""GLM-4.5 and later: `<tool_call>name`, a pair of `<arg_key>` and `<arg_value>` for each argument, `</tool_call>`."""

from __future__ import annotations

import json

from .format import Literal
from .parser import Steps
from .tagged import TaggedFormat, TaggedParser


class GlmParser(TaggedParser):
    """Parses answers of GLM-4.5 and later, with newlines between the marks or without."""

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
    """GLM-4.5 and 4.6: newlines stand between calls, after the name, and around each pair of marks."""

    name = "glm45"
    parser_class = GlmParser
    trigger = "<tool_call>"
    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
               "<think>", "</think>")
    template_signs = ("<arg_key>",)
    architectures: tuple[str, ...] = ("glm4_moe", "glm4moe")
    value_end = "</arg_value>"

    def block_rules(self, parallel: bool, literal: Literal) -> str:
        """See TaggedFormat."""
        begin, end = literal("<tool_call>"), literal("</tool_call>")
        return f"calls: begin call {end}" + (f" ({self._gap()}{begin} call {end})*" if parallel else "")

    def call(self, name: str, arguments: str, literal: Literal) -> str:
        """See TaggedFormat."""
        return f"{json.dumps(name + self.gap)} {arguments}"

    def argument(self, key: str, text: bool | None, literal: Literal) -> str:
        """See TaggedFormat."""
        return f'{literal("<arg_key>")} {key} {literal("</arg_key>")} {self._gap()}{literal("<arg_value>")}'

    def _gap(self) -> str:
        return f"{json.dumps(self.gap)} " if self.gap else ""


class Glm47Format(GlmFormat):
    """GLM-4.7, 5 and 5.3-Flash: nothing stands between the marks."""

    name = "glm47"
    template_signs = ("</arg_key><arg_value>",)
    architectures = ("glm_moe_dsa", "glmmoedsa", "glm4_moe_lite", "glm4moelite", "glm5_next", "glm5next")
    gap = ""
