"""Chats in OpenAI's form: checks of messages, content parts, tools and tool calls."""
from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from .fields import valid_unicode, wrong_type

MAX_TOOLS = 1024
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_CHOICES = ("auto", "none", "required")


@dataclass
class ChatOptions:
    """How a chat is rendered, and what its answer may contain."""

    #: OpenAI's form: [{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}, ...]
    tools: list[dict[str, Any]] = field(default_factory=list)
    #: "auto" (as None), "none", "required", or {"type": "function", "function": {"name": ...}}
    tool_choice: str | dict[str, Any] | None = None
    #: whether an answer may have several tool calls
    parallel_tool_calls: bool = True
    #: variables for the checkpoint's template, such as {"enable_thinking": False}
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    #: a format of allspark_server.chat; empty: the model's (ModelInfo.chat_format)
    chat_format: str = ""
    #: whether the answer continues the last message, which is the assistant's
    continue_final_message: bool = False
    #: a Jinja template in place of the model's, if the model takes templates of requests; empty: the model's
    chat_template: str = ""

    @property
    def forced(self) -> bool:
        """Whether the answer must be a tool call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, dict)

    @property
    def strict(self) -> bool:
        """Whether a tool is strict: calls of it must follow its schema, even if calls are optional."""
        return any(tool["function"].get("strict") for tool in self.offered)

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the template shows to the model."""
        return [] if self.tool_choice == "none" else self.tools

    def check(self) -> ChatOptions:
        """Returns self, or raises ValueError or TypeError naming the wrong field."""
        _check_tools(self.tools)
        _check_choice(self.tool_choice, [tool["function"]["name"] for tool in self.tools])
        for name in ("parallel_tool_calls", "continue_final_message"):
            if not isinstance(getattr(self, name), bool):
                raise wrong_type(name, getattr(self, name), "a bool")
        for name in ("chat_format", "chat_template"):
            if not isinstance(getattr(self, name), str):
                raise wrong_type(name, getattr(self, name), "a str")
        kwargs = self.chat_template_kwargs
        if not isinstance(kwargs, dict) or not all(isinstance(key, str) for key in kwargs):
            raise wrong_type("chat_template_kwargs", kwargs, "a dict with str for keys")
        for name in ("messages", "tools"):
            if name in kwargs:
                raise ValueError(f"chat_template_kwargs must not hold {name!r}: it is a field of its own")
        _plain_json("chat_template_kwargs", kwargs)
        if self.continue_final_message and kwargs.get("add_generation_prompt"):
            raise ValueError("continue_final_message goes on with the last message: add_generation_prompt must not be "
                             "true")
        return self


def _check_tools(tools: Any) -> None:
    if not isinstance(tools, (list, tuple)):
        raise wrong_type("tools", tools, "a list of {'type': 'function', 'function': {...}}")
    if len(tools) > MAX_TOOLS:
        raise ValueError(f"tools has {len(tools)} entries; allowed: at most {MAX_TOOLS}")
    seen = set()
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise wrong_type(f"tools[{i}]", tool, "a dict such as {'type': 'function', 'function': {...}}")
        if tool.get("type") != "function":
            raise ValueError(f"tools[{i}].type={tool.get('type')!r} is not known; allowed: 'function'")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise wrong_type(f"tools[{i}].function", function, "a dict with name and parameters")
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"tools[{i}].function.name={name!r} is not a valid name; allowed: 1 to 128 of letters, "
                             "digits and any of _ . : -")
        if name in seen:
            raise ValueError(f"tools[{i}].function.name={name!r} is also the name of another tool")
        seen.add(name)
        if not isinstance(function.get("strict", False), (bool, type(None))):
            raise wrong_type(f"tools[{i}].function.strict", function["strict"], "a bool")
        if not isinstance(function.get("parameters", {}), (dict, type(None))):
            raise wrong_type(f"tools[{i}].function.parameters", function["parameters"], "a JSON schema: a dict")
    _plain_json("tools", tools)


