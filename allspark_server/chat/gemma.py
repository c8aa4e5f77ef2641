"""Calls of Gemma: `call:get_weather{city:<escape>Paris<escape>,days:2}` between marks (FunctionGemma), and with other
marks (Gemma 4). Texts stand between two marks, keys without quotes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from .format import ChatFormat, Literal, after_text
from .parser import THINK, OutputParser, Steps
from .tagged import is_text, json_or_text, separated_arguments, value_rule

_DEPTH = 64  # of values in each other: the parser calls itself for each
_CONTROL = re.compile(r"[\x00-\x1f]")  # which JSON forbids in a string


class GemmaParser(OutputParser):
    """Parses answers of FunctionGemma. `block`: the marks around a call. `quote`: the mark around a text."""

    block, quote = ("<start_function_call>", "<end_function_call>"), "<escape>"

    def _run(self) -> Steps:
        begin, end = self.block
        while (yield from self._scan((begin,), self._content)):
            head, marker = yield from self._collect(("{", begin, end))
            kind, _, name = head.strip().partition(":")
            if marker != "{" or kind != "call" or not name.strip():
                if marker == begin:
                    self._text, marker = begin + self._text, None
                self._content(f"{begin}{head}{marker or ''}")
                continue
            yield from self._object(self._begin(name.strip()))
            yield from self._end_call(begin, end)

    def _object(self, emit: Callable[[str], None], depth: int = 1) -> Steps:
        """Emits an object as JSON, from the character after its opening brace. `depth`: of the values in it."""
        opening = "{"
        while (c := (yield from self._peek())) and c != "}":
            if c == ",":
                self._consume(1)
                continue
            key = (yield from self._json_string()) if c == '"' else None
            rest, marker = yield from self._collect((":", "}"))
            if marker != ":":
                if marker:
                    self._text = marker + self._text
                continue
            key = rest.strip().replace(self.quote, "") if key is None else key
            emit(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
            opening = ", "
            yield from self._value(emit, depth)
        if c:
            self._consume(1)
            emit("{}" if opening == "{" else "}")

    def _value(self, emit: Callable[[str], None], depth: int) -> Steps:
        """Emits a value as JSON; a list or an object at the greatest depth as a text."""
        c = yield from self._peek()
        while not self._ended and len(self._text) < len(self.quote) and self.quote.startswith(self._text):
            yield
        if self._text.startswith(self.quote):
            self._consume(len(self.quote))
            emit('"')
            if (yield from self._scan((self.quote,), lambda text: emit(_escaped(text)))):
                emit('"')
        elif c == '"':
            yield from self._json_value(lambda text: emit(_CONTROL.sub(lambda match: _escaped(match[0]), text)))
        elif c in ("{", "[") and depth == _DEPTH:
            emit('"')
            if (yield from self._json_value(lambda text: emit(_escaped(text)))):
                emit('"')
        elif c == "{":
            self._consume(1)
            yield from self._object(emit, depth + 1)
        elif c == "[":
            yield from self._array(emit, depth + 1)
        else:
            text, marker = yield from self._collect((",", "}", "]"))
            if marker:
                self._text = marker + self._text
                text = text.strip()
                emit(json_or_text("null" if text == "None" else text))

    def _array(self, emit: Callable[[str], None], depth: int) -> Steps:
        self._consume(1)
        opening = "["
        while (c := (yield from self._peek())) and c != "]":
            if c in ",}":
                self._consume(1)
                continue
            emit(opening)
            opening = ", "
            yield from self._value(emit, depth)
        if c:
            self._consume(1)
            emit("[]" if opening == "[" else "]")


class GemmaFormat(ChatFormat):
    """FunctionGemma: calls follow each other."""

    name = "functiongemma"
    parser_class: type[GemmaParser] = GemmaParser
    trigger = GemmaParser.block[0]
    markers: tuple[str, ...] = (*GemmaParser.block, GemmaParser.quote, "<think>", "</think>")
    template_signs = (GemmaParser.block[0],)

    def call_rules(self, functions: list[dict[str, Any]], parallel: bool, literal: Literal) -> str:
        """See ChatFormat."""
        begin, end = map(literal, self.parser_class.block)
        quote = literal(self.parser_class.quote)
        lines = [f"calls: begin call {end}" + (f" ({begin} call {end})*" if parallel else ""),
                 f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}"]

        def rule(value: Any, schema: dict[str, Any]) -> str:
            text = value_rule(value, schema, plain=True)
            return f"{quote} ({text}) {quote}" if is_text(value) else text

        for i, function in enumerate(functions):
            schema = function.get("parameters")
            opening = json.dumps(f"call:{function['name']}{{")
            if schema is None:
                lines.append(f'call_{i}: {opening} pair_list? "}}"')
                continue
            lines.append(f'call_{i}: {opening} pairs_{i} "}}"')
            lines += separated_arguments(f"pairs_{i}", schema, ":", rule, ",")
        if any(function.get("parameters") is None for function in functions):
            lines += ['pair_list: pair ("," pair)*', r'pair: /[^:{}\[\],<>]+/ ":" value',
                      r'value: quoted | plain | "[" (value ("," value)*)? "]" | "{" pair_list? "}"',
                      r'plain: /[^:{}\[\],<>"]+|"(\\.|[^"\\])*"/',
                      f"quoted: {quote} text", after_text("text", self.parser_class.quote, literal)]
        return "\n".join(lines)


class Gemma4Parser(GemmaParser):
    """Parses answers of Gemma 4."""

    REASONING = (("<|channel>thought", "<channel|>"), *THINK)
    block, quote = ("<|tool_call>", "<tool_call|>"), '<|"|>'


class Gemma4Format(GemmaFormat):
    """Gemma 4."""

    name = "gemma4"
    parser_class = Gemma4Parser
    trigger = Gemma4Parser.block[0]
    markers = (*Gemma4Parser.block, Gemma4Parser.quote, "<|channel>", "<channel|>", "<think>", "</think>")
    template_signs = (Gemma4Parser.block[0],)
    architectures = ("gemma4",)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
