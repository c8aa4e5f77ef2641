"""Harmony, gpt-oss' format: an answer is messages. Each has a channel and, if it calls a tool, a recipient.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...

The prompt ends with <|start|>assistant. The channel "analysis" is reasoning; "final" and "commentary" are for the user.
A message with a recipient is a call, and its text is the arguments. The recipient stands before or after the channel.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from .events import Reasoning
from .format import ChatFormat, Literal, Message, ReasoningMarks, after_text, json_rule, text_without
from .parser import OutputParser, Steps

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
FUNCTIONS = "functions."

# The header of a message that the end of a prompt has begun, if the header is complete.
_OPENED = re.compile(r"<\|start\|>assistant((?:[^<]|<\|(?:channel|constrain)\|>)*<\|message\|>)\Z")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_MARK = re.compile(r"<\|(?:start|channel|message|end|call|return)\|>")

# Reasoning efforts of the HTTP APIs that the models were not trained with, and the nearest ones that they support.
_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class HarmonyParser(OutputParser):
    """Parses harmony's messages. Text outside of messages is content."""

    REASONING = ((CHANNEL + "analysis" + MESSAGE, END),)
    IN_MESSAGES = True
    _HEADS = (START, CHANNEL, MESSAGE, CONSTRAIN, "to=")

    def _reasoning(self) -> Steps:
        return
        yield

    def _run(self) -> Steps:
        before = ""  # kind of the previous message
        while (yield from self._at_header()):
            header, marker = yield from self._collect((MESSAGE,))
            if marker is None:
                return
            kind, recipient = self._kind(header)
            if kind == "call":
                emit = self._begin(recipient)
            else:
                emit = self._reason if kind == "reasoning" else self._content
                if kind == before:
                    emit("\n")
            before = kind
            marker = yield from self._scan((END, CALL, RETURN, START, CHANNEL), emit)
            if marker in (START, CHANNEL):  # the end of the message is missing
                self._text = marker + self._text

    def _kind(self, header: str) -> tuple[str, str]:
        """What a message is by its header, and the function that it calls."""
        recipient = _RECIPIENT.search(header)
        if recipient is not None and self.functions:
            return "call", recipient[1].removeprefix(FUNCTIONS)
        channel = _CHANNEL.search(header)
        return "reasoning" if channel is not None and channel[1] == "analysis" else "content", ""

    def reasoning_in(self, text: str) -> list[tuple[int, int]]:
        """See OutputParser. Each message of reasoning is a part."""
        shift = len(self.opened)
        text = self.opened + text
        parts: list[tuple[int, int]] = []
        begin, reasons = -1, False      # of the current header or message; -1: there is none
        for mark in _MARK.finditer(text):
            if mark[0] == MESSAGE:
                reasons = begin >= 0 and self._kind(text[begin:mark.end()])[0] == "reasoning"
            elif mark[0] in (END, CALL, RETURN) or reasons or begin < 0:
                ended = mark[0] not in (START, CHANNEL)
                if reasons:
                    parts.append((begin - shift, (mark.end() if ended else mark.start()) - shift))
                begin, reasons = -1 if ended else mark.start(), False
        return [*parts, (begin - shift, len(text) - shift)] if reasons else parts

    def _at_header(self) -> Steps:
        """Whether a message's header follows. Drops white space before it."""
        while True:
            start = self._text.lstrip()
            if start.startswith(self._HEADS):
                return True
            if self._ended or (start and not any(head.startswith(start) for head in self._HEADS)):
                return False
            yield

    def _reason(self, text: str) -> None:
        if text:
            self._events.append(Reasoning(text))


class HarmonyFormat(ChatFormat):
    """An answer is messages of reasoning, then a message to the user or a call."""

    name = "harmony"
    parser_class = HarmonyParser
    markers = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
    stops = (RETURN, CALL)
    template_signs = (CHANNEL,)
    architectures = ("gptoss",)
    opened = _OPENED
    adapted_templates = CHANNEL

    def reasoning(self, templates: Iterable[str]) -> ReasoningMarks | None:
        """See ChatFormat. Each message of the channel "analysis" is reasoning, until one of the channel "final"."""
        return ReasoningMarks(tuple(self.parser_class.REASONING), anywhere=True, again=CHANNEL, word="analysis",
                              last=CHANNEL + "final" + MESSAGE)

    def reasoning_at(self, prompt: str) -> tuple[str | None, bool]:
        """See ChatFormat."""
        match = _OPENED.search(prompt)
        channel = match and _CHANNEL.search(match[1])
        if not channel:
            return None, False
        return (END, False) if channel[1] == "analysis" else (None, channel[1] == "final")

    def adapt(self, messages: list[Message], variables: dict[str, Any]) -> tuple[list[Message], dict[str, Any]]:
        """The templates refuse a message with calls, reasoning and content: reasoning and content become one text."""
        shown = []
        for message in messages:
            thoughts = [name for name in _REASONING_KEYS if message.get(name)]
            if message.get("tool_calls") and message.get("content") and thoughts:
                text = f"{message[thoughts[0]]}\n{message['content']}"
                message = {**message, "content": "", thoughts[0]: text}
            shown.append(message)
        effort = variables.get("reasoning_effort")
        return shown, {**variables, "reasoning_effort": _EFFORTS[effort]} if effort in _EFFORTS else variables

    def answer_grammar(
        self, functions: list[dict[str, Any]], forced: bool, parallel: bool, prompt: str, reasons: bool,
        literal: Literal, answer: str | None,
    ) -> str:
        """See ChatFormat. The answer is messages of reasoning, then a call of one of the functions; or, unless
        `forced`, a message to the user, with preambles before it. ValueError if a call is forced after the prompt has
        begun another message.
        """
        def header(channel: str, content_type: str = "") -> str:
            return f"{literal(CHANNEL)} {json.dumps(channel)} {content_type} {literal(MESSAGE)}"

        next_message = f'ended {literal(START)} "assistant"'
        last = ["call"] * bool(functions) + ["final"] * (not forced)
        start = f"{'analysis*' if forced else '(analysis | preamble)*'} ({' | '.join(last)})"
        if match := _OPENED.search(prompt):
            channel = _CHANNEL.search(match[1])
            if channel is not None and channel[1] == "analysis":
                start = f"{next_message} {start}"
            elif forced:
                raise ValueError("no tool can be called: the prompt has begun a message of the answer that is no "
                                 "reasoning")
            else:
                start = "answer"
        rules = [f"start: {start}", f"analysis: {header('analysis')} {next_message}", after_text("ended", END, literal)]
        if not forced:
            rules.append(f"preamble: {header('commentary')} {next_message}")
            rules.append(f"final: {header('final')} answer")
            rules.append(f"answer: {answer}" if answer else f"answer: TEXT\nTEXT: {text_without(END, literal)}")
        if functions:
            rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
        for i, function in enumerate(functions):
            to = header(f"commentary to={FUNCTIONS}{function['name']} ", f'{literal(CONSTRAIN)} "json"')
            rules += [f"call_{i}: {to} arguments_{i}", f"arguments_{i}: {json_rule(function.get('parameters'))}"]
        return "\n".join(rules)
