"""Measures what a token costs on its way from the engine to clients: bench_serving_path.py [run] [--…].

An engine that answers from a script feeds the real gRPC service, as the output stage does: in every step, each request
gets a token. Nothing is computed, so the serving path is all that is measured. Closed loops of --streams requests of
--tokens tokens; steps are paced so that all streams together are offered --rate tokens/s. A path that cannot keep up
merges the tokens of a stream into fewer, larger events, which are cheaper; "tokens an event" tells.

Paths: `rank0`: a minimal client (crowd.py), so that rank 0 is the limit; `grpc`: AsyncClientEngine; `http`: the HTTP
server with --workers processes, which the path's client asks for completions.

Processor times (user and system, µs a token) of each process are what compares on a machine that others use, too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]

from allspark_client import AsModelConfig, AsyncClientEngine  # noqa: E402
from allspark_client.types import Detokenized, GenerateRequestStatus as Status  # noqa: E402
from allspark_launch.group.background import shipped_model  # noqa: E402
from allspark_server.access import Access  # noqa: E402
from allspark_server.engine.engine import Engine  # noqa: E402
from allspark_server.engine.results import SampleEnd, Sink  # noqa: E402
from allspark_server.rpc.service import Service  # noqa: E402
from allspark_server.runtime.plan import SAMPLE, StepPlan  # noqa: E402
from allspark_server.tokenizer.detokenizer import StreamDetokenizer  # noqa: E402
from allspark_server.tokenizer.tokenizer import Tokenizer  # noqa: E402
from support.fake_engine import FakeEngine  # noqa: E402
from support.fake_group import FakeGroup  # noqa: E402

MODEL, WORD, TOP = "m", " the", [(7, -0.1234567), (8, -2.3456789), (9, -3.4567891), (10, -4.5678912), (11, -5.678912)]

_TOP_IDS = np.array([i for i, _ in TOP] + [-1] * 15, np.int32)
_TOP_LOGPROBS = np.array([value for _, value in TOP] + [0.0] * 15, np.float32)


# --- the engine --------------------------------------------------------------------------------------------------


class QuickGroup(FakeGroup):
    """A group whose steps give each sequence that samples the same token, in `interval` seconds."""

    def __init__(self, interval: float, token: int):
        super().__init__(num_spans=1 << 16)
        self._interval, self._token, self._due = interval, token, 0.0
        self.ended = 0.0        # when the last step ended
        self.cpu = 0.0          # processor seconds of the steps, which a device would take

    def _step(self, name: str, data: bytes) -> SimpleNamespace:
        began = time.thread_time()
        free, new, items = struct.unpack_from("<4xiii", data)
        if new:
            flags = [item.flags for item in StepPlan.decode(data).work]
        else:
            flags = np.frombuffer(data, np.int32, items, 4 * (6 + free + 4 * items))
        count = int(np.count_nonzero(np.asarray(flags, np.int32) & SAMPLE))
        result = SimpleNamespace(
            counts=np.ones(count, np.int32), drafted=np.zeros(count, np.int32),
            tokens=np.full(count, self._token, np.int32), status=np.zeros(count, np.int32),
            logprobs=np.full(count, TOP[0][1], np.float32), top_ids=np.tile(_TOP_IDS, (count, 1)),
            top_logprobs=np.tile(_TOP_LOGPROBS, (count, 1)), logits=None, copy_seconds=0.0)
        self._due = max(self._due + self._interval, time.monotonic())
        time.sleep(max(0.0, self._due - time.monotonic()))
        self.cpu += time.thread_time() - began
        self.ended = time.monotonic()
        return result


class _Timed:
    """A detokenizer whose first text is the time at which the step ended."""

    def __init__(self, group: QuickGroup, detokenizer: StreamDetokenizer):
        self._group, self._detokenizer, self._begun = group, detokenizer, False
        self.finish = detokenizer.finish

    def push(self, ids: list[int]) -> str:
        """See StreamDetokenizer."""
        if self._begun:
            return self._detokenizer.push(ids)
        self._begun = True
        return f"{self._group.ended} "


class WholeEngine(FakeEngine):
    """The real engine, with scheduler, output stage and tokenizer, over a group that computes nothing."""

    def __init__(self, rate: float, streams: int):
        self._tokenizer = Tokenizer.from_dir(shipped_model())
        self._group_ = QuickGroup(streams / rate, self._tokenizer.encode(WORD, False)[-1])
        make = self._tokenizer.detokenizer
        self._tokenizer.detokenizer = lambda *a, **k: _Timed(self._group_, make(*a, **k))
        super().__init__(group=self._group_)

    def serve(self, name: str) -> None:
        """See FakeEngine."""
        self.install_model(AsModelConfig(name, "/none", engine_max_batch=512))
        self.start_model(name)

    submit = Engine.submit

    def _publish(self, config, model) -> None:
        super()._publish(config, model)
        model.input.tokenizer = self._tokenizer


class ScriptEngine(FakeEngine):
    """Gives the requests of `streams` streams a token each in every step, `rate` tokens/s in all, from a thread in the
    place of the output stage. The text of a first token is the time at which the step ended.
    """

    def __init__(self, rate: float, streams: int):
        super().__init__()
        self._interval = streams / rate
        self._sinks: dict[int, list[Any]] = {}      # handle -> sink, tokens that are left, all tokens, top logprobs
        self._new = threading.Event()
        self._numbers = itertools.count(1)
        self._listener = lambda: None
        threading.Thread(target=self._steps, daemon=True).start()

    def add_flush_listener(self, listener) -> None:
        """See Engine."""
        self._listener = listener

    def submit(self, spec, sink: Sink, dependency=None) -> int:
        """See Engine."""
        spec.input_ids = spec.input_ids or [1] * 16
        config, handle = spec.config, next(self._numbers)
        top = TOP[:config.top_logprobs] if config.logprobs else None
        self._sinks[handle] = [sink, config.max_new_tokens, config.max_new_tokens, top]
        self._new.set()
        return handle

    def cancel(self, handle: int) -> None:
        """See Engine."""
        self._sinks.pop(handle, None)

    def release(self, handle: int) -> None:
        """See Engine."""
        self._sinks.pop(handle, None)

    def detokenize(self, name: str, ids: list[int]) -> Detokenized:
        """See Engine."""
        return Detokenized("", [WORD.encode()] * len(ids))

    def _steps(self) -> None:
        due = time.monotonic()
        while True:
            if not self._sinks:
                self._new.wait()
                self._new.clear()
                due = time.monotonic()
            due = max(due + self._interval, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            now = time.monotonic()
            for handle, entry in list(self._sinks.items()):
                sink, left, all_, top = entry
                entry[1] -= 1
                text = f"{now} " if left == all_ else WORD
                if left > all_ - 2:
                    sink.on_status(handle, Status.ContextFinished if left == all_ else Status.Generating)
                end = SampleEnd("length") if left == 1 else None
                sink.on_token(handle, 0, 7, None if top is None else -0.1234567, top or [], text, 0, end)
                if end is not None:
                    self._sinks.pop(handle, None)
                    sink.on_finish(handle, Status.GenerateFinished, None, {"context_token_length": 16}, "length")
            self._listener()


def serve(options: argparse.Namespace) -> None:
    """Run rank 0 until its input ends. For each line it prints its processor seconds, without those of the group."""
    engine = {"script": ScriptEngine, "whole": WholeEngine}[options.engine](options.rate, options.streams)
    service = Service(engine, [options.address], access=Access(insecure=True))
    service.start()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(time.process_time() - getattr(engine._group, "cpu", 0.0), flush=True)
    os._exit(0)


# --- clients -----------------------------------------------------------------------------------------------------


class Counts:
    """What clients have seen. `first`: seconds from the step's end to each first token."""

    def __init__(self) -> None:
        self.tokens, self.events, self.first = 0, 0, []
        self.began, self.cpu = time.monotonic(), time.process_time()

    def clear(self) -> None:
        """Begin anew, after the warm-up."""
        self.__init__()

    def note_first(self, text: str | bytes) -> None:
        """`text`: of a request's first event."""
        self.first.append(time.monotonic() - float(text.split()[0]))

    def report(self) -> dict[str, Any]:
        """As JSON."""
        seconds = time.monotonic() - self.began
        return {"tokens": self.tokens, "events": self.events, "rate": self.tokens / seconds,
                "first": statistics.median(self.first) if self.first else 0.0, "cpu": time.process_time() - self.cpu}


