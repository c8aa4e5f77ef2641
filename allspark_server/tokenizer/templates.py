"""Chat templates (jinja2), rendered in processes of their own.

A template is a checkpoint's code. jinja2's sandbox limits neither its time nor its memory, so it runs in a process that
has limits for both (limited_process.py); template_program.py is what the process runs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..limited_process import ProcessPool
from . import template_program
from .template_program import KNOWN_TEMPLATES

# Limits of one rendering: CPU time and memory.
SECONDS, MEMORY_BYTES = 2.0, 1 << 30

_ASKS_FOR_NONE = re.compile(r"""\bcontent\b['"]?\]?\s+is\s+(not\s+)?none\b""")


class Renderer:
    """Renders templates in a few processes. Safe to use from several threads."""

    def __init__(self) -> None:
        self._pool = ProcessPool(template_program.__file__, SECONDS, MEMORY_BYTES, "chats are being rendered")

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The text. `variables` must fit in JSON. On failure ValueError; its text continues "the chat template"."""
        try:
            given = _dumped(variables)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"takes what JSON can hold: {error}") from None
        digest = _digest(template)
        with self._pool.process() as process:
            if digest in process.known:
                template = ""
            elif len(process.known) == KNOWN_TEMPLATES:
                process.known.clear()
            process.known.add(digest)
            kind, text = json.loads(bytes(process.ask([f"{json.dumps([digest, template])}\n{given}".encode()])))
        if kind != "text":
            raise ValueError(text)
        return text

    def start(self) -> None:
        """Starts a process if none runs, so that the first request does not wait for it."""
        self._pool.start()

    def close(self) -> None:
        """Ends the idle processes."""
        self._pool.close()


def _dumped(variables: Mapping[str, Any]) -> str:
    """The variables as JSON, value by value: the interpreter lock is held for one at a time."""
    parts = []
    for name, value in variables.items():
        one = f"[{', '.join(map(json.dumps, value))}]" if isinstance(value, list) else json.dumps(value)
        parts.append(f"{json.dumps(name)}: {one}")
    return "{" + ", ".join(parts) + "}"


@functools.lru_cache(maxsize=64)
def _digest(template: str) -> str:
    return hashlib.blake2b(template.encode(errors="surrogatepass"), digest_size=16).hexdigest()


@functools.cache
def renderer() -> Renderer:
    """The renderer of this process."""
    return Renderer()


class ChatTemplates:
    """A checkpoint's chat templates, by name. Safe to use from several threads."""

    def __init__(self, sources: dict[str, str], special_tokens: Mapping[str, Any], owner: str):
        """`special_tokens`: variables of every template. `owner`: the checkpoint's name in errors."""
        self.sources, self._special_tokens, self._owner = sources, special_tokens, owner

    def replaced_by(self, source: str) -> ChatTemplates:
        """This one template in place of the checkpoint's."""
        return ChatTemplates({"default": source}, self._special_tokens, self._owner)

    def source(self, tools: bool) -> str:
        """The source of the template for chats with or without tools. ValueError if there is none."""
        name = "tool_use" if tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            others = (f" named {name!r}; it has {sorted(self.sources)}" if self.sources
                      else "; send text or ids instead")
            raise ValueError(f"{self._owner} has no chat template{others}")
        return self.sources[name]

    def render(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None, **variables: Any,
    ) -> str:
        """Renders messages ({"role": …, "content": …}, …) as transformers does. `variables`: of the template, such as
        `enable_thinking=False` or `documents=…`. ValueError for malformed messages, a missing template, or an error in
        or from the template.
        """
        _check_messages(messages)
        if tools is not None and not (
            isinstance(tools, (list, tuple)) and all(isinstance(tool, dict) for tool in tools)
        ):
            raise ValueError("tools must be a list of JSON schemas (dicts)")
        template = self.source(tools is not None)
        asks = _asks_for_none(template)
        values = {
            **self._special_tokens,
            "documents": None,
            **variables,
            "messages": [_as_seen(message, asks) for message in messages],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return renderer().render(template, values)
        except ValueError as error:
            raise ValueError(f"the chat template of {self._owner} {error}") from error


@functools.lru_cache(maxsize=64)
def _asks_for_none(template: str) -> bool:
    """Whether a template asks if content is None."""
    return bool(_ASKS_FOR_NONE.search(template))


def _as_seen(message: dict, asks_for_none: bool) -> dict:
    """A message as transformers gives it to templates: without keys that are None, reasoning under all of its names.
    `asks_for_none`: the template asks if content is None (DeepSeek's); transformers cannot render its calls.
    """
    shown = {key: value for key, value in message.items() if value is not None}
    if asks_for_none:
        shown.setdefault("content", None)
    for name in ("reasoning_content", "thinking", "reasoning"):
        if name in shown:
            return {"thinking": shown[name], **shown, "reasoning_content": shown[name]}
    return shown


def _check_messages(messages: Any) -> None:
    if isinstance(messages, (str, bytes, dict)) or not isinstance(messages, Sequence):
        raise ValueError(f"messages is {type(messages).__name__}; it must be a list of {{'role': …, 'content': …}}")
    if not messages:
        raise ValueError("messages is empty; at least one message is needed")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"message {i} is {type(message).__name__}; it must be a dict with 'role' and 'content'")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"message {i} has role {message.get('role')!r}; it must be a string such as 'user'")
        if not isinstance(message.get("content"), (str, list, type(None))):
            raise ValueError(
                f"message {i} has content of type {type(message['content']).__name__}; "
                "it must be a string or a list of parts"
            )
