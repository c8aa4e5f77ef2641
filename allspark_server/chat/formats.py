"""The formats by name, which of them a checkpoint has, and their grammars for forced calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from . import harmony
from .families import GlmParser, HermesParser, LlamaParser, MistralParser
from .lark import Literal, after_text, json_rule, text_without
from .parser import OutputParser

_THINKS = re.compile(r"(<think>|\[THINK\])\s*\Z")
_HAS_THOUGHT = re.compile(r"(</think>|\[/THINK\])\s*\Z")


@dataclass(frozen=True)
class ChatFormat:
    """How a family's answers hold tool calls and reasoning."""

    name: str
    _parser: type[OutputParser]
    #: the Lark rules `calls` (one or several calls) of functions that rules `name_I` and `arguments_I` describe
    _calls: Callable[[list[dict[str, Any]], bool, Literal], str] | None
    #: what calls begin with; "{": the answer is a call if it begins so, and none otherwise
    _trigger: str = ""
    #: texts that matter here even where they are special tokens
    markers: tuple[str, ...] = ()
    #: special tokens that end an answer
    stops: tuple[str, ...] = ()

    @property
    def in_messages(self) -> bool:
        """Whether all text of an answer is in messages of its format, even where nothing is called."""
        return self._parser.IN_MESSAGES

    def parser(
        self, tools: Iterable[dict[str, Any]] = (), tool_choice: Any = None, opened: str = ""
    ) -> OutputParser:
        """For one answer to a chat of these tools and tool_choice. opened: what the prompt has begun of the answer
        (ResultQueue.opened).
        """
        tools = [] if tool_choice == "none" else list(tools)
        return (self._parser if tools or self.in_messages else _plain(self._parser))(tools, opened)

    def grammar(
        self, tools: list[dict[str, Any]], tool_choice: Any, parallel: bool, prompt: str, thinks: bool,
        literal: Literal, answer: str | None = None,
    ) -> str:
        """A Lark grammar of answers after a rendered prompt. With tool_choice "required" or a named function: of those
        that call a tool. Otherwise of all answers in which calls are as their functions say, or that are as the Lark
        rule `answer` says. thinks: whether the template knows of reasoning. ValueError: there is no such form.
        """
        if self._calls is None and not self.in_messages:
            raise ValueError(f"the chat format {self.name!r} has no tool calls that could be guided: tool_choice may "
                             "be 'none', or 'auto' where no tool is strict and no response_format given")
        named = isinstance(tool_choice, dict)
        if named:
            tools = [t for t in tools if t["function"]["name"] == tool_choice["function"]["name"]]
        functions = [tool["function"] for tool in tools]
        forced = named or tool_choice == "required"
        if not forced:  # only who asks for it is held to its schema
            functions = [f if f.get("strict") else {**f, "parameters": None} for f in functions]
        if self.in_messages:
            return harmony.grammar(functions, forced, prompt, literal, answer)
        body, rules = "calls", [self._calls(functions, parallel and not named, literal)]
        if self._trigger != "{":
            free = not forced and answer is None
            rules.append(after_text("begin", self._trigger, literal) if free else f"begin: {literal(self._trigger)}")
        if answer and self._trigger == "{" and "%json" in answer:
            raise ValueError(f"JSON is a call in the chat format {self.name!r}: an answer in JSON cannot stand beside "
                             "tools that may be called or not; tool_choice must be 'none'")
        if not forced:
            body = "(calls | answer)"
            rules.append(f"answer: {answer}" if answer else f"answer: TEXT\nTEXT: {self._text(literal)}")
        start = body
        begin, end = self._parser.REASONING[-1]
        if match := _THINKS.search(prompt):
            end = dict(self._parser.REASONING).get(match[1], end)
            start = f"reasoning {body}"
        elif thinks and not _HAS_THOUGHT.search(prompt):
            start = f"({literal(begin)} reasoning)? {body}"
        if "reasoning" in start:
            rules.append("reasoning: thought /\\s{0,4}/\n" + after_text("thought", end, literal))
        return "\n".join([f"start: {start}", *rules])

    def _text(self, literal: Literal) -> str:
        """The Lark text for an answer without calls."""
        if self._trigger == "{":
            return r"/(\s*[^{\s](?s:.*))?/"
        return text_without(self._trigger, literal)


def opened_in(prompt: str) -> str:
    """What the end of a rendered prompt has begun of the answer: reasoning, a message, or nothing."""
    match = _THINKS.search(prompt)
    return match[0] if match else harmony.opened(prompt)


def _plain(parser: type[OutputParser]) -> type[OutputParser]:
    """Of a format's answers where there are no tools."""
    return type("PlainParser", (OutputParser,), {"REASONING": parser.REASONING})


def _objects(functions: list[dict[str, Any]], key: str) -> str:
    """Rules `object` and its parts: {"name": ..., KEY: {...}} for one of the functions."""
    lines = ["object: " + " | ".join(f"object_{i}" for i in range(len(functions)))]
    for i, function in enumerate(functions):
        head = json.dumps(json.dumps({"name": function["name"]})[:-1] + f', "{key}": ')
        lines.append(f'object_{i}: {head} arguments_{i} "}}"')
        lines.append(f"arguments_{i}: {json_rule(function.get('parameters'))}")
    return "\n".join(lines)


