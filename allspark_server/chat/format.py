"""A chat format renders a request's prompt and constrains its answer by a Lark grammar.

`ChatFormat` is the base of the families' formats, which `formats.py` registers here. Showing an answer needs only
`ChatFormat.parser`, in any process.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from allspark_client.chat import ChatOptions
from allspark_client.images import images_in

from .parser import OutputParser

if TYPE_CHECKING:
    from ..tokenizer.templates import ChatTemplates

Message = dict[str, Any]
#: returns the Lark text for a literal, which may be a special token or hold one of the format's markers
Literal = Callable[[str], str]

#: how forced arguments are written: as json.dumps does, which is what templates show to models
JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
TAIL_IDS = 64  # last ids of a prompt, whose text shows which part of the answer the prompt has begun

_REASONING_SIGNS = ("<think>", "<seed:think>", "[THINK]")
_OPENED_REASONING = re.compile(rf"({'|'.join(map(re.escape, _REASONING_SIGNS))})\s*\Z")
_CLOSED_REASONING = re.compile(r"(</think>|</seed:think>|\[/THINK\])\s*\Z")
# A template that loops over a message's content takes content parts; other templates want text.
_TAKES_PARTS = re.compile(r"""{%-?\s*for\s+\w+\s+in\s+[^%]*\bcontent\b""")
# A template that joins the arguments of calls to texts takes them as text; other templates want objects.
_JOINS_ARGUMENTS = re.compile(r"""\barguments\b['"]?\]?\s*[+~]|[+~]\s*[\w.'"\[\]]*\barguments\b['"]?\]?\s*[}+~]""")


@dataclass(frozen=True)
class ReasoningMarks:
    """How a family marks its reasoning, for who limits it.

    `pairs`: the marks that begin and end it. `newline`: a newline stands before the mark that ends it. `anywhere`: it
    may begin anywhere in an answer, and again; then `last` is the text after which it does not, and `word` what stands
    after the mark `again` where it begins again.
    """

    pairs: tuple[tuple[str, str], ...]
    newline: bool = False
    anywhere: bool = False
    again: str = ""
    word: str = ""
    last: str = ""


class ChatFormat:
    """How the models of one family write tool calls and reasoning. This one, "plain", has no calls.

    Attributes: `trigger`: the text that calls begin with. `bare`: the answer is a call if and only if it begins so.
    `markers`: texts that belong to the output even where they are special tokens. `stops`: special tokens that end an
    answer. `template_signs`: texts that only this format's templates have. `architectures`: prefixes of the model
    architectures that use it. `opened`: matches the end of a prompt that has begun a part of the answer, which is
    group 1. `adapted_templates`: templates with this text need `adapt`.
    """

    name = "plain"
    parser_class: type[OutputParser] = OutputParser
    trigger = ""
    bare = False
    markers: tuple[str, ...] = ("<think>", "</think>")
    stops: tuple[str, ...] = ()
    template_signs: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    opened: re.Pattern[str] | None = None
    adapted_templates = ""

    @property
    def in_messages(self) -> bool:
        """Whether all text of an answer is in messages of its format, even where nothing is called."""
        return self.parser_class.IN_MESSAGES

    def parser(
        self, tools: Iterable[dict[str, Any]] = (), tool_choice: Any = None, opened: str = ""
    ) -> OutputParser:
        """A parser for one answer to a chat with these tools and this tool_choice. `opened`: the part of the answer
        that the prompt has begun (ResultQueue.opened).
        """
        tools = [] if tool_choice == "none" else list(tools)
        return (self.parser_class if tools or self.in_messages else _plain(self.parser_class))(tools, opened)

    def reasoning(self, templates: Iterable[str]) -> ReasoningMarks | None:
        """The marks of the reasoning that a checkpoint's chat templates support; None if they support none."""
        text = "\n".join(templates)
        pairs = tuple(pair for pair in self.parser_class.REASONING if any(mark in text for mark in pair))
        newline = any(newline + end in text for _, end in pairs for newline in ("\n", "\\n"))
        return ReasoningMarks(pairs, newline) if pairs else None

    def reasoning_at(self, prompt: str) -> tuple[str | None, bool]:
        """The mark that ends the reasoning which the end of a rendered prompt has begun, or None, and whether the
        prompt has ended the reasoning.
        """
        if match := _OPENED_REASONING.search(prompt):
            return dict(self.parser_class.REASONING).get(match[1]), False
        return None, bool(_CLOSED_REASONING.search(prompt))

    def recognizes(self, template: str) -> bool:
        """Whether a chat template is of this format."""
        return any(sign in template for sign in self.template_signs)

    def adapt(
        self, messages: list[Message], variables: dict[str, Any]
    ) -> tuple[list[Message], dict[str, Any]]:
        """Messages and template variables, the tools among them, in the form that this family's templates take."""
        return messages, variables

    def call_rules(self, functions: list[dict[str, Any]], parallel: bool, literal: Literal) -> str | None:
        """The Lark rule `calls`, and the rules that it needs; None if the format has no calls. `parallel`: allow
        several calls.
        """
        return None

    def answer_format(
        self, options: ChatOptions, response_format: dict[str, Any] | None, prompt: str,
        templates: Iterable[str], marks: dict[str, int],
    ) -> dict[str, Any] | None:
        """The response_format of an answer that must be a tool call, or whose calls or text must follow a schema beside
        other parts: calls, messages, or reasoning that the prompt has begun.

        None if the request asks for none of these. `prompt`: the end of the prompt's text. `templates`: the
        checkpoint's chat templates. `marks`: ids of special tokens by text. ValueError if the format has no such
        grammar.
        """
        if response_format is not None and response_format["type"] == "text":
            response_format = None
        # A format without a grammar of calls has none that would have to be one alone.
        alone = not options.parallel_tool_calls and bool(self.trigger or self.in_messages)
        constrains_calls = options.offered and (options.forced or response_format or options.strict or alone)
        # A format alone would forbid the end of reasoning that the prompt has begun.
        has_parts = self.in_messages or _OPENED_REASONING.search(prompt)
        if not constrains_calls and not (response_format and has_parts):
            return None

        tokens = [mark for mark in self.markers if mark in marks]
        inner = re.compile(f"({'|'.join(map(re.escape, tokens))})" if tokens else r"(?!)")

        def literal(text: str) -> str:
            parts = [text] if text in marks else inner.split(text)
            return " ".join(f"<[{marks[part]}]>" if part in marks else json.dumps(part) for part in parts if part)

        reasons = any(sign in template for template in templates for sign in _REASONING_SIGNS)
        answer = None if response_format is None or options.forced else _answer_rule(response_format)
        grammar = self.grammar(options.offered, options.tool_choice, options.parallel_tool_calls, prompt, reasons,
                               literal, answer)
        return {"type": "grammar", "grammar": grammar}

    def grammar(
        self, tools: list[dict[str, Any]], tool_choice: Any, parallel: bool, prompt: str, reasons: bool,
        literal: Literal, answer: str | None = None,
    ) -> str:
        """A Lark grammar of the answers to a rendered prompt.

        With tool_choice "required" or a named function the answer must call a tool. Otherwise it allows all answers
        whose calls follow their functions' schemas, or that match the Lark rule `answer`. `reasons`: the template
        supports reasoning. ValueError if the format has no such answer.
        """
        named = isinstance(tool_choice, dict)
        forced = named or tool_choice == "required"
        functions = [tool["function"] for tool in tools
                     if not named or tool["function"]["name"] == tool_choice["function"]["name"]]
        if not forced:  # arguments follow the schema only of functions that ask for it
            functions = [f if f.get("strict") else {**f, "parameters": None} for f in functions]
        return self.answer_grammar(functions, forced, parallel and not named, prompt, reasons, literal, answer)

    def answer_grammar(
        self, functions: list[dict[str, Any]], forced: bool, parallel: bool, prompt: str, reasons: bool,
        literal: Literal, answer: str | None,
    ) -> str:
        """See `grammar`. `functions`: those that may be called."""
        body, rules = "calls", []
        if functions:
            call_rules = self.call_rules(functions, parallel, literal)
            if call_rules is None:
                raise ValueError(f"the chat format {self.name!r} has no tool calls that could be guided: tool_choice "
                                 "may be 'none', or 'auto' where no tool is strict and no response_format given")
            if answer and self.trigger == "{" and "%json" in answer:
                raise ValueError(f"JSON is a call in the chat format {self.name!r}: a JSON answer cannot be combined "
                                 "with optional tool calls; tool_choice must be 'none'")
            rules.append(call_rules)
            if not self.bare:
                free = not forced and answer is None
                rules.append(after_text("begin", self.trigger, literal) if free else f"begin: {self.lead(literal)}")
        if not forced:
            body = "(calls | answer)" if functions else "answer"
            rules.append(f"answer: {answer}" if answer else f"answer: TEXT\nTEXT: {self._text(literal)}")
        start = body
        begin, end = self.parser_class.REASONING[-1]
        if match := _OPENED_REASONING.search(prompt):
            end = dict(self.parser_class.REASONING).get(match[1], end)
            start = f"reasoning {body}"
        elif reasons and not _CLOSED_REASONING.search(prompt):
            start = f"({literal(begin)} reasoning)? {body}"
        if "reasoning" in start:
            rules.append("reasoning: thought /\\s{0,4}/\n" + after_text("thought", end, literal))
        return "\n".join([f"start: {start}", *rules])

    def lead(self, literal: Literal) -> str:
        """The Lark text of what calls begin with where no text stands before them."""
        return literal(self.trigger)

    def _text(self, literal: Literal) -> str:
        """The Lark text for an answer without calls."""
        if self.bare:
            return rf"/(\s*[^{re.escape(self.trigger)}\s](?s:.*))?/"
        return text_without(self.trigger, literal)


