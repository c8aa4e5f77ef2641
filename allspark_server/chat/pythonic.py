"""Calls as Python writes them: `[get_weather(city="Paris"), now()]` (Llama 4, Llama 3.2, Gemma 3 with vLLM's
templates), between marks (LFM2), and between marks a call a line (OLMo 3).
"""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Callable
from typing import Any

from .format import ChatFormat, Literal
from .parser import OutputParser, Steps
from .tagged import separated_arguments, value_rule

_ERRORS = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)


class PythonicParser(OutputParser):
    """Parses answers that are a list of calls of known functions; another list is content."""

    def _run(self) -> Steps:
        if (yield from self._peek_content()) == "[":
            yield from self._list()

    def _list(self, before: str = "", brackets: bool = True) -> Steps:
        """Parses a list of calls; returns whether it is one. Otherwise its text becomes content, after `before`, from
        the first element that is no call. `brackets`: they stand around it.
        """
        self._taken, begun = [before], False
        yield from self._peek()
        self._consume(int(brackets))
        while (yield from self._call_in_list()):
            begun = True
            if (yield from self._peek()) == ",":
                self._consume(1)
            self._taken = []
        taken, self._taken = self._taken, None
        rest = "".join(taken or ())
        if begun and (not brackets or self._text[:1] == "]") and not rest.strip():
            self._consume(int(brackets))
            return True
        self._content(rest if not begun else rest.lstrip())
        return taken is None

    def _call_in_list(self) -> Steps:
        """Parses a call; returns whether it is complete. Its text is in `_taken` until it is known to be a call."""
        yield from self._peek()
        name = yield from self._while(lambda c: c.isalnum() or c in "_.-")
        if name not in self.functions or (yield from self._peek()) != "(":
            return False
        self._consume(1)
        properties = self.functions[name].get("properties")
        unnamed = iter(properties if isinstance(properties, dict) else ())
        arguments: Callable[[str], None] | None = None
        held, opening = "", "{"
        while (c := (yield from self._peek())) and c != ")":
            if c == ",":
                self._consume(1)
                continue
            key = yield from self._while(lambda c: c not in "=,)([{\"'*")
            named = self._text[:1] == "="
            if named:
                self._consume(1)
                arguments = arguments or self._begin_call(name, held)
            value = yield from self._value()
            if value is None:
                return False
            if not named:
                value = key + value
                key = "" if arguments or value.startswith("*") else next(unnamed, "")
                if not key:  # no argument that a schema could name
                    if arguments is None:
                        return False
                    self._content(value)
                    continue
            pair = f"{opening}{json.dumps(key.strip(), ensure_ascii=False)}: {_as_json(value.strip())}"
            opening = ", "
            if arguments:
                arguments(pair)
            else:
                held += pair
        if c:
            arguments = arguments or self._begin_call(name, held)
            self._consume(1)
            arguments("{}" if opening == "{" else "}")
        return bool(c)

    def _begin_call(self, name: str, held: str) -> Callable[[str], None]:
        """See _begin. `held`: the arguments that came before the call was known to be one."""
        arguments, self._taken = self._begin(name), None
        arguments(held)
        return arguments

    def _while(self, keeps: Callable[[str], bool]) -> Steps:
        """Returns the text up to the first character that is not kept."""
        at = 0
        while True:
            while at < len(self._text) and keeps(self._text[at]):
                at += 1
            if at < len(self._text) or self._ended:
                return self._consume(at)
            yield

    def _value(self) -> Steps:
        """Returns the text of a value; None if it is not complete."""
        depth, quote, escaped, at = 0, "", False, 0
        while True:
            for c in self._text[at:]:
                if quote:
                    if escaped:
                        escaped = False
                    elif c == "\\":
                        escaped = True
                    elif c == quote:
                        quote = ""
                elif c in "\"'":
                    quote = c
                elif not depth and c in ",)":
                    return self._consume(at)
                elif c in "([{":
                    depth += 1
                elif depth and c in ")]}":
                    depth -= 1
                at += 1
            if self._ended:
                self._consume(len(self._text))
                return None
            yield


