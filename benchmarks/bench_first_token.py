"""Measures what the way through gRPC adds to a first token: bench_first_token.py [--…].

A small model (--model, default the packaged one) computes on CPUs, behind the real engine, the real service and a
client in another process. Requests come one after the other, with a pause between them in which all threads fall
asleep. `in` is from the client's call to the step's submission to the native library, `step` until its results are
collected, `out` from then to the token in the client's hands; `added` is `in` and `out`. Clients: `sync`
(ClientEngine), `async` (AsyncClientEngine), `engine` (Engine in the same process, without gRPC).

--stations shows where a request is in between: the median time from each station to the next one.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

from allspark_client import AsModelConfig, AsyncClientEngine, ClientEngine  # noqa: E402
from allspark_client.queue import ResultQueue  # noqa: E402
from allspark_client.session import Session  # noqa: E402
from allspark_launch.group.background import shipped_model  # noqa: E402
from allspark_server.access import Access  # noqa: E402
from allspark_server.engine.engine import Engine  # noqa: E402
from allspark_server.engine.engine_thread import EngineThread  # noqa: E402
from allspark_server.engine.output import OutputStage  # noqa: E402
from allspark_server.engine.served_model import ServedModel  # noqa: E402
from allspark_server.rpc.client_stream import ClientStream  # noqa: E402
from allspark_server.rpc.methods import Methods  # noqa: E402
from allspark_server.rpc.service import Service  # noqa: E402
from allspark_server.rpc.streams import Streams  # noqa: E402
from allspark_server.runtime.group import Group  # noqa: E402

MODEL, WORDS = "m", "Once upon a time there was a fox who "
Sample = tuple[float, float, float]     # in, step, out; seconds
Passed = tuple[float, str]              # when a request passed a station, on the monotonic clock, and its name
PASSED: list[Passed] = []               # in this process
#: the stations of a first token in their order: a method, and whether it has returned
STATIONS: dict[str, tuple[type, str, bool]] = {
    "sent": (Session, "send", False), "read": (Methods, "parse", True), "in the engine": (Engine, "submit", False),
    "prepared": (EngineThread, "post", False), "queued": (ServedModel, "enqueue", False),
    "planned": (ServedModel, "plan", True), "submitted": (Group, "submit", True),
    "collected": (Group, "collect", True), "completed": (OutputStage, "put", False),
    "in the output stage": (OutputStage, "_deliver", False), "delivered": (Streams, "flush", False),
    "in the loop": (Streams, "_wake", False), "taken": (ClientStream, "take", True),
    "arrived": (Session, "_apply", False), "filed": (ResultQueue, "put", False)}
#: of them, those in the client, and those of both where there is no client
OF_CLIENT = {"sent", "arrived", "filed"}
OF_ENGINE = {"in the engine", "prepared", "queued", "planned", "submitted", "collected", "completed",
             "in the output stage", "filed"}


def watch(stations: Iterable[str]) -> None:
    """Notes in PASSED whenever a thread passes one of the stations."""
    for name in stations:
        owner, method, returned = STATIONS[name]
        setattr(owner, method, watched(getattr(owner, method), name, returned))


def watched(method: Callable, name: str, returned: bool) -> Callable:
    """A method that notes when it is called, or has returned."""
    @functools.wraps(method)
    def call(*args, **keywords):
        if not returned:
            PASSED.append((time.monotonic(), name))
        result = method(*args, **keywords)
        if returned:
            PASSED.append((time.monotonic(), name))
        return result

    return call


def print_stations(passed: list[Passed], stations: Iterable[str], warm: int) -> None:
    """The median time, and that of nine in ten requests, from each station to the next one."""
    order = ["called", *(name for name in STATIONS if name in stations), "received"]
    found: list[list[float]] = []
    for when, name in sorted(passed):
        if name == "called":
            found.append([])
        if found and len(found[-1]) < len(order) and name == order[len(found[-1])]:
            found[-1].append(when)
    whole = [times for times in found[warm:] if len(times) == len(order)]
    for at, name in enumerate(order[1:]):
        times = sorted(1e6 * (way[at + 1] - way[at]) for way in whole)
        middle, most = times[len(times) // 2], times[len(times) * 9 // 10]
        print(f"{'':>8}  to {name!r:<24}{middle:>7.0f} us, 90 %{most:>7.0f}", flush=True)


class TimedGroup(Group):
    """Notes when the latest collected step was submitted and collected."""

    stamp = ""

    def __init__(self, cpus: list[int]):
        super().__init__(cpus)
        self._began: deque[float] = deque()

    def submit(self, name, plan):
        """See Group."""
        self._began.append(time.monotonic())
        super().submit(name, plan)

    def collect(self):
        """See Group."""
        result = super().collect()
        self.stamp = f"{self._began.popleft()}/{time.monotonic()} "
        return result


class Stamping:
    """A detokenizer whose first text is the group's stamp."""

    def __init__(self, group: TimedGroup, detokenizer):
        self._group, self._detokenizer, self._begun = group, detokenizer, False
        self.finish = detokenizer.finish

    def push(self, ids: list[int]) -> str:
        """See StreamDetokenizer."""
        text = self._detokenizer.push(ids) if self._begun else self._group.stamp
        self._begun = True
        return text


