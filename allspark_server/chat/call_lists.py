"""Formats whose calls are one JSON list after a mark (Granite 3, Phi-4-mini, Nemotron Nano 2)."""

from __future__ import annotations

import json
from typing import Any

from .format import JsonCallFormat, Message
from .parser import THINK, OutputParser, Steps


class GraniteParser(OutputParser):
    """Parses answers of Granite 3. Reasoning is in marks, or between two sentences (3.2)."""

    REASONING = (("Here is my thought process:", "Here is my response:"),
                 ("Here's my thought process:", "Here's my response:"), *THINK)
    DROPPED = ("<response>", "</response>")

    def _run(self) -> Steps:
        while marker := (yield from self._scan(("<|tool_call|>", *self.DROPPED), self._content)):
            if marker == "<|tool_call|>":
                yield from self._call_list(marker)


class GraniteFormat(JsonCallFormat):
    """Granite 3.0 to 3.3; Granite 4 writes calls as Hermes does."""

    name = "granite"
    parser_class = GraniteParser
    trigger = "<|tool_call|>"
    markers = ("<|tool_call|>", "<think>", "</think>", "<response>", "</response>")
    template_signs = ("<|tool_call|>",)
    architectures = ("granite",)
    opening, separator, closing = 'begin "[" ', '", "', ' "]"'


class PhiParser(OutputParser):
    """Parses answers of Phi-4-mini: a list between marks, or after the word `functools`."""

    def _run(self) -> Steps:
        while marker := (yield from self._scan(("<|tool_call|>", "functools["), self._content)):
            if marker == "functools[":
                self._text = "[" + self._text
                marker = "functools"
            if (yield from self._call_list(marker)) and marker == "<|tool_call|>":
                yield from self._end_call(marker, "<|/tool_call|>")


class PhiFormat(JsonCallFormat):
    """Phi-4-mini. Its template takes the tools as a part of the system message."""

    name = "phi4_mini"
    parser_class = PhiParser
    trigger = "<|tool_call|>"
    markers = ("<|tool_call|>", "<|/tool_call|>", "<think>", "</think>")
    template_signs = ("<|tool|>",)
    adapted_templates = "<|tool|>"
    opening, separator, closing = 'begin "[" ', '", "', ' "]" {end_mark}'
    end_mark = "<|/tool_call|>"

    def adapt(self, messages: list[Message], variables: dict[str, Any]) -> tuple[list[Message], dict[str, Any]]:
        """See ChatFormat."""
        if not variables.get("tools"):
            return messages, variables
        shown = list(messages) if messages[0]["role"] == "system" else [{"role": "system", "content": ""}, *messages]
        shown[0] = {**shown[0], "tools": json.dumps([tool["function"] for tool in variables["tools"]])}
        return shown, variables


class NemotronParser(OutputParser):
    """Parses answers of Nemotron Nano 2. An empty list calls nothing."""

    def _run(self) -> Steps:
        begin, end = NemotronFormat.trigger, NemotronFormat.end_mark
        while (yield from self._scan((begin,), self._content)):
            if (yield from self._call_list(begin, may_be_empty=True)):
                yield from self._end_call(begin, end)


class NemotronFormat(JsonCallFormat):
    """Nemotron Nano 2 and Llama-Nemotron; Nemotron 3 writes calls as Qwen3-Coder does."""

    name = "nemotron_json"
    parser_class = NemotronParser
    trigger = "<TOOLCALL>"
    markers = ("<TOOLCALL>", "</TOOLCALL>", "<think>", "</think>")
    template_signs = ("<TOOLCALL>",)
    adapted_templates = "<TOOLCALL>"
    opening, separator, closing = 'begin "[" ', '", "', ' "]" {end_mark}'
    end_mark = "</TOOLCALL>"

    def adapt(self, messages: list[Message], variables: dict[str, Any]) -> tuple[list[Message], dict[str, Any]]:
        """See ChatFormat. The templates take text from every message, of calls alone too."""
        return [{**message, "content": message.get("content") or ""} for message in messages], variables
