"""Chat templates (jinja2), rendered in processes of their own.

A template is a checkpoint's code. jinja2's sandbox limits neither its time nor its memory, so it runs in a process that
has limits for both. If a template exceeds them, the process ends and a later request starts another. This file is also
the program of these processes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
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
NICE = 5  # of the processes: steps go before
PROCESSES = 4  # the most that run at a time: a chat that takes long does not keep others waiting
KNOWN_TEMPLATES = 64  # that a process keeps; when there are more, it forgets all
RUN = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"

_ASKS_FOR_NONE = re.compile(r"""\bcontent\b['"]?\]?\s+is\s+(not\s+)?none\b""")


class _Process:
    """One process that renders, for one thread at a time."""

    def __init__(self) -> None:
        # The process ends when its standard input is closed.
        self._process = subprocess.Popen(
            [sys.executable, "-c", RUN, __file__], cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, bufsize=0
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._input, False)
        self._known: set[str] = set()  # ids of the templates that it has

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def render(self, template: str, digest: str, variables: str) -> list[str] | None:
        """The answer [kind, text]; None if the process ended or took too long. It must be closed then."""
        if digest in self._known:
            template = ""
        elif len(self._known) == KNOWN_TEMPLATES:
            self._known.clear()
        self._known.add(digest)
        answer = self._ask(f"{json.dumps([digest, template])}\n{variables}\n".encode())
        return json.loads(answer) if answer else None

    def _ask(self, request: bytes) -> bytes:
        deadline, left, answer = time.monotonic() + WAIT_SECONDS, memoryview(request), bytearray()
        poll = select.poll()
        poll.register(self._output, select.POLLIN)
        poll.register(self._input, select.POLLOUT)
        while not answer.endswith(b"\n"):
            ready = poll.poll(max(0.0, 1e3 * (deadline - time.monotonic())))
            if not ready:
                return b""
            try:
                for file, _ in ready:
                    if file == self._input:
                        left = left[os.write(self._input, left):]
                        if not left:
                            poll.unregister(self._input)
                    elif part := os.read(self._output, 1 << 20):
                        answer += part
                    else:
                        return b""
            except OSError:  # the process has ended
                return b""
        return bytes(answer)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


class Renderer:
    """Renders templates in a few processes. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._room = threading.BoundedSemaphore(PROCESSES)

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The text. `variables` must fit in JSON. On failure ValueError; its text continues "the chat template"."""
        try:
            given = _dumped(variables)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"takes what JSON can hold: {error}") from None
        if not self._room.acquire(timeout=WAIT_SECONDS):
            from allspark_client.errors import AllSparkError, AsStatus  # not in the processes

            raise AllSparkError(AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR,
                                f"{PROCESSES} other chats are still being rendered after {WAIT_SECONDS:g} s; send it "
                                "again later", retryable=True)
        try:
            process = self._take()
            answer = process.render(template, _digest(template), given)
            if answer is None:
                process.close()
            else:
                with self._lock:
                    self._idle.append(process)
        finally:
            self._room.release()
        if answer is None:
            raise ValueError(f"takes more than {SECONDS:g} s of a processor or {MEMORY_BYTES >> 20} MiB of memory")
        kind, text = answer
        if kind != "text":
            raise ValueError(text)
        return text

    def start(self) -> None:
        """Starts a process if none runs, so that the first request does not wait for it."""
        with self._lock:
            if not self._idle:
                self._idle.append(_Process())

    def close(self) -> None:
        """Ends the idle processes."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()

    def _take(self) -> _Process:
        with self._lock:
            while self._idle:  # the last one, which has most likely read the template
                if (process := self._idle.pop()).alive:
                    return process
                process.close()
        return _Process()


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


os.register_at_fork(after_in_child=renderer.cache_clear)  # the pipes belong to the parent


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
    """Answers each two lines, [id, template or "" if it is known] and the variables, with a line [kind, text], until
    the input ends.
    """
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()  # do not count what libraries reserve
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    sources: dict[str, str] = {}
    for line in sys.stdin.buffer:
        digest, template = json.loads(line)
        if template:
            if len(sources) == KNOWN_TEMPLATES:  # as the other side counts
                sources.clear()
            sources[digest] = template
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # SIGPROF ends the process wherever it is
        answer = json.dumps(_answer(sources.get(digest, ""), json.loads(sys.stdin.buffer.readline()))).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
