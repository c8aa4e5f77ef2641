"""Chat templates (jinja2), rendered in a process of their own.

A template is a checkpoint's code. jinja2's sandbox limits neither its time nor its memory, so it runs in a process that
has limits for both. If a template exceeds them, the process ends and the next request starts another. This file is also
the program of that process.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

# Limits of one rendering: CPU time (so that a busy machine does not shorten it), memory, and length of the text.
SECONDS, MEMORY_BYTES, MAX_CHARACTERS = 2.0, 1 << 30, 1 << 26
WAIT_SECONDS = 20.0  # wall-clock limit, for a process that gets no CPU time
RUN = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"


class Renderer:
    """Renders templates, one at a time. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The text. `variables` must fit in JSON. On failure ValueError; its text continues "the chat template"."""
        try:
            request = json.dumps([template, variables]).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"takes what JSON can hold: {error}") from None
        with self._lock:
            answer = self._ask(request)
        if not answer:
            raise ValueError(f"takes more than {SECONDS:g} s of a processor or {MEMORY_BYTES >> 20} MiB of memory")
        kind, text = json.loads(answer)
        if kind != "text":
            raise ValueError(text)
        return text

    def start(self) -> None:
        """Starts the process if it does not run, so that the first request does not wait for it."""
        with self._lock:
            self._running()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            # The process ends when its standard input is closed.
            self._process = subprocess.Popen(
                [sys.executable, "-c", RUN, __file__], cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL
            )
        return self._process

    def _ask(self, request: bytes) -> bytes:
        """The answer's line; empty if the process ended."""
        process, answer = self._running(), b""
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(WAIT_SECONDS, process.kill)
        timer.start()
        with contextlib.suppress(OSError):
            process.stdin.write(request)
            process.stdin.flush()
            answer = process.stdout.readline()
        timer.cancel()
        if not answer.endswith(b"\n"):
            process.kill()
            with contextlib.suppress(OSError):
                process.communicate()
            return b""
        return answer


@functools.cache
def renderer() -> Renderer:
    """The renderer of this process."""
    return Renderer()


os.register_at_fork(after_in_child=renderer.cache_clear)  # the pipes belong to the parent


class ChatTemplates:
    """A checkpoint's chat templates, by name. Safe to use from several threads."""

    def __init__(self, sources: dict[str, str], special_tokens: Mapping[str, Any], owner: str):
        """`special_tokens`: variables of every template. `owner`: the checkpoint's name in errors."""
        self.sources, self._special_tokens, self._owner = sources, special_tokens, owner

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
        values = {
            **self._special_tokens,
            "documents": None,
            **variables,
            "messages": [_as_seen(message) for message in messages],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        template = self.source(tools is not None)
        try:
            return renderer().render(template, values)
        except ValueError as error:
            raise ValueError(f"the chat template of {self._owner} {error}") from error


def _as_seen(message: dict) -> dict:
    """A message as transformers gives it to templates: without keys that are None, reasoning under all of its names."""
    shown = {key: value for key, value in message.items() if value is not None}
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


# ---- the program of the process --------------------------------------------------------------------------------


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %}…{% endgeneration %} marks the assistant's words for training; here only its body matters."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_pass_on"), [], [], body).set_lineno(line)

    def _pass_on(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, which would be wrong in a prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=64)
def _compiled(template: str) -> jinja2.Template:
    """The template in the environment that templates of published checkpoints expect, which is transformers'."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment.from_string(template)


def _answer(template: str, variables: dict[str, Any]) -> tuple[str, str]:
    try:
        text = _compiled(template).render(variables)
        if len(text) > MAX_CHARACTERS:
            return "error", f"gives more than {MAX_CHARACTERS} characters"
        return "text", text
    except jinja2.TemplateSyntaxError as error:
        return "error", f"has an error in line {error.lineno}: {error.message}"
    except jinja2.TemplateError as error:
        return "error", f"refused the messages{_line(error)}: {error}"
    except Exception as error:  # a template can cause any
        return "error", f"failed on the messages{_line(error)}: {type(error).__name__}: {str(error)[:1000]}"


def _line(error: Exception) -> str:
    """The line of the template in which an error occurred, for the message."""
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == "<template>"]
    return f" in line {lines[-1]}" if lines else ""


def main() -> None:
    """Answers each line [template, variables] with a line [kind, text], until the input ends."""
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()  # do not count what libraries reserve
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # SIGPROF ends the process wherever it is
        answer = json.dumps(_answer(*json.loads(line))).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