class JsonCallFormat(ChatFormat):
    """A format whose calls are JSON objects {"name": ..., KEY: {...}}. Its grammar is data, in Lark.

    `opening` and `closing` stand around all calls, `separator` between them; `item` is one call, by default the object,
    or a rule that `call_rule` defines. "{trigger}" and "{end_mark}" stand for the literals of these attributes.
    """

    arguments_key = "arguments"
    opening, item, separator, closing = "", "object", "", ""
    call_rule, end_mark = "", ""

    def call_rules(self, functions: list[dict[str, Any]], parallel: bool, literal: Literal) -> str:
        """See ChatFormat."""
        separator = self.separator.format(trigger=literal(self.trigger)) if parallel else ""
        several = f" ({separator} {self.item})*" if parallel else ""
        closing = self.closing.format(end_mark=literal(self.end_mark))
        lines = [f"calls: {self.opening}{self.item}{several}{closing}"]
        if self.call_rule:
            lines.append(self.call_rule.format(end_mark=literal(self.end_mark)))
        lines.append("object: " + " | ".join(f"object_{i}" for i in range(len(functions))))
        for i, function in enumerate(functions):
            head = json.dumps(json.dumps({"name": function["name"]})[:-1] + f', "{self.arguments_key}": ')
            lines.append(f'object_{i}: {head} arguments_{i} "}}"')
            lines.append(f"arguments_{i}: {json_rule(function.get('parameters'))}")
        return "\n".join(lines)


