"""Measures how much CPU time and memory clients cost a server, and how much they slow each other down.

    bench_clients.py [--model DIR] [--only idle connections clients service] [--idle 10000] [--busy 256] [--rounds 3]
                     [--seconds 10] [--dtype bfloat16] [--cpus 1]

Prints one table of measured figures beside their targets. One thread computes, so that a machine with two cores has a
spare one. Clients are other processes (crowd.py) on a Unix socket. The two sides of a comparison run in turn, and the
median of the rounds' ratios counts.

idle: CPU time of all processes of an idle group of two ranks; and how much later a first token comes after 10 idle
seconds than right after a request.

connections: memory, beyond the model's, of many idle connections with open sessions, and of busy ones beside them.

clients: the p99 time between tokens of 16 well-behaved clients beside each kind of badly behaved one, relative to that
beside a well-behaved one with as many requests; a second well-behaved one shows the noise.

service: tokens/s of 64 requests of one client and of 64 clients through the service, relative to an Engine in one
process; and how much later a first token comes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from allspark_client import ClientEngine
from allspark_client.config import AsModelConfig, GenerateConfig
from allspark_client.request import RequestSpec
from allspark_launch.commands.top import table
from allspark_launch.group.background import background_group, shipped_model

CROWD = Path(__file__).with_name("crowd.py")
MIB = 1 << 20
REQUESTS, TOKENS, PROMPT = 64, 64, 16
GOALS = {"memory": 1024.0, "gaps": 1.2, "throughput": 0.98, "first": 1.0, "idle": 1.0}


class Report:
    """Rows of the table."""

    def __init__(self) -> None:
        self._rows = [("what", "measured", "goal", "")]

    def add(self, what: str, measured: str, goal: str = "", met: bool = True) -> None:
        self._rows.append((what, measured, goal, "" if met else "short"))
        print(f"{what}: {measured}", file=sys.stderr, flush=True)

    def __str__(self) -> str:
        return "\n".join(table(self._rows))


def fields(options: argparse.Namespace) -> dict[str, Any]:
    return {"model_name": "m", "model_path": str(options.model), "weight_dtype": options.dtype,
            "engine_max_batch": max(options.busy, REQUESTS + 32), "engine_max_length": 1024, "num_threads": 1}


class Server:
    """A group and its processes."""

    def __init__(self, address: str, supervisor: int):
        self.address, self._supervisor = address, psutil.Process(supervisor)
        ranks = [p for p in self._supervisor.children(recursive=True) if p.cmdline()[1:3] == ["-m", "allspark_server"]]
        self.rank0 = ranks[0]

    @property
    def memory(self) -> float:
        """MiB that only rank 0 has."""
        return self.rank0.memory_full_info().uss / MIB

    def cpu(self) -> float:
        """CPU seconds of all processes so far, by the scheduler's clock, because ticks are too coarse."""
        spent = 0
        for process in (self._supervisor, *self._supervisor.children(recursive=True)):
            for thread in Path(f"/proc/{process.pid}/task").iterdir():
                with contextlib.suppress(OSError):
                    spent += int((thread / "schedstat").read_text().split()[0])
        return spent / 1e9

    @contextlib.contextmanager
    def crowd(self, kind: str, *words: str | int) -> Iterator[Callable[[], dict[str, Any]]]:
        """Starts clients of a kind and waits until all are connected; yields a function that ends or awaits them and
        returns their report.
        """
        command = [sys.executable, str(CROWD), self.address, kind, *map(str, words)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              start_new_session=True) as process:
            try:
                if not process.stdout.readline():
                    raise RuntimeError(f"clients of kind {kind} were not greeted")
                yield lambda: json.loads(process.stdout.readline())
            finally:
                process.kill()


@contextlib.contextmanager
def server(options: argparse.Namespace, ranks: int = 1) -> Iterator[Server]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"models": [fields(options)], "ranks": ranks, "cpus_per_rank": options.cpus}, file)
        file.flush()
        with background_group(["--config", file.name]) as group:
            yield Server(group.addresses[0], group.supervisor_pid)


# --- what is measured --------------------------------------------------------------------------------------------


def idle(options: argparse.Namespace, report: Report) -> None:
    with server(options, ranks=2) as group, ClientEngine(group.address) as engine:
        first_token(engine)
        before, began = group.cpu(), time.perf_counter()
        time.sleep(20)
        share = 100 * (group.cpu() - before) / (time.perf_counter() - began)
        report.add("an idle group of 2 ranks, all processes", f"{share:.2f} % of a core", "< 1 %",
                   share < GOALS["idle"])
        early, late = [], []
        for _ in range(2 * options.rounds):
            first_token(engine)
            early.append(first_token(engine))
            time.sleep(10)
            late.append(first_token(engine))
        later = 1e3 * statistics.median(after - before for before, after in zip(early, late))
        report.add("first token after 10 s without requests",
                   f"{later:+.2f} ms of {1e3 * statistics.median(early):.2f}", "<= 1 ms later", later <= GOALS["first"])


