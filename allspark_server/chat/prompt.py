"""Rank 0's part of a chat: its prompt, and the grammar of an answer that must be a tool call."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Sequence

from allspark_client.chat import ChatOptions

from .formats import ChatFormat, opened_in

if TYPE_CHECKING:
    from ..text import Tokenizer

# A template that goes through a message's content takes parts; others want text.
_TAKES_PARTS = re.compile(r"""{%-?\s*for\s+\w+\s+in\s+[^%]*\bcontent\b""")
TAIL_IDS = 16  # of a prompt, that show what it has begun of the answer


def render(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], options: ChatOptions) -> str:
    """The prompt's text. ValueError from the template, or without one."""
    tools = options.offered
    kwargs = dict(options.chat_template_kwargs)
    template = tokenizer.chat_template(bool(tools))
    shown = [_shown(message, bool(_TAKES_PARTS.search(template))) for message in messages]
    return tokenizer.apply_chat_template(shown, tools=tools or None, **kwargs)


def _shown(message: dict[str, Any], takes_parts: bool) -> dict[str, Any]:
    """A message as templates are written for: arguments of calls as objects, and content as text unless the template
    takes parts."""
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


def forced_calls(
    tokenizer: Tokenizer, chat_format: ChatFormat, options: ChatOptions, prompt: Sequence[int]
) -> dict[str, Any]:
    """The response_format of an answer that must be a tool call. ValueError if the format has none."""

    def literal(text: str) -> str:
        mark = tokenizer.mark_id(text)
        return json.dumps(text) if mark is None else f"<[{mark}]>"

    tail = tokenizer.decode(prompt[-TAIL_IDS:], skip_special_tokens=False)
    thinks = any("<think>" in t or "[THINK]" in t for t in tokenizer.chat_templates.values())
    grammar = chat_format.grammar(
        options.tools, options.tool_choice, options.parallel_tool_calls, tail, thinks, literal
    )
    return {"type": "grammar", "grammar": grammar}
