"""The parsers of the families' formats."""

from __future__ import annotations

import json
import secrets
import string

from .parser import THINK, OutputParser, Steps


class HermesParser(OutputParser):
    """Hermes, Qwen2.5, Qwen3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them."""

    def _run(self) -> Steps:
        while (yield from self._scan(("<tool_call>",), self._content)):
            if (yield from self._call(before="<tool_call>")):
                yield from self._scan(("</tool_call>",), lambda text: None)


class LlamaParser(OutputParser):
    """Llama 3: {"name": ..., "parameters": {...}}, after <|python_tag|> or as the whole answer; several are separated
    by semicolons. JSON that names no function is content.
    """

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

    def _peek_content(self) -> Steps:
        """The next character that is no white space, which stays."""
        while not self._ended and not self._text.strip():
            yield
        return self._text.lstrip()[:1]


class MistralParser(OutputParser):
    """Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]; newer models: [TOOL_CALLS]name[ARGS]{...}."""

    REASONING = (*THINK, ("[THINK]", "[/THINK]"))
    ALPHABET = string.ascii_letters + string.digits

    def _run(self) -> Steps:
        while (yield from self._scan(("[TOOL_CALLS]",), self._content)):
            c = yield from self._peek()
            if c == "[":
                self._consume(1)
                while (c := (yield from self._peek())) in ("{", ","):
                    if c == ",":
                        self._consume(1)
                    elif not (yield from self._call()):
                        return
                if c == "]":
                    self._consume(1)
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
        return "".join(secrets.choice(cls.ALPHABET) for _ in range(9))  # templates insist on this form


class GlmParser(OutputParser):
    """GLM-4.5: <tool_call>name, then <arg_key>key</arg_key><arg_value>value</arg_value> for each argument, and
    </tool_call>. A value is text if the function's schema says so, otherwise JSON.
    """

    def _run(self) -> Steps:
        while (yield from self._scan(("<tool_call>",), self._content)):
            name, marker = yield from self._collect(("\n", "<arg_key>", "</tool_call>"))
            while marker == "\n" and not name.strip():
                name, marker = yield from self._collect(("\n", "<arg_key>", "</tool_call>"))
            name = name.strip()
            if not name or marker is None:
                self._content(f"<tool_call>{name}{marker or ''}")
                continue
            arguments = self._begin(name)
            properties = self.functions.get(name, {}).get("properties")
            if marker == "\n":
                marker = yield from self._next()
            opening = "{"
            while marker == "<arg_key>":
                key, _ = yield from self._collect(("</arg_key>",))
                schema = properties.get(key) if isinstance(properties, dict) else None
                is_text = isinstance(schema, dict) and schema.get("type") == "string"
                if (yield from self._scan(("<arg_value>", "</tool_call>"), lambda text: None)) != "<arg_value>":
                    break
                arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
                opening = ", "
                if is_text:
                    arguments('"')
                    if (yield from self._scan(("</arg_value>",), lambda text: arguments(_escaped(text)))):
                        arguments('"')
                else:
                    value, _ = yield from self._collect(("</arg_value>",))
                    arguments(_json_or_text(value))
                marker = yield from self._next()
            if marker is not None:
                arguments("{}" if opening == "{" else "}")

    def _next(self) -> Steps:
        return (yield from self._scan(("<arg_key>", "</tool_call>"), lambda text: None))


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_or_text(value: str) -> str:
    try:
        return json.dumps(json.loads(value), ensure_ascii=False)
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)
