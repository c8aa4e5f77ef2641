"""Parses an answer's text as it arrives.

A format's parser is a generator, `_run`, written as if it had the whole text. It yields when it needs more text, and
`feed` resumes it. The events do not depend on how the text is split.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from .events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin

Steps = Generator[None, None, Any]
THINK = (("<think>", "</think>"),)


class OutputParser:
    """Parses an answer without calls: content, perhaps with reasoning before it. One parser is for one sequence."""

    REASONING: Sequence[tuple[str, str]] = THINK
    #: whether all text is in messages of the format, even where nothing is called
    IN_MESSAGES = False
    #: marks that end the reasoning although they belong to what follows
    ENDS_REASONING: Sequence[str] = ()
    #: marks around text that are no part of it
    DROPPED: Sequence[str] = ()
    #: the marks around all that follows the reasoning; with the blanks beside them they are no part of it
    AROUND: tuple[str, str] | None = None

    def __init__(self, tools: Iterable[dict[str, Any]] = (), opened: str = ""):
        """`tools`: those that the prompt describes, in OpenAI's form. `opened`: the part of the answer that the prompt
        has begun.
        """
        self.opened = opened
        #: schemas of the parameters by function
        self.functions = {t["function"]["name"]: t["function"].get("parameters") or {} for t in tools}
        self.calls = 0
        self._text = opened
        self._ended = False
        self._events: list[Event] = []
        self._space = ""  # white space that ends the content; it is dropped before a call
        self._taken: list[str] | None = None  # consumed text that may still be content
        self._dropped = tuple(self.DROPPED)
        self._steps = self._all()
        next(self._steps)

    def feed(self, text: str) -> list[Event]:
        """Takes more of the answer; returns the events that are certain now."""
        self._text += text
        next(self._steps, None)
        return self._take_events()

    def finish(self) -> list[Event]:
        """Ends the answer; returns the events that were held back."""
        self._ended = True
        next(self._steps, None)
        if self._space and not self.calls:
            self._events.append(Content(self._space))
        self._space = ""
        return self._take_events()

    def reasoning_in(self, text: str) -> list[tuple[int, int]]:
        """The beginning and the end of each part of a whole answer that is reasoning, if any is; with its marks."""
        ends = [at + len(end) for _, end in self.REASONING if (at := text.find(end)) >= 0]
        ends += [at for mark in self.ENDS_REASONING if (at := text.find(mark)) >= 0]
        return [(0, min(ends, default=len(text)))]

    def _all(self) -> Steps:
        yield from self._reasoning()
        yield from self._enter()
        yield from self._run()
        while marker := (yield from self._scan(self._dropped, self._content)):  # the rest is content
            yield from self._drop(marker)

    def _run(self) -> Steps:
        """Parses what follows the reasoning; formats override it."""
        return
        yield

    def _reasoning(self) -> Steps:
        while True:
            start = self._text.lstrip()
            pair = next(((begin, end) for begin, end in self.REASONING if start.startswith(begin)), None)
            if pair is not None:
                break
            if self._ended or not any(begin.startswith(start) for begin, _ in self.REASONING):
                return
            yield
        self._text = start[len(pair[0]) :]
        yield from self._peek()
        held = ""

        def emit(text: str) -> None:
            nonlocal held
            text = held + text
            kept = text.rstrip()
            held = text[len(kept) :]
            if kept:
                self._events.append(Reasoning(kept))

        marker = yield from self._scan((pair[1], *self.ENDS_REASONING), emit)
        if marker in self.ENDS_REASONING:
            self._text = marker + self._text
        yield from self._peek()

    def _enter(self) -> Steps:
        """Drops the first mark of AROUND; the other one is dropped only after it."""
        if self.AROUND is None:
            return
        begin, end = self.AROUND
        while begin.startswith(start := self._text.lstrip()[:len(begin)]):
            if start == begin:
                self._text = self._text.lstrip()[len(begin):]
                self._dropped += (end,)
                yield from self._peek()
                return
            if self._ended:
                return
            yield

    def _drop(self, marker: str) -> Steps:
        """Drops a mark of `_dropped`, with the blanks beside it if it is of AROUND."""
        if self.AROUND is not None and marker == self.AROUND[1]:
            self._space = ""
            yield from self._peek()

    # ---- events ----

    def _take_events(self) -> list[Event]:
        """The events since the last call; neighbours of one kind are merged."""
        events: list[Event] = []
        for event in self._events:
            last = events[-1] if events else None
            if isinstance(event, (Content, Reasoning)) and type(last) is type(event):
                events[-1] = type(event)(last.text + event.text)
            elif isinstance(event, ToolCallArguments) and isinstance(last, ToolCallArguments) \
                    and last.index == event.index:
                events[-1] = ToolCallArguments(event.index, last.delta + event.delta)
            else:
                events.append(event)
        self._events = []
        return events

    def _content(self, text: str) -> None:
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._events.append(Content(kept))

    def _begin(self, name: str, id: str | None = None) -> Callable[[str], None]:
        """Begins a call; returns a function that takes more of its arguments."""
        index, self._space = self.calls, ""
        self.calls += 1
        self._events.append(ToolCallBegin(index, id or self._new_id(), name))
        return lambda text: self._events.append(ToolCallArguments(index, text)) if text else None

    @staticmethod
    def _new_id() -> str:
        return f"call_{secrets.token_hex(12)}"

    # ---- reading ----

    def _consume(self, count: int) -> str:
        text, self._text = self._text[:count], self._text[count:]
        if self._taken is not None:
            self._taken.append(text)
        return text

    def _peek(self) -> Steps:
        """Skips white space; returns the next character, or "" at the end."""
        while True:
            self._consume(len(self._text) - len(self._text.lstrip()))
            if self._text or self._ended:
                return self._text[:1]
            yield

    def _peek_content(self) -> Steps:
        """The next character that is not white space; it is not consumed."""
        while not self._ended and not self._text.strip():
            yield
        return self._text.lstrip()[:1]

    def _scan(self, markers: Sequence[str], emit: Callable[[str], None]) -> Steps:
        """Emits the text up to the first of the markers, and consumes that marker; returns it, or None at the end."""
        while True:
            found = [(at, marker) for marker in markers if (at := self._text.find(marker)) >= 0]
            if found:
                at, marker = min(found)
                emit(self._consume(at))
                self._consume(len(marker))
                return marker
            held = 0 if self._ended else _beginning_at_end(self._text, markers)
            emit(self._consume(len(self._text) - held))
            if self._ended:
                return None
            yield

    def _collect(self, markers: Sequence[str]) -> Steps:
        """Returns the text up to the first of the markers, and that marker."""
        parts: list[str] = []
        marker = yield from self._scan(markers, parts.append)
        return "".join(parts), marker

    def _json_value(self, emit: Callable[[str], None]) -> Steps:
        """Emits the text of the JSON value that begins with the next character; returns whether it was complete."""
        depth, in_string, escaped = 0, False, False
        while True:
            for at, c in enumerate(self._text):
                if in_string:
                    if escaped:
                        escaped = False
                    elif c == "\\":
                        escaped = True
                    elif c == '"':
                        in_string = False
                elif c == '"':
                    in_string = True
                elif c in "{[":
                    depth += 1
                elif c in "}]" and depth:
                    depth -= 1
                elif not depth and (c in ",}]" or c.isspace()):  # after a number or the like
                    emit(self._consume(at))
                    return True
                if not depth and not in_string and c in '"}]':
                    emit(self._consume(at + 1))
                    return True
            emit(self._consume(len(self._text)))
            if self._ended:
                return False
            yield

    def _json_string(self) -> Steps:
        """Returns the JSON string that begins with the next character; None if there is none."""
        parts: list[str] = []
        ended = yield from self._json_value(parts.append)
        try:
            value = json.loads("".join(parts)) if ended else None
        except ValueError:
            value = None
        return value if isinstance(value, str) else None

    def _call(self, known: bool = False, before: str = "") -> Steps:
        """Parses a call {"name": ..., "arguments" or "parameters": {...}}; returns whether it is one. Otherwise its
        text becomes content, after `before`. `known`: only names of `functions` count.
        """
        self._taken = []
        begun = yield from self._call_object(known)
        taken, self._taken = self._taken, None
        if not begun:
            self._content(before + "".join(taken))
        return begun

    def _call_list(self, before: str, may_be_empty: bool = False) -> Steps:
        """Parses a list of calls; returns whether it is one. Otherwise its text becomes content, after `before`.
        `may_be_empty`: a list without calls is one.
        """
        self._taken, begun = [before], False
        if (yield from self._peek()) == "[":
            self._consume(1)
            while (c := (yield from self._peek())) in ("{", ","):
                if c == ",":
                    self._consume(1)
                elif not (yield from self._call(before="".join(self._taken or ()))):
                    return False
                else:
                    begun = True
            if begun or (may_be_empty and c == "]"):
                if c == "]":
                    self._consume(1)
                self._taken = None
                return True
        taken, self._taken = self._taken, None
        self._content("".join(taken or ()))
        return False

    def _end_call(self, begin: str, end: str) -> Steps:
        """Skips what stands between a call and the mark `end`; it is content if that mark is missing up to the mark
        `begin` or the end.
        """
        text, marker = yield from self._collect((begin, end))
        if marker == end:
            return
        self._text = (marker or "") + self._text
        self._content(text)

    def _call_object(self, known: bool) -> Steps:
        if (yield from self._peek()) != "{":
            return False
        self._consume(1)
        arguments: Callable[[str], None] | None = None
        early: list[str] = []  # arguments that came before the name
        given = False
        while (c := (yield from self._peek())) and c != "}":
            if c == ",":
                self._consume(1)
                continue
            key = (yield from self._json_string()) if c == '"' else None
            if key is None or (yield from self._peek()) != ":":
                return arguments is not None
            self._consume(1)
            c = yield from self._peek()
            if key == "name" and arguments is None:
                name = (yield from self._json_string()) if c == '"' else None
                if name is None or (known and name not in self.functions):
                    return False
                arguments = self._begin(name)
                self._taken = None
                arguments("".join(early))
            elif key in ("arguments", "parameters") and not given:
                given = True
                emit = arguments or early.append
                if c == "{":
                    yield from self._json_value(emit)
                elif c == '"':  # JSON in a string
                    emit((yield from self._json_string()) or "{}")
                else:
                    emit("{}")
                    yield from self._json_value(lambda text: None)
            else:
                yield from self._json_value(lambda text: None)
        if c:
            self._consume(1)
            if arguments is not None and not given:
                arguments("{}")
        return arguments is not None


def _beginning_at_end(text: str, markers: Sequence[str]) -> int:
    """The number of characters at the end of the text that may be the beginning of a marker."""
    longest = max(map(len, markers), default=1) - 1
    for count in range(min(longest, len(text)), 0, -1):
        tail = text[-count:]
        if any(marker.startswith(tail) for marker in markers):
            return count
    return 0