class PythonicFormat(ChatFormat):
    """An answer is calls if and only if it begins with "[". `separator`: what stands between calls."""

    name = "pythonic"
    parser_class: type[OutputParser] = PythonicParser
    trigger, bare = "[", True
    separator = ", "
    template_signs: tuple[str, ...] = ("params_name1=params_value1",)

    def call_rules(self, functions: list[dict[str, Any]], parallel: bool, literal: Literal) -> str:
        """See ChatFormat."""
        several = f" ({json.dumps(self.separator)} call)*" if parallel else ""
        lines = [f"calls: {self._around('call' + several, literal)}",
                 f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}"]
        for i, function in enumerate(functions):
            opening, schema = json.dumps(function["name"] + "("), function.get("parameters")
            if schema is None:
                lines.append(f'call_{i}: {opening} ANY ")"')
                continue
            lines.append(f'call_{i}: {opening} pairs_{i} ")"')
            lines += separated_arguments(f"pairs_{i}", schema, "=", self._value_rule)
        if any(function.get("parameters") is None for function in functions):
            lines.append(r"""ANY: /([^"'()]|"(\\.|[^"\\])*"|'(\\.|[^'\\])*')*/""")
        return "\n".join(lines)

    def _around(self, calls: str, literal: Literal) -> str:
        return f'"[" {calls} "]"'

    def _value_rule(self, value: Any, schema: dict[str, Any]) -> str:
        """The Lark text of a value: booleans as Python writes them, all else as JSON."""
        if isinstance(value, dict) and value.get("type") == "boolean":
            return '"True" | "False"'
        return value_rule(value, schema, plain=False)


class LfmParser(PythonicParser):
    """Parses answers of LFM2. `marks`: around the calls. `brackets`: within the marks."""

    marks = ("<|tool_call_start|>", "<|tool_call_end|>")
    brackets = True

    def _run(self) -> Steps:
        begin, end = self.marks
        # An end mark after calls ends a list whose last elements were none; without calls it is content as its list is.
        while marker := (yield from self._scan((begin, end) if self.calls else (begin,), self._content)):
            if marker == end:
                continue
            if self.brackets and (yield from self._peek_content()) != "[":
                self._content(begin)
            elif (yield from self._list(begin, self.brackets)):
                yield from self._end_call(begin, end)


class LfmFormat(PythonicFormat):
    """LFM2: a list of calls between marks, then text for the user."""

    name = "lfm2"
    parser_class: type[LfmParser] = LfmParser
    trigger, bare = LfmParser.marks[0], False
    markers: tuple[str, ...] = (*LfmParser.marks, "<think>", "</think>")
    template_signs: tuple[str, ...] = ("<|tool_list_start|>", LfmParser.marks[0])
    architectures: tuple[str, ...] = ("lfm2",)

    def _around(self, calls: str, literal: Literal) -> str:
        return f'begin "[" {calls} "]" {literal(self.parser_class.marks[1])}'


class OlmoParser(LfmParser):
    """Parses answers of OLMo 3."""

    marks, brackets = ("<function_calls>", "</function_calls>"), False


class OlmoFormat(LfmFormat):
    """OLMo 3: a call a line. Its template shows values as JSON."""

    name = "olmo3"
    parser_class = OlmoParser
    trigger = OlmoParser.marks[0]
    markers = (*OlmoParser.marks, "<think>", "</think>")
    template_signs = (OlmoParser.marks[0],)
    architectures = ("olmo3",)
    separator = "\n"

    def _around(self, calls: str, literal: Literal) -> str:
        return f"begin {calls} {literal(self.parser_class.marks[1])}"

    def _value_rule(self, value: Any, schema: dict[str, Any]) -> str:
        return value_rule(value, schema, plain=False)


_loads = functools.partial(json.loads, strict=False)  # takes a newline within a text


def _as_json(value: str) -> str:
    for read in (_loads, ast.literal_eval, lambda text: ast.literal_eval(text.replace("\n", "\\n"))):
        try:
            return json.dumps(read(value), ensure_ascii=False, allow_nan=False)
        except _ERRORS:
            continue
    return json.dumps(value, ensure_ascii=False)
