"""DeepSeek-V3.2 and V4: calls in XML whose marks have the token DSML in them. Each argument says whether it is text.

The form is that of `encoding/encoding_dsv32.py` and `encoding/encoding_dsv4.py` in their checkpoints, which have no
chat template; `tokenizer/deepseek_v32.py` and `tokenizer/deepseek_v4.py` render their prompts.
"""
# ruff: noqa: RUF001
from __future__ import annotations

import json
import re

from .format import Literal
from .xml_calls import XmlFormat, XmlParser

_DSML = "｜DSML｜"
_HEAD = re.compile(r'(.*)" string="(true|false)', re.S)


class DsmlParser(XmlParser):
    """Parses answers of DeepSeek-V3.2."""

    block, padded = (f"<{_DSML}function_calls>", f"</{_DSML}function_calls>"), False
    function, close = (f'<{_DSML}invoke name="', f"</{_DSML}invoke>"), '">'
    parameter = (f'<{_DSML}parameter name="', f"</{_DSML}parameter>")

    def _head(self, head: str) -> tuple[str, bool | None]:
        match = _HEAD.fullmatch(head)
        return (match[1], match[2] == "true") if match else (head, None)


class Dsml4Parser(DsmlParser):
    """Parses answers of DeepSeek-V4, whose blocks have another name."""

    block = (f"<{_DSML}tool_calls>", f"</{_DSML}tool_calls>")


class DsmlFormat(XmlFormat):
    """One block for all calls, after a blank line."""

    name = "deepseek_v32"
    parser_class: type[DsmlParser] = DsmlParser
    trigger = DsmlParser.block[0]
    markers = (_DSML, "<think>", "</think>")
    architectures = ("deepseekv32", "deepseek_v32")
    key, value_end, pad = '[^<>"]+', DsmlParser.parameter[1], ""

    def recognizes(self, template: str) -> bool:
        """See ChatFormat."""
        return _DSML in template and self.trigger.removeprefix(f"<{_DSML}") in template

    def lead(self, literal: Literal) -> str:
        """See ChatFormat."""
        return rf'"\n\n"? {literal(self.trigger)}'

    def block_rules(self, parallel: bool, literal: Literal) -> str:
        """See TaggedFormat."""
        return rf'calls: begin "\n" call{"+" if parallel else ""} {literal(self.parser_class.block[1])}'

    def call(self, name: str, arguments: str, literal: Literal) -> str:
        """See TaggedFormat. Without arguments an empty line stands in their place."""
        (begin, end), close = self.parser_class.function, self.parser_class.close
        return f'{literal(f"{begin}{name}{close}{chr(10)}")} {arguments} "\\n"? {literal(f"{end}{chr(10)}")}'

    def argument(self, key: str, text: bool | None, literal: Literal) -> str:
        """See TaggedFormat."""
        kind = '("true" | "false")' if text is None else json.dumps("true" if text else "false")
        return rf'{literal(self.parser_class.parameter[0])} {key} "\" string=\"" {kind} "\">"'


class Dsml4Format(DsmlFormat):
    """DeepSeek-V4."""

    name = "deepseek_v4"
    parser_class = Dsml4Parser
    trigger = Dsml4Parser.block[0]
    architectures = ("deepseekv4", "deepseek_v4")
