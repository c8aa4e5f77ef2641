"""Formats whose calls are XML: a function with its name, and an element for each argument (Qwen3-Coder, Seed-OSS,
MiniMax-M2).
"""

from __future__ import annotations

import json

from .format import Literal
from .parser import Steps
from .tagged import TaggedFormat, TaggedParser


class XmlParser(TaggedParser):
    """Parses answers of Qwen3-Coder. Subclasses have other marks.

    `block`: the marks around calls. `function`, `parameter`: what stands before a name, and after the element. `close`:
    what ends a name.
    """

    block = ("<tool_call>", "</tool_call>")
    function, parameter, close = ("<function=", "</function>"), ("<parameter=", "</parameter>"), ">"
    padded = True

    def _run(self) -> Steps:
        begin, end = self.block
        while (yield from self._scan((begin,), self._content)):
            text, marker = yield from self._collect((self.function[0], end))
            if marker != self.function[0]:
                self._content(f"{begin}{text}{marker or ''}")
                continue
            text = f"{begin}{text}{marker}"
            while marker == self.function[0]:
                name, marker = yield from self._collect((self.close,))
                if marker is None:
                    self._content(text + name)
                    break
                marker = yield from self._function(name.strip())
                text = self.function[0]

    def _function(self, name: str) -> Steps:
        """Parses a call; returns the mark that begins the next one in the block, or that ends the block."""
        ends = (self.parameter[0], self.function[1], self.block[1])
        arguments, opening = self._begin(name), "{"
        marker = yield from self._scan(ends, lambda text: None)
        while marker == self.parameter[0]:
            head, marker = yield from self._collect((self.close,))
            if marker is None:
                return None
            key, text = self._head(head)
            arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
            opening = ", "
            yield from self._argument(arguments, name, key, self.parameter[1], text)
            marker = yield from self._scan(ends, lambda text: None)
        if marker is not None:
            arguments("{}" if opening == "{" else "}")
        if marker == self.function[1]:
            marker = yield from self._scan((self.function[0], self.block[1]), lambda text: None)
        return marker

    def _head(self, head: str) -> tuple[str, bool | None]:
        """The key of an argument whose mark begins with `head`, and whether its value is text; None: see the schema."""
        return head, None


class SeedParser(XmlParser):
    """Parses answers of Seed-OSS."""

    REASONING = (("<seed:think>", "</seed:think>"),)
    block, padded = ("<seed:tool_call>", "</seed:tool_call>"), False


class MiniMaxParser(XmlParser):
    """Parses answers of MiniMax-M2."""

    block, padded = ("<minimax:tool_call>", "</minimax:tool_call>"), False
    function, parameter, close = ('<invoke name="', "</invoke>"), ('<parameter name="', "</parameter>"), '">'


class XmlFormat(TaggedFormat):
    """Qwen3-Coder: a block for each call."""

    name = "qwen3_coder"
    parser_class: type[XmlParser] = XmlParser
    trigger = "<tool_call>"
    markers: tuple[str, ...] = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    template_signs = ("<function=",)
    key, value_end, pad = '[^<>"]+', "</parameter>", "\n"

    def block_rules(self, parallel: bool, literal: Literal) -> str:
        """See TaggedFormat."""
        begin, end = map(literal, self.parser_class.block)
        return rf'calls: begin "\n" call {end}' + (rf' ("\n" {begin} "\n" call {end})*' if parallel else "")

    def call(self, name: str, arguments: str, literal: Literal) -> str:
        """See TaggedFormat."""
        (begin, end), close = self.parser_class.function, self.parser_class.close
        opening, closing = literal(f"{begin}{name}{close}\n"), literal(f"{end}\n")
        return f"{opening} {arguments} {closing}"

    def argument(self, key: str, text: bool | None, literal: Literal) -> str:
        """See TaggedFormat."""
        return f"{literal(self.parser_class.parameter[0])} {key} {json.dumps(self.parser_class.close)}"


class SeedFormat(XmlFormat):
    """Seed-OSS: values without newlines around them."""

    name = "seed_oss"
    parser_class = SeedParser
    trigger = "<seed:tool_call>"
    markers = ("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>")
    template_signs = ("<seed:tool_call>",)
    architectures = ("seed_oss", "seedoss")
    pad = ""


class MiniMaxFormat(XmlFormat):
    """MiniMax-M2: one block for all calls."""

    name = "minimax_m2"
    parser_class = MiniMaxParser
    trigger = "<minimax:tool_call>"
    markers = ("<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>")
    template_signs = ("<minimax:tool_call>",)
    architectures = ("minimax_m2", "minimaxm2")
    pad = ""

    def block_rules(self, parallel: bool, literal: Literal) -> str:
        """See TaggedFormat."""
        return rf'calls: begin "\n" call{"+" if parallel else ""} {literal(self.parser_class.block[1])}'
