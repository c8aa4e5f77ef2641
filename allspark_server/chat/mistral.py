"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`; newer models: `[TOOL_CALLS]name[ARGS]{...}`."""

from __future__ import annotations

import secrets
import string

from .format import JsonCallFormat
from .parser import THINK, OutputParser, Steps


class MistralParser(OutputParser):
    """Parses both forms. Call ids have nine letters or digits: Mistral's templates insist on that."""

    REASONING = (*THINK, ("[THINK]", "[/THINK]"))
    ALPHABET = string.ascii_letters + string.digits

    def _run(self) -> Steps:
        while (yield from self._scan(("[TOOL_CALLS]",), self._content)):
            c = yield from self._peek()
            if c == "[":
                if not (yield from self._call_list("[TOOL_CALLS]")):
                    return
            elif c == "{":
                yield from self._call()
            else:
                yield from self._named()

    def _named(self) -> Steps:
        name, marker = yield from self._collect(("[CALL_ID]", "[ARGS]", "{"))
        call_id = None
        if marker == "[CALL_ID]":
            call_id, marker = yield from self._collect(("[ARGS]", "{"))
        if marker is None:
            self._content(name)
            return
        arguments = self._begin(name.strip(), call_id and call_id.strip())
        if marker == "{":
            self._text = "{" + self._text
        if (yield from self._peek()) == "{":
            yield from self._json_value(arguments)

    @classmethod
    def _new_id(cls) -> str:
        return "".join(secrets.choice(cls.ALPHABET) for _ in range(9))


class MistralFormat(JsonCallFormat):
    """The grammar allows the older form, a JSON list, only."""

    name = "mistral"
    parser_class = MistralParser
    trigger = "[TOOL_CALLS]"
    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "<think>", "</think>")
    template_signs = ("[TOOL_CALLS]",)
    architectures = ("mistral", "mixtral")
    opening, separator, closing = 'begin "[" ', '", "', ' "]"'