#: all formats by name
FORMATS: dict[str, ChatFormat] = {}


def chat_format(name: str) -> ChatFormat:
    """The format of this name; ValueError with the known ones."""
    if name not in FORMATS:
        raise ValueError(f"chat_format={name!r} is not known; allowed: {', '.join(FORMATS)}")
    return FORMATS[name]


def _plain(parser: type[OutputParser]) -> type[OutputParser]:
    """The parser of a format's answers where there are no tools."""
    return type("PlainParser", (OutputParser,), {name: getattr(parser, name)
                                                 for name in ("REASONING", "DROPPED", "AROUND")})


# ---- prompts ----------------------------------------------------------------------------------------------


def render(templates: ChatTemplates, messages: Sequence[Message], options: ChatOptions) -> str:
    """The prompt's text. ValueError from the template, or if there is none."""
    tools = [{**tool, "function": {k: v for k, v in tool["function"].items() if k != "strict"}}
             for tool in options.offered]
    if options.chat_template:
        templates = templates.replaced_by(options.chat_template)
    variables = {**options.chat_template_kwargs, "tools": tools or None}
    if "enable_thinking" in variables:
        variables.setdefault("thinking", variables["enable_thinking"])  # DeepSeek's and Kimi's name
    source = templates.source(bool(tools))
    takes_parts, joins = _traits(source)
    shown = [_shown(message, takes_parts, joins) for message in messages]
    for known in FORMATS.values():
        if known.adapted_templates and known.adapted_templates in source:
            shown, variables = known.adapt(shown, variables)
    if not options.continue_final_message:
        return templates.render(shown, **variables)
    final = shown[-1].get("content")
    if shown[-1]["role"] != "assistant" or not isinstance(final, str) or not final.strip():
        raise ValueError("continue_final_message needs a last message of the assistant with text")
    text = templates.render(shown, **{**variables, "add_generation_prompt": False})
    at = text.rfind(final.strip())
    if at < 0:
        raise ValueError("continue_final_message: the chat template does not write the last message as it is")
    whole = at + len(final.lstrip())     # with the blanks at its end, unless the template removes them
    return text[:whole] if text[at:whole] == final.lstrip() else text[:at + len(final.strip())]


def render_pair(templates: ChatTemplates, query: str, document: str, instruction: str = "") -> str | None:
    """The prompt of a reranker that generates: its template has messages with the roles query and document, and the
    instruction as a system message. None if it has no such template.
    """
    source = templates.sources.get("default", "")
    if not all(f"'{role}'" in source or f'"{role}"' in source for role in ("query", "document")):
        return None
    in_parts = _traits(source)[0] or "content[0]" in source
    roles = [("system", instruction)] * bool(instruction) + [("query", query), ("document", document)]
    return templates.render([{"role": role, "content": [{"type": "text", "text": text}] if in_parts else text}
                             for role, text in roles])


