"""Tries out grammars in a process that may be killed, before llguidance compiles them here.

A grammar is untrusted input. llguidance's limits do not cover everything: an intersection of expressions may take
minutes, and deep recursion may crash the process. So each grammar is first compiled, and run for some steps, in a
forked process with limits of time and memory. A grammar that succeeds there is safe to compile in this process. This
file is also the program of that process.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import llguidance

# Limits for a grammar: CPU seconds (so that a busy machine does not shorten them), bytes beyond the tokenizer's.
CPU_SECONDS, MEMORY_BYTES = 0.6, 256 << 20
SECONDS = 20.0  # wall-clock limit, for a process that gets no CPU time
STEP_SECONDS = 0.025  # CPU time that a mask may take; it must not delay the batch
WALK_STEPS, SLOW_STEPS = 24, 3  # steps of the trial, and how many of them may be slower
MAX_BYTES = 512 << 10  # length of a response_format as JSON
START_SECONDS = 30.0  # for the process to read the tokenizer
NICE = 5  # running requests have priority
STACK_BYTES = 1 << 20  # half the stack of the threads that later use the grammar
RUN = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
LIMITS: dict[str, Any] = {
    "max_lexer_states": 30_000,
    "step_lexer_fuel": 100_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


class TooCostly(ValueError):
    """A grammar took too much time or memory. Another time, or another machine, may do better."""


def read_tokenizer(text: str, vocab_size: int, eos_ids: list[int]) -> llguidance.LLTokenizer:
    """Llguidance's tokenizer from the text of a tokenizer.json, which must have the end-of-sequence ids."""
    return llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=eos_ids)


def grammar_text(response_format: dict[str, Any]) -> str:
    """The text that llguidance compiles for a response_format that GenerateConfig has checked. ValueError if its
    grammar cannot be read.
    """
    kind = response_format["type"]
    options: Any = {"whitespace_flexible": not response_format.get("disable_any_whitespace", False)}
    if kind == "json_object":
        return llguidance.LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=options)
    if kind == "json_schema":
        schema, lenient = schema_of(response_format["json_schema"])
        if not isinstance(schema, dict):
            schema = {"allOf": [schema]}
        return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides={**options, "lenient": lenient})
    if kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(response_format["regex"])
    if kind == "choice":
        choices = " | ".join(map(json.dumps, response_format["choice"]))
        return llguidance.LLMatcher.grammar_from_lark(f"start: {choices}")
    text = response_format["grammar"]
    if response_format.get("syntax", "lark") == "ebnf":
        from llguidance.gbnf_to_lark import gbnf_to_lark

        try:
            text = gbnf_to_lark(text)
        except Exception as error:  # llguidance's own exception type, or another one
            raise ValueError(str(error)) from error
    return llguidance.LLMatcher.grammar_from_lark(text)


def schema_of(given: Any) -> tuple[Any, bool]:
    """The schema itself, and whether unknown keywords are ignored."""
    if isinstance(given, str):
        given = json.loads(given)
    if isinstance(given, dict) and "schema" in given and set(given) <= {"name", "description", "schema", "strict"}:
        return given["schema"], given.get("strict") is False
    return given, False


def new_matcher(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """A matcher at the beginning of a grammar, with its first mask computed. ValueError if the grammar is wrong."""
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=llguidance.LLParserLimits(**LIMITS))
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(matcher.get_error().replace("<non-verbose/>", "").strip() or "it cannot be compiled")
    if matcher.is_stopped() and not matcher.is_accepting():
        raise ValueError("nothing satisfies it")
    return matcher