async def ask_grpc(engine: AsyncClientEngine, options: argparse.Namespace, counts: Counts) -> None:
    """One request by gRPC."""
    config = {"max_new_tokens": options.tokens}
    if options.top:
        config |= {"logprobs": True, "top_logprobs": options.top}
    begun = False
    async with engine.generate(MODEL, {"text": "x"}, config) as generation:
        async for elements in generation:
            if not begun:
                begun = True
                counts.note_first(elements.text)
            counts.tokens += len(elements.ids_from_generate)
            counts.events += 1


async def ask_http(options: argparse.Namespace, counts: Counts) -> None:
    """One completion by HTTP."""
    host, _, port = options.address.rpartition(":")
    logprobs = {"logprobs": options.top} if options.top else {}
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": options.tokens, "stream": True, **logprobs})
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
                 f"{len(body)}\r\n\r\n{body}".encode())
    begun, ended, rest = False, False, b""
    while not ended:
        if not (data := await reader.read(65536)):
            raise RuntimeError("the server ended a stream")
        *whole, rest = (rest + data).split(b"\n\n")
        ended = any(b"[DONE]" in event for event in whole[-2:])
        for event in whole:
            at = event.find(b'"text":"') + 8
            if at < 8:
                continue
            text = event[at:event.index(b'"', at)]
            if not begun:
                begun = True
                counts.note_first(text)
                counts.tokens += 1
            counts.events += 1
            counts.tokens += text.count(b" the")
    counts.events -= 1      # the one that says why it ended
    writer.close()