@functools.lru_cache(maxsize=64)
def _traits(source: str) -> tuple[bool, bool]:
    """Whether a template takes content in parts, and whether it joins arguments of calls to texts. Searching a long one
    takes 0.3 ms, so each is searched once.
    """
    return bool(_TAKES_PARTS.search(source)), bool(_JOINS_ARGUMENTS.search(source))


def _shown(message: Message, takes_parts: bool, joins_arguments: bool) -> Message:
    """A message as templates expect it: arguments of calls as objects unless the template joins them to texts, and
    content as text unless the template takes parts.
    """
    shown = dict(message)
    if isinstance(shown.get("content"), list) and not takes_parts:
        if images_in(shown):
            raise ValueError(f"messages: the chat template takes no images in a message of the role {shown['role']!r}")
        shown["content"] = "\n".join(part[part["type"]] for part in shown["content"])
    if shown.get("tool_calls"):
        calls = []
        for call in shown["tool_calls"]:
            function = dict(call["function"])
            arguments = function.get("arguments", {})
            value = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
            function["arguments"] = json.dumps(value, ensure_ascii=False) if joins_arguments else value
            calls.append({**call, "function": function})
        shown["tool_calls"] = calls
    return shown


def opened_in(prompt: str) -> str:
    """The part of the answer that the end of a rendered prompt has begun: reasoning, a message's header, or ""."""
    if match := _OPENED_REASONING.search(prompt):
        return match[0]
    patterns = (known.opened for known in FORMATS.values() if known.opened is not None)
    return next((match[1] for pattern in patterns if (match := pattern.search(prompt))), "")


# ---- Lark -------------------------------------------------------------------------------------------------


def _answer_rule(response_format: dict[str, Any]) -> str:
    """The Lark rule of a response_format."""
    kind = response_format["type"]
    if kind == "regex":
        return f"/{slashes_escaped(response_format['regex'])}/"
    if kind == "choice":
        return " | ".join(map(json.dumps, response_format["choice"]))
    if kind == "grammar":
        if response_format.get("syntax", "lark") != "lark":
            raise ValueError("a grammar of syntax 'ebnf' must be the whole answer: with optional tool calls, after "
                             "reasoning that the prompt begins, or within a message, use syntax 'lark'")
        return "%lark {\n" + response_format["grammar"] + "\n}"
    schema: Any = {}
    lenient = False
    if kind == "json_schema":
        from ..guided import schema_of  # which imports llguidance: parsing answers does not need it

        schema, lenient = schema_of(response_format["json_schema"])
    flexible = not response_format.get("disable_any_whitespace", False)
    return json_rule(schema, {"whitespace_flexible": flexible, "lenient": lenient})


def _up_to_token(mark: str, literal: Literal) -> tuple[str, str]:
    """The text of a mark before its first special token, which cannot be a part of a lexeme, and the Lark text of the
    rest; "" if it has none.
    """
    written = literal(mark)
    if written.startswith("<"):
        return "", written
    text, end = json.JSONDecoder().raw_decode(written)
    return text, written[end:]


def after_text(name: str, mark: str, literal: Literal, count: str = "*") -> str:
    """The Lark rule of this name: any text up to and with a mark. `count`: of its characters, as in a regular
    expression.
    """
    text, rest = _up_to_token(mark, literal)
    if rest:
        return f"{name}: {name.upper()} {rest}\n{name.upper()}: /(?s:.{count}){escaped(text)}/"
    return f"{name}[lazy]: /(?s:.{count}){escaped(mark)}/"


def text_without(mark: str, literal: Literal) -> str:
    """The Lark text for any text that does not contain the mark."""
    if _up_to_token(mark, literal)[1]:
        return "/(?s:.*)/"
    return f"/(?s:.*)/ & ~/(?s:.*){escaped(mark)}(?s:.*)/"


def slashes_escaped(regex: str) -> str:
    """A regular expression as Lark has it between slashes."""
    return re.sub(r"(\\.)|/", lambda m: m[1] or r"\/", regex, flags=re.S)


def escaped(text: str) -> str:
    """The text as a part of a regular expression in Lark."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


def json_rule(schema: Any, options: dict[str, Any] = JSON) -> str:
    """The Lark rule of a JSON schema."""
    schema = schema if isinstance(schema, dict) and schema else {"type": "object"}
    return "%json " + json.dumps({**schema, "x-guidance": options})
