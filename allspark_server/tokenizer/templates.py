"""Chat templates (jinja2), rendered in a process of their own.

A template is a checkpoint's code. jinja2's sandbox bounds neither its time nor its memory; a process can be limited in
both: one that loops or grows ends, and the next request starts another. This file is that process' whole program, too.
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
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

# What rendering may take, in seconds of a processor, which a busy machine does not shorten, and give.
SECONDS, MEMORY_BYTES, MAX_CHARACTERS = 2.0, 1 << 30, 1 << 26
WAIT_SECONDS = 20.0  # for a process that gets none
RUN = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"


class Renderer:
    """Renders templates, one at a time. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The text; ValueError, to be put after "the chat template", if none. variables: what JSON can hold."""
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
        """Starts the process unless it runs, so that the first request need not wait for it."""
        with self._lock:
            self._running()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            # It ends when it can read no more from this one.
            self._process = subprocess.Popen(
                [sys.executable, "-c", RUN, __file__],
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        return self._process

    def _ask(self, request: bytes) -> bytes:
        """A line of answer; empty when the process ended over it."""
        process, answer = self._running(), b""
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
    """This process' one."""
    return Renderer()


os.register_at_fork(after_in_child=renderer.cache_clear)  # the pipes are the parent's


# ---- what runs in the process --------------------------------------------------------------------------------


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %}…{% endgeneration %} marks what the assistant said, for training; here it passes its body on."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_pass_on"), [], [], body).set_lineno(line)

    def _pass_on(self, caller):
        return caller()


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # jinja2's own filter escapes for HTML, which prompts must not have.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=64)
def _compiled(template: str) -> jinja2.Template:
    """For what chat templates of published checkpoints are written for."""
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
    except Exception as error:  # a template can bring about any
        return "error", f"failed on the messages{_line(error)}: {type(error).__name__}: {str(error)[:1000]}"


def _line(error: Exception) -> str:
    """Where in the template an error came up."""
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == "<template>"]
    return f" in line {lines[-1]}" if lines else ""


def main() -> None:
    """Answers lines of [template, variables] with lines of [kind, text], until there are no more."""
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()  # libraries may have reserved much
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process, whatever that is in
        answer = json.dumps(_answer(*json.loads(line))).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