class StampingEngine(Engine):
    """An engine whose first text is the beginning and the end of the step."""

    def _publish(self, config, model):
        super()._publish(config, model)
        tokenizer, group = model.input.tokenizer, self._group
        make = tokenizer.detokenizer
        tokenizer.detokenizer = lambda *a, **k: Stamping(group, make(*a, **k))


def engine_for(options: argparse.Namespace) -> Engine:
    """An engine with the model."""
    engine = StampingEngine(group=TimedGroup(list(range(options.threads))))
    engine.install_model(AsModelConfig(MODEL, options.model, engine_max_length=512, engine_max_batch=8,
                                       enable_prefix_cache=False))
    engine.start_model(MODEL)
    return engine


def serve(options: argparse.Namespace) -> None:
    """Runs the server until its input ends."""
    service = Service(engine_for(options), [options.address], access=Access(insecure=True))
    service.start()
    print("ready", flush=True)
    for _ in sys.stdin:     # a client has ended
        print(json.dumps(PASSED), flush=True)
        PASSED.clear()
    os._exit(0)


def config(options: argparse.Namespace) -> dict:
    """Of every request."""
    return {"max_new_tokens": options.tokens}


def split(called: float, text: str) -> Sample:
    """The sample of a request whose first text says when the step began and ended."""
    now, (began, ended) = time.monotonic(), map(float, text.split()[0].split("/"))
    PASSED.extend([(called, "called"), (now, "received")])
    return began - called, ended - began, now - ended


def ask(engine, options: argparse.Namespace) -> Sample:
    """One request of a blocking engine."""
    called = time.monotonic()
    _, handle, queue = engine.start_request(MODEL, {"text": options.text}, config(options))
    elements = queue.Get()
    sample = split(called, elements.text)
    for _ in queue:
        pass
    engine.release_request(MODEL, handle)
    return sample


async def ask_async(options: argparse.Namespace) -> list[Sample]:
    """All requests of an AsyncClientEngine."""
    samples = []
    async with AsyncClientEngine(options.address) as engine:
        for _ in range(options.warm + options.requests):
            await asyncio.sleep(options.pause / 1e3)
            called, first = time.monotonic(), True
            async with engine.generate(MODEL, {"text": options.text}, config(options)) as generation:
                async for elements in generation:
                    if first:
                        samples.append(split(called, elements.text))
                        first = False
    return samples


def in_turn(one: Callable[[], Sample], options: argparse.Namespace) -> list[Sample]:
    """All requests, each after a pause."""
    samples = []
    for _ in range(options.warm + options.requests):
        time.sleep(options.pause / 1e3)
        samples.append(one())
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=["run", "serve", "ask"], default="run", help=argparse.SUPPRESS)
    parser.add_argument("--clients", nargs="*", default=["engine", "sync", "async"])
    parser.add_argument("--model", default=shipped_model())
    parser.add_argument("--text", default=WORDS, help="the prompt")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pause", type=float, default=10.0, help="ms between requests (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--warm", type=int, default=20, help="requests before those that count")
    parser.add_argument("--tokens", type=int, default=2, help="of a request")
    parser.add_argument("--stations", action="store_true", help="show where a request is in between")
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.command == "serve":
        if options.stations:
            watch(STATIONS.keys() - OF_CLIENT)
        serve(options)
        return
    if options.command == "ask":
        (client,) = options.clients
        if options.stations:
            watch(OF_ENGINE if client == "engine" else OF_CLIENT)
        if client == "engine":
            engine = engine_for(options)
            samples = in_turn(lambda: ask(engine, options), options)
        elif client == "async":
            samples = asyncio.run(ask_async(options))
        else:
            with ClientEngine(options.address) as engine:
                samples = in_turn(lambda: ask(engine, options), options)
        print(json.dumps([samples[options.warm:], PASSED]), flush=True)
        os._exit(0)
    print(f"{'client':>8}  {'in ms':>6}  {'step ms':>7}  {'out ms':>6}  {'added ms':>8}  {'90 %':>6}")
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/rank0"
        flags = [word for name in ("model", "text", "threads", "pause", "requests", "warm", "tokens")
                 for word in (f"--{name}", str(getattr(options, name)))] + ["--address", address]
        flags += ["--stations"] * options.stations
        with subprocess.Popen([sys.executable, __file__, "serve", *flags], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True) as server:
            server.stdout.readline()
            for client in options.clients:
                done = subprocess.run([sys.executable, __file__, "ask", *flags, "--clients", client], check=True,
                                      stdout=subprocess.PIPE, text=True)
                samples, passed = json.loads(done.stdout)
                server.stdin.write("\n")
                server.stdin.flush()
                of_server = json.loads(server.stdout.readline())
                added = sorted(1e3 * (inward + outward) for inward, _, outward in samples)
                inward, step, outward = (1e3 * statistics.median(part) for part in zip(*samples))
                print(f"{client:>8}  {inward:>6.2f}  {step:>7.2f}  {outward:>6.2f}  {statistics.median(added):>8.2f}  "
                      f"{added[len(added) * 9 // 10]:>6.2f}", flush=True)
                if options.stations and client == "engine":
                    print_stations(passed, OF_ENGINE, options.warm)
                elif options.stations:
                    print_stations(passed + of_server, STATIONS, options.warm)
            server.stdin.close()


if __name__ == "__main__":
    main()