class Checker:
    """The process that tries out grammars for one tokenizer. Safe to use from several threads, which do not wait for
    each other.
    """

    def __init__(self, tokenizer: Callable[[], tuple[str, int, list[int]]]):
        """`tokenizer()`: returns the arguments of `read_tokenizer` when the process starts."""
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._owner = 0
        self.closed = False

    def start(self) -> None:
        """Starts the process if it does not run, so that the first request does not wait for it."""
        with self._lock:
            self._running()

    def close(self) -> None:
        """Ends the process, and all calls that wait for it. It is not started again."""
        self.closed = True
        if self._owner != os.getpid():
            return
        if (process := self._process) is not None:
            process.kill()  # without the lock, which a thread holds while it waits for the start; this ends its wait
        with self._lock:
            if self._process is not None and self._control is not None:
                self._control.close()
                self._process.kill()
                self._process.wait()
            self._process = None

    def check(self, response_format: dict[str, Any], patience: float = 1) -> tuple[str, int]:
        """The text that llguidance compiles, and the bytes that this took. ValueError if it fails, TooCostly if it
        takes too much. `patience` multiplies the limits of CPU time.
        """
        try:
            data = json.dumps(response_format).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"takes what JSON can hold: {error}") from None
        if len(data) > MAX_BYTES:
            raise ValueError(f"has {len(data)} bytes as JSON; allowed: at most {MAX_BYTES}")
        mine, theirs = socket.socketpair()
        with mine:
            with theirs, self._lock:
                try:
                    socket.send_fds(self._running(), [b"+"], [theirs.fileno()])
                except OSError:  # the process has just ended
                    if self._process is not None:
                        self._process.kill()
                        self._process.wait()
                    socket.send_fds(self._running(), [b"+"], [theirs.fileno()])
            answer = _ask(mine, f"{patience}\n".encode() + data, time.monotonic() + SECONDS)
        if not answer:
            raise TooCostly(f"is too complex: it takes more than {patience * CPU_SECONDS:g} s of a processor, or "
                            f"{MEMORY_BYTES >> 20} MiB, to compile")
        text, message, size, too_costly = json.loads(answer)
        if message:
            raise (TooCostly if too_costly else ValueError)(message)
        return text, size

    def _running(self) -> socket.socket:
        if self.closed:
            raise ValueError("cannot be compiled: the model is being released")
        control = self._control
        if (control is None or self._owner != os.getpid() or self._process is None
                or self._process.poll() is not None):
            # The process ends when this connection is closed.
            self._owner = os.getpid()
            control, theirs = socket.socketpair()
            self._control = control
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", RUN, __file__], cwd="/", stdin=theirs.fileno(), stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL
                )
            control.settimeout(START_SECONDS)
            data, ready = json.dumps(self._tokenizer()).encode(), b""
            with contextlib.suppress(OSError):  # a timeout, too
                control.sendall(len(data).to_bytes(8, "little") + data)
                ready = control.recv(1)
            if not ready:
                self._process.kill()
                raise ValueError("cannot be compiled: the tokenizer cannot be used for grammars")
        return control


def _ask(connection: socket.socket, data: bytes, deadline: float) -> bytes:
    """The answer; empty if the process ended or was too late."""
    answer = bytearray()
    with contextlib.suppress(OSError):  # a timeout, too
        connection.settimeout(SECONDS)
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while True:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            part = connection.recv(1 << 16)
            if not part:
                return bytes(answer)
            answer += part
    return b""


# ---- the program of the process --------------------------------------------------------------------------------


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _try(tokenizer: llguidance.LLTokenizer, response_format: dict[str, Any], patience: float) -> str:
    """Raises ValueError unless the grammar, which is returned, can be used; TooCostly if masks take too long."""
    text = grammar_text(response_format)
    matcher = new_matcher(tokenizer, text)
    slow = 0
    rng = random.Random(0)
    for _ in range(WALK_STEPS):
        began = time.thread_time()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        slow += time.thread_time() - began > patience * STEP_SECONDS
        if slow > SLOW_STEPS:
            raise TooCostly(f"is too complex: masks take more than {1e3 * STEP_SECONDS:g} ms each")
        if matcher.is_stopped() or not mask:
            break
        # The first allowed id after a random one: not a uniform choice, but it reaches every kind of token.
        at = rng.randrange(mask.bit_length())
        later = mask >> at
        if not matcher.consume_token(at + (later & -later).bit_length() - 1):
            break
    if matcher.is_error():
        raise ValueError("is too complex: " + matcher.get_error().splitlines()[0])
    return text


def _serve(connection: socket.socket, tokenizer: llguidance.LLTokenizer) -> None:
    """Answers one request with (grammar, error, bytes, whether the error is TooCostly)."""
    with open("/proc/self/statm", encoding="ascii") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    data = bytearray()
    connection.settimeout(SECONDS)
    while part := connection.recv(1 << 16):
        data += part
    os.nice(NICE)
    given, _, form = data.partition(b"\n")
    patience = float(given)
    # The signals of these timers end the process wherever it is.
    signal.setitimer(signal.ITIMER_PROF, patience * CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    before = _resident()
    answer: list[Any] = ["", "", 0, False]

    def run() -> None:
        try:
            answer[0] = _try(tokenizer, json.loads(form), patience)
        except (ValueError, RecursionError) as error:
            answer[1], answer[3] = str(error)[:1000], isinstance(error, TooCostly)

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    answer[2] = max(_resident() - before, 0)
    if answer[0] or answer[1]:
        connection.sendall(json.dumps(answer).encode())


def main() -> None:
    """Reads a tokenizer, then answers each connection that it receives in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    control = socket.socket(fileno=os.dup(0))
    with control.makefile("rb") as stream:
        tokenizer = read_tokenizer(*json.loads(stream.read(int.from_bytes(stream.read(8), "little"))))
    control.sendall(b"+")
    size = array.array("i").itemsize
    while True:
        message, ancillary, _, _ = control.recvmsg(1, socket.CMSG_SPACE(size))
        if not message:
            return
        for _, _, data in ancillary:
            connection = socket.socket(fileno=int.from_bytes(data[:size], sys.byteorder))
            if os.fork() == 0:
                try:
                    control.close()
                    _serve(connection, tokenizer)
                finally:
                    os._exit(0)
            connection.close()


if __name__ == "__main__":
    main()
