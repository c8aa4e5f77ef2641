"""Harmony, gpt-oss' format: an answer is messages, each with a channel and, if it calls a tool, a recipient.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...

The prompt ends with <|start|>assistant. The channel analysis is reasoning, final and commentary are for the user, and
what has a recipient is a call: its text are the arguments. The recipient stands before the channel or after it.
"""

from __future__ import annotations

import json
import re
from typing import Any

from .events import Reasoning
from .lark import Literal, after_text, json_rule, text_without
from .parser import OutputParser, Steps

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
STOPS = (RETURN, CALL)
FUNCTIONS = "functions."

#: what a prompt's end has begun of a message: its header, if all of that is there
_OPENED = re.compile(r"<\|start\|>assistant((?:[^<]|<\|(?:channel|constrain)\|>)*<\|message\|>)\Z")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")


#: efforts that the HTTP server takes and these models were not trained with, as the nearest that they were
_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")


def as_templates_take(
    messages: list[dict[str, Any]], kwargs: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and variables as harmony's templates take them: of a message with calls, which they refuse to show with
    reasoning and content, these are one text.
    """
    shown = []
    for message in messages:
        thoughts = [name for name in _THOUGHTS if message.get(name)]
        if message.get("tool_calls") and message.get("content") and thoughts:
            message = {**message, "content": "", thoughts[0]: f"{message[thoughts[0]]}\n{message['content']}"}
        shown.append(message)
    effort = kwargs.get("reasoning_effort")
    return shown, {**kwargs, "reasoning_effort": _EFFORTS[effort]} if effort in _EFFORTS else kwargs


class HarmonyParser(OutputParser):
    """Of harmony's messages. Text that is in none of them is content."""

    REASONING = ((CHANNEL + "analysis" + MESSAGE, END),)
    IN_MESSAGES = True
    _HEADS = (START, CHANNEL, MESSAGE, CONSTRAIN, "to=")

    def _reasoning(self) -> Steps:
        return
        yield

    def _run(self) -> Steps:
        before = ""  # the kind of the message before
        while (yield from self._at_header()):
            header, marker = yield from self._collect((MESSAGE,))
            if marker is None:
                return
            channel = _CHANNEL.search(header)
            recipient = _RECIPIENT.search(header)
            kind = "reasoning" if channel is not None and channel[1] == "analysis" else "content"
            if recipient is not None and self.functions:
                kind, emit = "call", self._begin(recipient[1].removeprefix(FUNCTIONS))
            else:
                emit = self._reason if kind == "reasoning" else self._content
                if kind == before:
                    emit("\n")
            before = kind
            marker = yield from self._scan((END, CALL, RETURN, START, CHANNEL), emit)
            if marker in (START, CHANNEL):  # the end of the message is missing
                self._text = marker + self._text

    def _at_header(self) -> Steps:
        """Whether a message's header follows; white space before it is dropped."""
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


def opened(prompt: str) -> str:
    """The header of a message that the end of a rendered prompt has begun, or nothing."""
    match = _OPENED.search(prompt)
    return match[1] if match else ""


def grammar(functions: list[dict[str, Any]], forced: bool, prompt: str, literal: Literal,
            answer: str | None) -> str:
    """A Lark grammar of answers after a rendered prompt: messages of reasoning, then a call of one of the functions;
    or, unless that is `forced`, text for the user, any or as the Lark rule `answer` says, with preambles before.
    ValueError: a call is forced, and the prompt has begun another message.
    """
    def header(channel: str, content_type: str = "") -> str:
        return f"{literal(CHANNEL)} {json.dumps(channel)} {content_type} {literal(MESSAGE)}"

    goes_on = f'ended {literal(START)} "assistant"'
    last = ["call"] * bool(functions) + ["final"] * (not forced)
    start = f"{'analysis*' if forced else '(analysis | preamble)*'} ({' | '.join(last)})"
    if begun := opened(prompt):
        channel = _CHANNEL.search(begun)
        if channel is not None and channel[1] == "analysis":
            start = f"{goes_on} {start}"
        elif forced:
            raise ValueError("no tool can be called: the prompt has begun a message of the answer that is no reasoning")
        else:
            start = "answer"
    rules = [f"start: {start}", f"analysis: {header('analysis')} {goes_on}", after_text("ended", END, literal)]
    if not forced:
        rules.append(f"preamble: {header('commentary')} {goes_on}")
        rules.append(f"final: {header('final')} answer")
        rules.append(f"answer: {answer}" if answer else f"answer: TEXT\nTEXT: {text_without(END, literal)}")
    if functions:
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
    for i, function in enumerate(functions):
        to = header(f"commentary to={FUNCTIONS}{function['name']} ", f'{literal(CONSTRAIN)} "json"')
        rules += [f"call_{i}: {to} arguments_{i}", f"arguments_{i}: {json_rule(function.get('parameters'))}"]
    return "\n".join(rules)