def _check_choice(choice: Any, names: list[str]) -> None:
    if choice is None or (choice in ("auto", "none") and isinstance(choice, str)):
        return
    if isinstance(choice, str):
        if choice not in _CHOICES:
            raise ValueError(f"tool_choice={choice!r} is not known; allowed: {', '.join(_CHOICES)}, or "
                             "{'type': 'function', 'function': {'name': ...}}")
        if not names:
            raise ValueError("tool_choice='required' needs tools; there are none")
        return
    if not isinstance(choice, dict):
        raise wrong_type("tool_choice", choice, "a str or {'type': 'function', 'function': {'name': ...}}")
    if choice.get("type") != "function" or not isinstance(choice.get("function"), dict):
        raise ValueError("tool_choice must be {'type': 'function', 'function': {'name': ...}}")
    name = choice["function"].get("name")
    if name not in names:
        raise ValueError(f"tool_choice.function.name={name!r} is not one of the tools: {', '.join(names) or 'none'}")


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """A copy of messages in OpenAI's form; images are parts {"type": "image"}, which images.take_images makes.

    Raises ValueError or TypeError naming the wrong field. Unknown fields and roles are kept, since chat templates may
    use more than OpenAI's.
    """
    if not isinstance(messages, (list, tuple)):
        raise TypeError(f"messages must be a list of {{'role': …, 'content': …}}, not {type(messages).__name__}")
    if not messages:
        raise ValueError("messages is empty; a chat needs at least one message")
    for i, message in enumerate(messages):
        name = f"messages[{i}]"
        if not isinstance(message, dict) or not all(isinstance(key, str) for key in message):
            raise TypeError(f"{name} must be a dict such as {{'role': …, 'content': …}}, not {message!r:.80}")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{name}['role'] must be a str such as 'user', not {message.get('role')!r:.80}")
        calls = message.get("tool_calls")
        if message.get("content") is None and calls is None and "content" not in message:
            raise ValueError(f"{name} has no 'content'")
        _check_content(f"{name}['content']", message.get("content"))
        _check_calls(f"{name}['tool_calls']", calls)
        _plain_json(name, message)
    return [dict(m) for m in messages]


def _check_content(name: str, content: Any) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, (list, tuple)):
        raise TypeError(f"{name} must be a str or a list of parts, not {content!r:.80}")
    for j, part in enumerate(content):
        if not isinstance(part, dict):
            raise TypeError(f"{name}[{j}] must be a dict such as {{'type': 'text', 'text': …}}, not {part!r:.80}")
        if part.get("type") not in ("text", "refusal", "image", "video"):
            raise ValueError(f"{name}[{j}].type={part.get('type')!r:.80} is not offered; allowed: 'text', 'refusal', "
                             "'image', 'video'")
        if part["type"] in ("image", "video"):
            if len(part) > 1:
                raise ValueError(f"{name}[{j}] must be {{'type': {part['type']!r}}}: the {part['type']} itself is in "
                                 "the request's 'images'")
            continue
        if not isinstance(part.get(part["type"]), str):
            raise TypeError(f"{name}[{j}].{part['type']} must be a str, not {part.get(part['type'])!r:.80}")


def _check_calls(name: str, calls: Any) -> None:
    if calls is None:
        return
    if not isinstance(calls, (list, tuple)):
        raise TypeError(f"{name} must be a list, not {type(calls).__name__}")
    for j, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{name}[{j}] must be {{'id': …, 'type': 'function', 'function': {{'name': …, "
                             f"'arguments': …}}}}, not {call!r:.80}")
        arguments = function.get("arguments", "{}")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{name}[{j}].function.arguments is not valid JSON: {error}") from None
        if not isinstance(arguments, dict):
            raise ValueError(f"{name}[{j}].function.arguments must be a JSON object, not {arguments!r:.80}")


def _plain_json(name: str, value: Any) -> None:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not plain JSON: {error}") from None
    valid_unicode(name, text)