def _hermes(functions: list[dict[str, Any]], parallel: bool, literal: Literal) -> str:
    several = rf' ("\n" {literal("<tool_call>")} call)*' if parallel else ""
    call = rf'"\n" object "\n" {literal("</tool_call>")}'
    return f"calls: begin call{several}\ncall: {call}\n{_objects(functions, 'arguments')}"


def _llama(functions: list[dict[str, Any]], parallel: bool, literal: Literal) -> str:
    several = ' ("; " object)*' if parallel else ""
    return f"calls: object{several}\n{_objects(functions, 'parameters')}"


def _mistral(functions: list[dict[str, Any]], parallel: bool, literal: Literal) -> str:
    several = ' (", " object)*' if parallel else ""
    return f'calls: begin "[" object{several} "]"\n{_objects(functions, "arguments")}'


def _glm(functions: list[dict[str, Any]], parallel: bool, literal: Literal) -> str:
    several = rf' ("\n" {literal("<tool_call>")} call)*' if parallel else ""
    lines = [f"calls: begin call{several}",
             f'call: ({" | ".join(f"call_{i}" for i in range(len(functions)))}) '
             f'{literal("</tool_call>")}']
    for i, function in enumerate(functions):
        schema = function.get("parameters")
        if schema is None:
            lines.append(f"call_{i}: {json.dumps(function['name'] + chr(10))} pair*")
            continue
        parts = [json.dumps(function["name"] + "\n")]
        for j, (key, value) in enumerate((schema.get("properties") or {}).items()):
            part = (rf'{literal("<arg_key>")} {json.dumps(key)} {literal("</arg_key>")} "\n" '
                    rf'{literal("<arg_value>")} value_{i}_{j} {literal("</arg_value>")} "\n"')
            parts.append(part if key in schema.get("required", ()) else f"({part})?")
            lines.append(f"value_{i}_{j}: {_glm_value(value, schema)}")
        lines.append(f"call_{i}: " + " ".join(parts))
    if any(function.get("parameters") is None for function in functions):
        key = rf'{literal("<arg_key>")} /[^<]+/ {literal("</arg_key>")}'
        lines += [rf'pair: {key} "\n" {literal("<arg_value>")} value "\n"',
                  after_text("value", "</arg_value>", literal)]
    return "\n".join(lines)


def _glm_value(value: Any, schema: dict[str, Any]) -> str:
    """A value: text as it is, without markup; otherwise JSON."""
    if isinstance(value, dict) and value.get("type") == "string":
        if "enum" in value or "const" in value:
            return " | ".join(map(json.dumps, value.get("enum", [value.get("const")])))
        most = value.get("maxLength", "")
        return f"/[^<]{{{value.get('minLength', 0)},{most}}}/"
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return json_rule({**value, **definitions} if isinstance(value, dict) else value)


FORMATS: dict[str, ChatFormat] = {
    f.name: f
    for f in (
        ChatFormat("hermes", HermesParser, _hermes, "<tool_call>",
                   ("<tool_call>", "</tool_call>", "<think>", "</think>")),
        ChatFormat("llama3", LlamaParser, _llama, "{", ("<|python_tag|>", "<think>", "</think>")),
        ChatFormat("mistral", MistralParser, _mistral, "[TOOL_CALLS]",
                   ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "<think>", "</think>")),
        ChatFormat("glm45", GlmParser, _glm, "<tool_call>",
                   ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
                    "<think>", "</think>")),
        ChatFormat("harmony", harmony.HarmonyParser, None, "", harmony.MARKERS, harmony.STOPS),
        ChatFormat("plain", OutputParser, None, "", ("<think>", "</think>")),
    )
}

#: of templates, in order: what only this format's have
_SIGNS = ((harmony.CHANNEL, "harmony"), ("<arg_key>", "glm45"), ("[TOOL_CALLS]", "mistral"), ("<tool_call>", "hermes"),
          ("<|python_tag|>", "llama3"), ('"parameters": ', "llama3"))
_ARCHITECTURES = {"mistral": "mistral", "mixtral": "mistral", "glm4_moe": "glm45", "gptoss": "harmony"}


def chat_format(name: str) -> ChatFormat:
    """The format of this name; ValueError with the known ones."""
    if name not in FORMATS:
        raise ValueError(f"chat_format={name!r} is not known; allowed: {', '.join(FORMATS)}")
    return FORMATS[name]


def chat_format_of(templates: Mapping[str, str], architecture: str) -> str:
    """The name of the format that a checkpoint's templates speak; otherwise its family's."""
    for sign, name in _SIGNS:
        if any(sign in template for template in templates.values()):
            return name
    found = (name for prefix, name in _ARCHITECTURES.items() if architecture.lower().startswith(prefix))
    return next(found, "hermes")