def first_token(engine: ClientEngine, prompt: int = PROMPT) -> float:
    """Seconds to the first token of a request that runs alone."""
    began = time.perf_counter()
    ids = [int(began * 1e6) // 7**i % 1000 + 10 for i in range(prompt)]     # no prefix that was there
    _, handle, tokens = engine.start_request("m", {"input_ids": ids}, {"max_new_tokens": 4, "early_stopping": False})
    tokens.Get()
    seconds = time.perf_counter() - began
    while tokens.Get() is not None:
        pass
    engine.release_request("m", handle)
    return seconds


def connections(options: argparse.Namespace, report: Report) -> None:
    with server(options) as group:
        with group.crowd("busy", "--clients", 4, "--seconds", 2) as end:    # what the first ones bring into being
            end()
        before = group.memory
        with group.crowd("idle", "--clients", options.idle):
            held = group.memory - before
            start, began = sum(group.rank0.cpu_times()[:2]), time.perf_counter()
            time.sleep(10)
            share = 100 * (sum(group.rank0.cpu_times()[:2]) - start) / (time.perf_counter() - began)
            report.add(f"{options.idle} idle connections",
                       f"{held:.0f} MiB, {1024 * held / options.idle:.1f} KiB each; {share:.1f} % of a core")
            most = held
            words = ["--clients", options.busy, "--seconds", options.seconds, "--tokens", TOKENS]
            with group.crowd("busy", *words) as end:
                for _ in range(int(2 * options.seconds)):
                    time.sleep(0.5)
                    most = max(most, group.memory - before)
                seen = end()
            report.add(f"{options.busy} busy ones beside them",
                       f"{most:.0f} MiB in all, {seen['tokens_per_second']:.0f} tokens/s, {seen['lost']} lost",
                       "< 1,024 MiB", most < GOALS["memory"] and not seen["lost"])


def clients(options: argparse.Namespace, report: Report) -> None:
    """Measures each kind of client between two turns of its well-behaved counterpart."""
    many = ["--each", 8, "--tokens", 1000, "--top", 20]
    kinds = {"another polite one, which is the noise": ("busy", ["--each", 8]),
             "one that never reads": ("deaf", many), "one that never releases": ("keeps", ["--each", 8]),
             "one that sends the largest message": ("large", [])}
    with server(options) as group:
        for name, (kind, words) in kinds.items():
            gaps: dict[str, list[float]] = {"polite": [], "bad": []}
            most, sent = 0.0, 0
            before = group.memory
            for _ in range(options.rounds):
                for turn in ("polite", "bad"):
                    other = [kind, *words] if turn == "bad" else ["busy", *words] if words else None
                    with contextlib.ExitStack() as stack:
                        if other:
                            more = stack.enter_context(group.crowd(*other, "--seconds", options.seconds + 3))
                        end = stack.enter_context(group.crowd("busy", "--clients", 16, "--seconds", options.seconds + 1,
                                                              "--warm", 1, "--tokens", TOKENS))
                        gaps[turn].append(end()["gaps"]["p99"])
                        most = max(most, group.memory - before)
                        if turn == "bad":
                            sent += more()["sent"]
            ratio = statistics.median(b / p for p, b in zip(gaps["polite"], gaps["bad"]))
            report.add(f"16 beside {name}", f"p99 between tokens {ratio:.2f} x ({statistics.median(gaps['bad']):.1f} "
                       f"ms); {sent} sent, {most:+.0f} MiB", "<= 1.2 x", ratio <= GOALS["gaps"])


def service(options: argparse.Namespace, report: Report) -> None:
    rates: dict[str, list[float]] = {"engine": [], "one client": [], f"{REQUESTS} clients": []}
    firsts: dict[str, list[float]] = {"engine": [], "client": []}
    words = ["--seconds", options.seconds + 2, "--warm", 2, "--tokens", 200]
    alone = [sys.executable, __file__, "engine", "--model", options.model, "--dtype", options.dtype, "--cpus",
             options.cpus]
    # A session of its own, as the group has: the kernel shares processors out by session.
    with server(options) as group, subprocess.Popen([*map(str, alone)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                                    text=True, start_new_session=True) as process:
        process.stdout.readline()

        def ask(what: str) -> list[float]:
            process.stdin.write(what + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        with ClientEngine(group.address) as engine:
            for _ in range(10 * options.rounds):
                firsts["engine"] += ask("first")
                firsts["client"] += [first_token(engine) for _ in range(5)]
        for _ in range(options.rounds):
            rates["engine"] += ask(f"rate {options.seconds + 2} 2")
            with group.crowd("busy", "--each", REQUESTS, *words) as end:
                rates["one client"].append(end()["tokens_per_second"])
            with group.crowd("busy", "--clients", REQUESTS, *words) as end:
                rates[f"{REQUESTS} clients"].append(end()["tokens_per_second"])
        process.stdin.close()
    for name, found in rates.items():
        if name != "engine":
            ratio = statistics.median(one / base for one, base in zip(found, rates["engine"]))
            report.add(f"{REQUESTS} requests of {name}",
                       f"{ratio:.3f} of an engine's {max(rates['engine']):.0f} tokens/s", ">= 0.98",
                       ratio >= GOALS["throughput"])
    later = 1e3 * (statistics.median(firsts["client"]) - statistics.median(firsts["engine"]))
    report.add("first token by the service", f"{later:+.2f} ms of {1e3 * statistics.median(firsts['engine']):.2f}",
               "<= 1 ms later", later <= GOALS["first"])


# --- an engine without a service ---------------------------------------------------------------------------------


class Sink:
    """Counts tokens; records when the first token and the end came."""

    def __init__(self, ended: queue.SimpleQueue):
        self.began, self.first, self.tokens, self.handle = time.perf_counter(), 0.0, 0, 0
        self._ended = ended

    def on_token(self, *_) -> None:
        self.first = self.first or time.perf_counter() - self.began
        self.tokens += 1

    def on_finish(self, *_) -> None:
        self._ended.put(self)

    def __getattr__(self, name):  # what sinks hear besides
        return lambda *_, **__: None


class Alone:
    """An engine that this process asks directly."""

    def __init__(self, engine):
        self._engine, self._number = engine, 0

    def submit(self, tokens: int, ended: queue.SimpleQueue) -> Sink:
        self._number += 1
        sink = Sink(ended)
        ids = [self._number * 7919 // 7**i % 1000 + 10 for i in range(PROMPT)]
        config = GenerateConfig(max_new_tokens=tokens, early_stopping=False)
        sink.handle = self._engine.submit(RequestSpec("m", input_ids=ids, config=config), sink)
        return sink

    def first(self) -> float:
        """Seconds to the first token of a request that runs alone."""
        ended: queue.SimpleQueue = queue.SimpleQueue()
        sink = self.submit(4, ended)
        ended.get()
        self._engine.release(sink.handle)
        return sink.first

    def rate(self, seconds: float, warm: float) -> float:
        """Tokens/s of as many requests as a client has at once, after a warm-up."""
        ended: queue.SimpleQueue = queue.SimpleQueue()
        live = [self.submit(200, ended) for _ in range(REQUESTS)]
        done, began = 0, time.perf_counter()
        counts = []
        for until in (began + warm, began + seconds):
            while time.perf_counter() < until:
                with contextlib.suppress(queue.Empty):
                    sink = ended.get(timeout=0.02)
                    self._engine.release(sink.handle)
                    live.remove(sink)
                    done += sink.tokens
                    live.append(self.submit(200, ended))
            counts.append((time.perf_counter(), done + sum(sink.tokens for sink in live)))
        for sink in live:
            self._engine.release(sink.handle)
        return (counts[1][1] - counts[0][1]) / (counts[1][0] - counts[0][0])


def engine_alone(options: argparse.Namespace) -> None:
    """Executes its input line by line: "first", "rate SECONDS WARM"."""
    from allspark_server.engine.engine import Engine
    from allspark_server.runtime.group import Group
    # pinned as the group's rank
    with Engine(group=Group(sorted(os.sched_getaffinity(0))[:options.cpus])) as engine:
        engine.install_model(AsModelConfig.from_dict(fields(options)).validate())
        engine.start_model("m")
        alone = Alone(engine)
        print("ready", flush=True)
        for line in sys.stdin:
            what, *values = line.split()
            found = [alone.first() for _ in range(5)] if what == "first" else [alone.rate(*map(float, values))]
            print(json.dumps(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=["engine"], help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, default=shipped_model())
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cpus", type=int, default=1, help="of each rank; one of them computes (default: 1)")
    parser.add_argument("--only", nargs="*", default=["idle", "connections", "clients", "service"])
    parser.add_argument("--idle", type=int, default=10_000)
    parser.add_argument("--busy", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    if options.command == "engine":
        engine_alone(options)
        return
    report = Report()
    for name in options.only:
        globals()[name](options, report)
    print(report)


if __name__ == "__main__":
    main()