async def ask(options: argparse.Namespace) -> dict[str, Any]:
    """Closed loops of all streams for --seconds after a warm-up; returns what was seen."""
    counts = Counts()
    async with contextlib.AsyncExitStack() as stack:
        engine = None
        if options.path == "grpc":
            engine = await stack.enter_async_context(AsyncClientEngine(options.address))

        async def loop() -> None:
            while True:
                await (ask_http(options, counts) if engine is None else ask_grpc(engine, options, counts))

        loops = [asyncio.ensure_future(loop()) for _ in range(options.streams)]
        await asyncio.sleep(options.warm)
        print("begin", flush=True)
        counts.clear()
        await asyncio.wait(loops, timeout=options.seconds, return_when=asyncio.FIRST_EXCEPTION)
        report = counts.report()
        for task in loops:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.wait(loops)
    return report


# --- measurement -------------------------------------------------------------------------------------------------


def used(processes: list[psutil.Process]) -> float:
    """Processor seconds of processes."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


@contextlib.contextmanager
def rank0(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], float]]]:
    """Run rank 0; yields its address, and a function that returns its processor seconds."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/rank0"
        words = [sys.executable, __file__, "serve", "--address", address, "--rate", str(options.rate), "--streams",
                 str(options.streams), "--engine", options.engine]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            process.stdout.readline()

            def seconds() -> float:
                process.stdin.write("\n")
                process.stdin.flush()
                return float(process.stdout.readline())

            try:
                yield address, seconds
            finally:
                process.stdin.close()


def crowd(address: str, options: argparse.Namespace) -> list[str]:
    """The command of the minimal client."""
    return [sys.executable, str(HERE / "crowd.py"), address, "busy", "--each", str(options.streams), "--seconds",
            str(options.warm + options.seconds), "--warm", str(options.warm), "--tokens", str(options.tokens), "--top",
            str(options.top), "--text"]


def measure(path: str, options: argparse.Namespace, workers: int = 1) -> dict[str, Any]:
    """One row of the table."""
    from bench_http import http_endpoint
    with contextlib.ExitStack() as stack:
        address, server = stack.enter_context(rank0(options))
        behind: list[psutil.Process] = []
        command = [sys.executable, __file__, "ask", "--path", path, "--streams", str(options.streams), "--tokens",
                   str(options.tokens), "--top", str(options.top), "--seconds", str(options.seconds), "--warm",
                   str(options.warm), "--address"]
        if path == "http":
            http, behind = stack.enter_context(http_endpoint(address, workers))
            command.append(http)
        else:
            command.append(address)
        if path == "rank0":
            command = crowd(address, options)
        process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                                       text=True))
        process.stdout.readline()
        if path == "rank0":
            time.sleep(options.warm)
        before = server(), used(behind)
        line = process.stdout.readline()
        after = server(), used(behind)
        found = json.loads(line)
        if path == "rank0":
            tokens = found["tokens_per_second"] * options.seconds
            found = {"tokens": tokens, "events": 0, "rate": found["tokens_per_second"], "cpu": 0.0, "first": 0.0}
    tokens = max(found["tokens"], 1)
    return {"path": path if path != "http" else f"http, {workers}", "streams": options.streams, "top": options.top,
            "rate": found["rate"], "rank 0 us": 1e6 * (after[0] - before[0]) / tokens,
            "http us": 1e6 * (after[1] - before[1]) / tokens, "client us": 1e6 * found["cpu"] / tokens,
            "tokens/event": tokens / found["events"] if found["events"] else 0.0, "first ms": 1e3 * found["first"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=["run", "serve", "ask"], default="run", help=argparse.SUPPRESS)
    parser.add_argument("--engine", choices=["script", "whole"], default="script", help="`whole`: the real engine over "
                        "a group that computes nothing, rather than a script in its place")
    parser.add_argument("--paths", nargs="*", default=["rank0", "grpc", "http"])
    parser.add_argument("--streams", nargs="*", type=int, default=[1, 32, 256])
    parser.add_argument("--tops", nargs="*", type=int, default=[0, 5], help="log probabilities of a token")
    parser.add_argument("--rate", type=float, default=8000.0, help="offered tokens/s (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=400, help="of a request (default: %(default)s)")
    parser.add_argument("--workers", nargs="*", type=int, default=[1])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--warm", type=float, default=1.0)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    parser.add_argument("--top", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.command != "run":
        options.streams = options.streams[0]
        if options.command == "serve":
            serve(options)
        else:
            print(json.dumps(asyncio.run(ask(options))), flush=True)
        return
    head = False
    rate = options.rate
    for path, streams, top in itertools.product(options.paths, list(options.streams), options.tops):
        for workers in options.workers if path == "http" else [1]:
            options.streams, options.top = streams, top
            # one stream cannot be faster than a step of 1 ms
            options.rate = min(rate, 1000.0 * streams)
            row = measure(path, options, workers)
            if not head:
                print("  ".join(f"{name:>12}" for name in row))
                head = True
            print("  ".join(f"{value:>12.2f}" if isinstance(value, float) else f"{value!s:>12}"
                            for value in row.values()), flush=True)


if __name__ == "__main__":
    main()
