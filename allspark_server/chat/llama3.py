"""Llama 3: `{"name": ..., "parameters": {...}}` as the whole answer, or after `<|python_tag|>`."""

from __future__ import annotations

from .format import JsonCallFormat
from .parser import OutputParser, Steps


class LlamaParser(OutputParser):
    """Semicolons separate several calls. JSON that names no known function is content."""

    def _run(self) -> Steps:
        while (c := (yield from self._peek_content())) == "{":
            if not (yield from self._call(known=True)):
                break
            while (yield from self._peek()) == ";":
                self._consume(1)
        if c == "{":
            return
        while (yield from self._scan(("<|python_tag|>",), self._content)):
            while (yield from self._peek()) == "{":
                if not (yield from self._call()):
                    return
                while (yield from self._peek()) == ";":
                    self._consume(1)


class LlamaFormat(JsonCallFormat):
    """An answer is a call if and only if it begins with "{"."""

    name = "llama3"
    parser_class = LlamaParser
    trigger, bare = "{", True
    markers = ("<|python_tag|>", "<think>", "</think>")
    template_signs = ("<|python_tag|>", '"parameters": ')
    arguments_key = "parameters"
    separator = '"; "'
