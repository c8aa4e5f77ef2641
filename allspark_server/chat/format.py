"""Rank 0's part of a chat: its prompt, and the grammar of an answer that must be, or may be, a tool call."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from allspark_client.chat import ChatOptions
from allspark_client.request import RequestSpec

from ..guided import schema_of
from . import harmony
from .formats import ChatFormat, opened_in
from .lark import json_rule

if TYPE_CHECKING:
    from ..tokenizer.text import Tokenizer

# A template that goes through a message's content takes parts; others want text.
_TAKES_PARTS = re.compile(r"""{%-?\s*for\s+\w+\s+in\s+[^%]*\bcontent\b""")
TAIL_IDS = 64  # of a prompt, that show what it has begun of the answer


def render(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], options: ChatOptions) -> str:
    """The prompt's text. ValueError from the template, or without one."""
    tools = [{**tool, "function": {k: v for k, v in tool["function"].items() if k != "strict"}}
             for tool in options.offered]
    kwargs = dict(options.chat_template_kwargs)
    template = tokenizer.chat_template(bool(tools))
    shown = [_shown(message, bool(_TAKES_PARTS.search(template))) for message in messages]
    if harmony.CHANNEL in template:
        shown, kwargs = harmony.as_templates_take(shown, kwargs)
    return tokenizer.apply_chat_template(shown, tools=tools or None, **kwargs)


def _shown(message: dict[str, Any], takes_parts: bool) -> dict[str, Any]:
    """A message as templates are written for: arguments of calls as objects, and content as text unless the template
    takes parts.
    """
    shown = dict(message)
    if isinstance(shown.get("content"), list) and not takes_parts:
        shown["content"] = "\n".join(part[part["type"]] for part in shown["content"])
    if shown.get("tool_calls"):
        calls = []
        for call in shown["tool_calls"]:
            function = dict(call["function"])
            arguments = function.get("arguments", {})
            function["arguments"] = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
            calls.append({**call, "function": function})
        shown["tool_calls"] = calls
    return shown


def opened(tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
    """What a prompt has begun of the answer."""
    return opened_in(tokenizer.decode(prompt[-TAIL_IDS:], skip_special_tokens=False))


def guided_calls(
    tokenizer: Tokenizer, chat_format: ChatFormat, spec: RequestSpec
) -> dict[str, Any] | None:
    """The response_format of an answer that must be a tool call, or whose calls or text must follow a schema beside
    what else its format has; None: the request asks for neither. ValueError if the format has none.
    """
    options, wanted = spec.chat, spec.config.response_format
    if wanted is not None and wanted["type"] == "text":
        wanted = None
    tools = options.offered and (options.forced or wanted or options.strict)
    if not tools and not (wanted and chat_format.in_messages):
        return None

    def literal(text: str) -> str:
        mark = tokenizer.mark_id(text)
        return json.dumps(text) if mark is None else f"<[{mark}]>"

    tail = tokenizer.decode(spec.input_ids[-TAIL_IDS:], skip_special_tokens=False)
    thinks = any("<think>" in t or "[THINK]" in t for t in tokenizer.chat_templates.values())
    grammar = chat_format.grammar(
        options.offered, options.tool_choice, options.parallel_tool_calls, tail, thinks, literal,
        None if wanted is None or options.forced else _answer_rule(wanted),
    )
    return {"type": "grammar", "grammar": grammar}


def _answer_rule(response_format: dict[str, Any]) -> str:
    """The Lark rule of a response_format."""
    kind = response_format["type"]
    if kind == "regex":
        return "/" + re.sub(r"(\\.)|/", lambda m: m[1] or r"\/", response_format["regex"], flags=re.S) + "/"
    if kind == "choice":
        return " | ".join(map(json.dumps, response_format["choice"]))
    if kind == "grammar":
        raise ValueError("a grammar cannot stand beside tools that may be called or not (tool_choice must be 'none'), "
                         "nor within a message of an answer that consists of messages")
    schema, lenient = schema_of(response_format["json_schema"]) if kind == "json_schema" else ({}, False)
    flexible = not response_format.get("disable_any_whitespace", False)
    return json_rule(schema, {"whitespace_flexible": flexible, "lenient": lenient})
