"""Hermes, Qwen2.5, Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them."""

from __future__ import annotations

from .format import JsonCallFormat
from .parser import OutputParser, Steps


class HermesParser(OutputParser):
    """Parses answers in the Hermes format."""

    def _run(self) -> Steps:
        while (yield from self._scan(("<tool_call>",), self._content)):
            if (yield from self._call(before="<tool_call>")):
                yield from self._scan(("</tool_call>",), lambda text: None)


class HermesFormat(JsonCallFormat):
    """A newline stands between the marks and the JSON object, and between calls."""

    name = "hermes"
    parser_class = HermesParser
    trigger = "<tool_call>"
    markers = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    template_signs = ("<tool_call>",)
    opening, item, separator = "begin ", "call", r'"\n" {trigger}'
    call_rule, end_mark = r'call: "\n" object "\n" {end_mark}', "</tool_call>"
