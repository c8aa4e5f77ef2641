"""Hunyuan (dense and A13B): calls in a section, each a name and JSON in a fence; `<answer>` around the rest.

The form is that of these checkpoints' chat templates. vLLM's template for A13B has a JSON list in the section, which is
parsed, too.
"""

from __future__ import annotations

import json
from typing import Any

from .format import Literal
from .parser import Steps
from .sections import SectionFormat, SectionParser


class HunyuanParser(SectionParser):
    """Parses answers of Hunyuan."""

    AROUND = ("<answer>", "</answer>")
    section, call, separator = ("<tool_calls>", "</tool_calls>"), ("<tool_call>", "</tool_call>"), "\n"

    def _run(self) -> Steps:
        opening = (self.section[0], self.call[0])
        while marker := (yield from self._scan((*opening, *self._dropped), self._content)):
            if marker in self._dropped:
                yield from self._drop(marker)
            elif marker == self.section[0] and (yield from self._peek_content()) == "[":
                if (yield from self._call_list(marker)):
                    yield from self._end_call(*self.section)
            else:
                yield from self._section(marker)
            if self.calls:  # they may stand in an answer whose begin mark is missing
                self._dropped = (self.AROUND[1],)

    def _one_call(self) -> Steps:
        yield from self._peek()  # before the name
        return (yield from super()._one_call())


class HunyuanFormat(SectionFormat):
    """The grammar allows calls in fences only, in an `<answer>` or without it."""

    name = "hunyuan"
    parser_class = HunyuanParser
    trigger = HunyuanParser.section[0]
    markers = (*HunyuanParser.section, *HunyuanParser.call, *HunyuanParser.AROUND, "<think>", "</think>")
    template_signs = ("<tool_calls><tool_call>", "<tool_calls>[{")
    architectures = ("hunyuan",)
    foot, between = "\n```", "\n"

    def lead(self, literal: Literal) -> str:
        """See ChatFormat."""
        return rf"({literal(HunyuanParser.AROUND[0])} /\n?/)? {literal(self.trigger)}"

    def call_rules(self, functions: list[dict[str, Any]], parallel: bool, literal: Literal) -> str:
        """See ChatFormat."""
        calls, *rules = super().call_rules(functions, parallel, literal).split("\n")
        return "\n".join([rf"{calls} (/\n?/ {literal(HunyuanParser.AROUND[1])})?", *rules])

    def head(self, name: str, literal: Literal) -> str:
        """See SectionFormat."""
        return json.dumps(f"{name}\n```json\n")
