"""Formats whose calls stand in a section between special tokens (DeepSeek-V3, R1 and V3.1, Kimi-K2)."""
# ruff: noqa: RUF001
from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable
from typing import Any

from .format import ChatFormat, Literal, Message, json_rule
from .parser import OutputParser, Steps


class SectionParser(OutputParser):
    """Parses a section of calls, each a head and arguments in JSON.

    `section`, `call`: the marks around all calls, and around one. `separator`: the mark that ends a head.
    """

    section, call, separator = ("", ""), ("", ""), ""

    def _run(self) -> Steps:
        opening = (self.section[0], self.call[0])
        while marker := (yield from self._scan(opening, self._content)):
            yield from self._section(marker)

    def _section(self, marker: str | None) -> Steps:
        """Parses a section of calls from the mark that begins it."""
        while marker not in (None, self.section[1]):
            marker = yield from (self._one_call() if marker == self.call[0] else self._between())

    def _between(self) -> Steps:
        """Parses what stands in a section beside calls; returns the mark that follows. All but blanks is content."""
        begun = False

        def emit(text: str) -> None:
            nonlocal begun
            text = text if begun else text.lstrip()
            begun = begun or bool(text)
            self._content(text)

        return (yield from self._scan((*self.section, self.call[0]), emit))

    def _one_call(self) -> Steps:
        """Parses a call from the mark that begins it; returns the mark that follows."""
        head, marker = yield from self._collect((self.separator, *self.call, self.section[1]))
        if marker == self.separator:
            return (yield from self._arguments(head.strip()))
        if marker is None or head.strip():
            self._content(self.call[0] + head + ("" if marker in (None, self.call[0]) else marker))
        return marker

    def _arguments(self, head: str) -> Steps:
        """Parses a call from the mark that ends its head; returns the mark that follows the call."""
        self._taken = []
        name, call_id = yield from self._name(head)
        taken, self._taken = "".join(self._taken), None
        if not name:
            self._content(self.call[0] + head + self.separator + taken)
            return (yield from self._scan((*self.call, self.section[1]), self._content))
        arguments = self._begin(name, call_id)
        marker = yield from self._scan(("{", *self.call, self.section[1]), lambda text: None)
        if marker == "{":
            self._text = "{" + self._text
            yield from self._json_value(arguments)
            return (yield from self._scan((*self.call, self.section[1]), lambda text: None))
        if marker is not None:
            arguments("{}")
        return marker

    def _name(self, head: str) -> Steps:
        """Returns the function's name, "" if there is none, and the call's id or None."""
        return head, None
        yield


class SectionFormat(ChatFormat):
    """`head`: the Lark text of the head of the function NAME, up to its arguments. `foot`: what follows them.
    `between`: what stands between calls.
    """

    parser_class: type[SectionParser] = SectionParser
    foot = between = ""

    def head(self, name: str, literal: Literal) -> str:
        """See the class."""
        return f"{json.dumps(name)} {literal(self.parser_class.separator)}"

    def call_rules(self, functions: list[dict[str, Any]], parallel: bool, literal: Literal) -> str:
        """See ChatFormat."""
        parser = self.parser_class
        begin, end = map(literal, parser.call)
        between, foot = (f"{json.dumps(text)} " if text else "" for text in (self.between, self.foot))
        several = f" ({between}call)*" if parallel else ""
        lines = [f"calls: begin call{several} {literal(parser.section[1])}",
                 f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}"]
        for i, function in enumerate(functions):
            lines.append(f"call_{i}: {begin} {self.head(function['name'], literal)} arguments_{i} {foot}{end}")
            lines.append(f"arguments_{i}: {json_rule(function.get('parameters'))}")
        return "\n".join(lines)


# ---- DeepSeek -----------------------------------------------------------------------------------------------

_SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```json\n"


class DeepSeekParser(SectionParser):
    """Parses answers of DeepSeek-V3 and R1, whose head is `function`, and after the separator the name, with the
    arguments in a fence; and of V3.1, whose head is the name.
    """

    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    call = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    separator = _SEPARATOR

    def _name(self, head: str) -> Steps:
        if head != "function":
            return head, None
        yield from self._peek()
        name, marker = yield from self._collect(("\n", "```", "{", self.call[1]))
        if marker and marker != "\n":
            self._text = marker + self._text
            if self._taken:
                self._taken.pop()
        return name.strip() if marker else "", None


class DeepSeekFormat(SectionFormat):
    """DeepSeek-V3, V3-0324 and R1."""

    name = "deepseek_v3"
    parser_class = DeepSeekParser
    trigger = DeepSeekParser.section[0]
    markers = (*DeepSeekParser.section, *DeepSeekParser.call, _SEPARATOR, "<think>", "</think>")
    architectures = ("deepseek",)
    foot, between = "\n```", "\n"

    def recognizes(self, template: str) -> bool:
        """See ChatFormat."""
        return _SEPARATOR in template and "```json" in template

    def head(self, name: str, literal: Literal) -> str:
        """See SectionFormat."""
        text = json.dumps(f"{name}\n{_FENCE}")
        return f'"function" {literal(_SEPARATOR)} {text}'


class DeepSeek31Format(SectionFormat):
    """DeepSeek-V3.1: the name before the separator, no fence."""

    name = "deepseek_v31"
    parser_class = DeepSeekParser
    trigger = DeepSeekParser.section[0]
    markers = DeepSeekFormat.markers
    template_signs = (_SEPARATOR,)


# ---- Kimi ---------------------------------------------------------------------------------------------------

_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?", re.S)
_KIMI_ID = re.compile(r"functions\..+:(\d+)", re.S)


class KimiParser(SectionParser):
    """Parses answers of Kimi-K2. A call's head is its id, `functions.NAME:NUMBER`. Calls may end the reasoning."""

    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    call = ("<|tool_call_begin|>", "<|tool_call_end|>")
    separator = "<|tool_call_argument_begin|>"
    ENDS_REASONING = (section[0],)

    def __init__(self, tools: Iterable[dict[str, Any]] = (), opened: str = ""):
        """See OutputParser."""
        self._ids: set[str] = set()
        super().__init__(tools, opened)

    def _name(self, head: str) -> Steps:
        match = _ID.fullmatch(head)
        if not match:
            return "", None
        call_id = None if head in self._ids else head  # a model may repeat itself, but an id names one call
        self._ids.add(head)
        return match[1], call_id
        yield


class KimiFormat(SectionFormat):
    """Kimi-K2, K2-Thinking, K2.5 and later. Their templates show the ids of calls, which number all calls of a
    conversation.
    """

    name = "kimi_k2"
    parser_class = KimiParser
    trigger = KimiParser.section[0]
    markers = (*KimiParser.section, *KimiParser.call, KimiParser.separator, "<think>", "</think>")
    template_signs = (KimiParser.separator,)
    architectures = ("kimi",)
    adapted_templates = KimiParser.separator

    def adapt(self, messages: list[Message], variables: dict[str, Any]) -> tuple[list[Message], dict[str, Any]]:
        """See ChatFormat. Ids of another form, which another model gave, are replaced."""
        own = (_KIMI_ID.fullmatch(call.get("id") or "") for m in messages for call in m.get("tool_calls") or ())
        used = {match[1] for match in own if match}
        numbers = (number for number in itertools.count() if str(number) not in used)
        renamed: dict[str, str] = {}
        shown = []
        for message in messages:
            calls = []
            for call in message.get("tool_calls") or ():
                if not _KIMI_ID.fullmatch(call.get("id") or ""):
                    renamed[call.get("id")] = f"functions.{call['function']['name']}:{next(numbers)}"
                    call = {**call, "id": renamed[call.get("id")]}
                calls.append(call)
            if calls:
                message = {**message, "tool_calls": calls}
            elif message.get("tool_call_id") in renamed:
                message = {**message, "tool_call_id": renamed[message["tool_call_id"]]}
            shown.append(message)
        return shown, variables

    def head(self, name: str, literal: Literal) -> str:
        """See SectionFormat."""
        return f"{json.dumps(f'functions.{name}:')} /[0-9]{{1,3}}/ {literal(self.parser_class.separator)}"
