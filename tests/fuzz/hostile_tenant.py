"""A hostile tenant beside a polite one: `python -m fuzz.hostile_tenant --seconds 600` (in tests/).

With one key of the role `generate`, the hostile tenant sends whatever the wire and HTTP allow. A polite tenant's time
to the first token and times between tokens are compared with those beside a well-behaved neighbour that keeps as many
rows and prompt tokens in flight, half of them through HTTP. The memory of all processes is watched. Clients run in
processes of their own, at the lowest priority where they are not measured, and large requests are made once, so that
their own work counts little.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np

from allspark_client import AllSparkError, ClientEngine, convert
from allspark_client._proto import allspark_pb2 as pb
from support.paths import ROOT, TESTS

MODEL, TENANT_NAMES = "fable", ("polite", "neighbour", "hostile")
KEYS = {name: f"the-key-of-{name}-0123456789" for name in ("admin", "door", *TENANT_NAMES)}
TARGET_MS = 20.0
STREAMS = 2             # of the polite tenant, through the wire and through HTTP each
ROWS, PROMPT = 48, 300  # requests that the neighbour keeps in flight, and tokens of their prompts
MESSAGE = 15 << 20      # the most that servers take is 16 MiB
PAUSE = 0.002


# --- the tenants, each in a process of its own -------------------------------------------------------------------


def ready() -> float:
    """Tells the parent process that this tenant may begin; returns when it must end, on the clock of time.time()."""
    print("ready", flush=True)
    return float(sys.stdin.readline())


def polite(wire: str, http: str) -> dict[str, list[float]]:
    """Streams one answer after the other; returns the seconds to first tokens and between tokens, by way."""
    found: dict[str, list[float]] = {f"{way} {what}": [] for way in ("wire", "http") for what in ("first", "gaps")}
    numbers, until = itertools.count(), ready()
    warm = time.time() + 2

    def note(way: str, began: float, times: list[float]) -> None:
        if times and time.time() > warm:
            found[f"{way} first"].append(times[0] - began)
            found[f"{way} gaps"] += np.diff(times).tolist()

    def by_wire(engine: ClientEngine) -> None:
        while time.time() < until:
            began, times = time.perf_counter(), []
            results = engine.start_request(MODEL, {"text": f"Once there were {next(numbers)} foxes in a forest, and"},
                                           {"max_new_tokens": 40, "early_stopping": False})[2]
            for _ in results:
                times.append(time.perf_counter())
            note("wire", began, times)

    def by_http(client: httpx.Client) -> None:
        while time.time() < until:
            began, times = time.perf_counter(), []
            body = {"model": MODEL, "prompt": f"Once there were {next(numbers)} bears in a forest, and", "stream": True,
                    "max_tokens": 40, "ignore_eos": True}
            with client.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200, answer.read()
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        times.append(time.perf_counter())
            note("http", began, times)

    with ClientEngine(wire, token=KEYS["polite"]) as engine, httpx.Client(
            base_url=http, timeout=120, headers={"authorization": f"Bearer {KEYS['polite']}"}) as client:
        threads = [threading.Thread(target=work) for _ in range(STREAMS)
                   for work in (lambda: by_wire(engine), lambda: by_http(client))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return found


def neighbour(wire: str, http: str) -> dict[str, int]:
    """Keeps ROWS requests in flight, half of them through HTTP."""
    done, until = itertools.count(), ready()

    def by_wire(ids: list[int]) -> None:
        config = {"max_new_tokens": 60, "early_stopping": False}
        for _ in engine.start_request(MODEL, {"input_ids": ids}, config)[2]:
            pass

    def by_http(ids: list[int]) -> None:
        body = {"model": MODEL, "prompt": ids, "stream": True, "max_tokens": 60, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            for _ in answer.iter_raw():
                pass

    def work(way: Callable[[list[int]], None]) -> None:
        rng = random.Random(threading.get_ident())
        while time.time() < until:
            way([rng.randrange(100, 1000) for _ in range(PROMPT)])
            next(done)

    with ClientEngine(wire, token=KEYS["neighbour"]) as engine, httpx.Client(
            base_url=http, timeout=120, headers={"authorization": f"Bearer {KEYS['neighbour']}"}) as client:
        threads = [threading.Thread(target=work, args=(way,)) for way in (by_wire, by_http) for _ in range(ROWS // 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return {"requests": next(done)}


class Attacks:
    """What the hostile tenant does, each in a loop of its own. Errors are expected."""

    def __init__(self, wire: str, http: str):
        self._wire, self.until = wire, 0.0
        self._rng = random.Random(7)
        self._http = httpx.Client(base_url=http, timeout=60, headers={"authorization": f"Bearer {KEYS['hostile']}"},
                                  limits=httpx.Limits(max_connections=200))
        self._address = http.removeprefix("http://")
        self._numbers = itertools.count()
        # Large requests are made once: what the tenant's own work takes should not count.
        text, parts = "x " * (MESSAGE // 2), '{"type": "text", "text": ""},' * 100_000
        chats = ([pb.ChatMessage(role="user", content="x")] * 60_000,
                 [pb.ChatMessage(json='{"role": "user", "content": ' + "[" * 100 + "]" * 100 + "}")] * 1000,
                 [pb.ChatMessage(json='{"role": "user", "content": [' + parts + "{}]}")])
        self._large = {
            "texts": [self._start(text=text)],
            "lists": [self._start(input_ids=pb.TokenIds(ids=[5] * MESSAGE)), self._start(generated=[1] * MESSAGE),
                      self._start(samples=[pb.TokenIds()] * (MESSAGE // 2))],
            "vocabularies": [self._start(config=pb.GenerateConfig(vocab={f"{i} token": i for i in range(150_000)},
                                                                  response_format_json='{"type": "json_object"}'))],
            "chats": [self._start(text=None, chat=pb.Chat(messages=chat)) for chat in chats],
        }
        self._tokenize = pb.TokenizeRequest(request=self._request(text=text)).SerializeToString()
        self._body = json.dumps({"model": MODEL, "prompt": text[:12 << 20]}).encode()
        self._bombs = [(what % ",".join(["{}"] * count)).encode() for count in (100_000, 1_000_000) for what in (
            '{"prompt": [%s]}', '{"messages": [%s]}', '{"model": "fable", "input": [%s]}')]

    def all(self) -> dict[str, Callable[[], object]]:
        """The attacks by name."""
        return {name.removeprefix("do_"): getattr(self, name) for name in dir(self) if name.startswith("do_")}

    # the wire

    @contextlib.contextmanager
    def _session(self) -> Iterator[Callable[[pb.GenerateRequest | bytes | None], None]]:
        """A session whose answers nobody reads; the function that it yields sends a request, or releases all."""
        outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        ids, sent = itertools.count(1), []
        with self._channel() as channel:
            hello = pb.SessionRequest(hello=pb.Hello(protocol=convert.PROTOCOL, client="hostile"))
            outbox.put(hello.SerializeToString())
            call = channel.stream_stream("/allspark.Allspark/Session")(iter(outbox.get, None), metadata=self._key)

            def send(request: pb.GenerateRequest | bytes | None) -> None:
                if request is None:
                    for number in sent:
                        outbox.put(pb.SessionRequest(release=number).SerializeToString())
                    sent.clear()
                    return
                sent.append(next(ids))
                start = pb.SessionRequest(start=pb.StartRequest(id=sent[-1]))
                if isinstance(request, bytes):
                    outbox.put(start.SerializeToString() + request)     # fields of one message may come in parts
                else:
                    start.start.request.CopyFrom(request)
                    outbox.put(start.SerializeToString())

            try:
                next(iter(call))
                yield send
                self._wait(5)
            finally:
                outbox.put(None)
                call.cancel()

    @property
    def _key(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {KEYS['hostile']}"),)

    def _channel(self) -> grpc.Channel:
        return grpc.insecure_channel(self._wire, [("grpc.use_local_subchannel_pool", 1),
                                                  ("grpc.default_authority", "localhost"),
                                                  ("grpc.max_send_message_length", -1)])

    def _start(self, **fields: Any) -> bytes:
        """The message that starts a request, but for its id."""
        return pb.SessionRequest(start=pb.StartRequest(request=self._request(**fields))).SerializeToString()

    def _send_large(self, kind: str, count: int = 1) -> None:
        with self._session() as send:
            for _ in range(count):
                send(self._rng.choice(self._large[kind]))

    def _wait(self, seconds: float) -> None:
        time.sleep(max(0.0, min(seconds, self.until - time.time())))

    def _request(self, **fields: Any) -> pb.GenerateRequest:
        return pb.GenerateRequest(**{"model": MODEL, "text": f"Once {next(self._numbers)}", **fields})

    def do_large_texts(self) -> None:
        self._send_large("texts", 4)

    def do_large_lists(self) -> None:
        self._send_large("lists")

    def do_vocabularies(self) -> None:
        self._send_large("vocabularies")

    def do_templates(self) -> None:
        self._send_large("chats", 4)

    def do_grammars(self) -> None:
        properties = {f"f{i}": {"type": "string", "pattern": f"^[a-z]{{{i % 30}}}(ab|cd)*$"} for i in range(500)}
        with self._session() as send:
            for _ in range(20):
                n = next(self._numbers)
                form = self._rng.choice([
                    {"type": "regex", "regex": f"((a{{1000}}){{1000}}){{{n}}}"},
                    {"type": "choice", "choice": [f"{n} {i}" * 20 for i in range(3000)]},
                    {"type": "json_schema", "json_schema": {"type": "object", "properties": {
                        **properties, f"n{n}": {}}}},
                    {"type": "json_object"}])
                config = pb.GenerateConfig(response_format_json=json.dumps(form), max_new_tokens=200)
                send(self._request(config=config))

    def do_many_samples(self) -> None:
        with self._session() as send:
            for _ in range(8):
                send(self._request(config=pb.GenerateConfig(n=128, max_new_tokens=900, early_stopping=False,
                                                            logprobs=True, top_logprobs=20)))

    def do_unread_streams(self) -> None:
        with self._session() as send:
            for _ in range(200):
                send(self._request(config=pb.GenerateConfig(max_new_tokens=900, early_stopping=False, logprobs=True,
                                                            top_logprobs=20)))

    def do_cancelled_starts(self) -> None:
        with self._session() as send:
            for _ in range(2000):
                send(self._request(input_ids=pb.TokenIds(ids=[self._rng.randrange(100, 1000) for _ in range(300)])))
                if self._rng.random() < 0.2:
                    send(None)

    def do_made_up_resumptions(self) -> None:
        with self._session() as send:
            for _ in range(200):
                ids = [self._rng.randrange(100, 1000) for _ in range(900)]
                send(self._request(input_ids=pb.TokenIds(ids=ids), resumed=True, deaths=self._rng.choice([1, 2]),
                                   ticket=os.urandom(34), config=pb.GenerateConfig(n=self._rng.choice([1, 16]))))

    def do_unary_calls(self) -> None:
        with self._channel() as channel:
            call = channel.stream_stream("/allspark.Allspark/Tokenize", None, None)
            calls = [call(iter([self._tokenize]), metadata=self._key, timeout=20) for _ in range(4)]
            for one in calls:
                list(one)

    def do_garbage(self) -> None:
        with self._channel() as channel:
            call = channel.stream_stream("/allspark.Allspark/Session", None, None)
            for _ in range(50):
                one = call(iter([self._rng.randbytes(1000)]), metadata=self._key, timeout=5)
                with contextlib.suppress(grpc.RpcError):
                    list(one)

    # HTTP

    def do_error_bombs(self) -> None:
        path = self._rng.choice(["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
        self._post(path, self._rng.choice(self._bombs))

    def do_large_bodies(self) -> None:
        self._post("/v1/completions", self._body)

    def _post(self, path: str, body: bytes) -> None:
        self._http.post(path, content=body, headers={"content-type": "application/json"})

    def do_unread_answers(self) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                body = {"model": MODEL, "prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True, "n": 8}
                stack.enter_context(self._http.stream("POST", "/v1/completions", json=body))
            self._wait(5)

    def do_wide_requests(self) -> None:
        body = {"model": MODEL, "prompt": ["Once"] * 100, "max_tokens": 900, "n": 16, "ignore_eos": True}
        self._http.post("/v1/completions", json=body, timeout=5)

    def do_trickling_bodies(self) -> None:
        import socket
        host, _, port = self._address.rpartition(":")
        head = (f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEYS['hostile']}\r\n"
                "content-type: application/json\r\ncontent-length: 10000000\r\n\r\n")
        with contextlib.ExitStack() as stack:
            for _ in range(40):
                connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
                connection.sendall(head.encode() + b"[" * 1000)
            self._wait(3)


def hostile(wire: str, http: str, only: str = "") -> dict[str, Any]:
    """Runs all attacks at the same time; returns how often each ran and its errors."""
    attacks, counts = Attacks(wire, http), {}
    until = attacks.until = ready()

    def work(name: str, attack: Callable[[], object]) -> None:
        counts[name] = {"runs": 0}
        while time.time() < until:
            try:
                attack()
            except (AllSparkError, grpc.RpcError, httpx.HTTPError, OSError, StopIteration) as error:
                kind = error.code().name if isinstance(error, grpc.RpcError) else type(error).__name__
                counts[name][kind] = counts[name].get(kind, 0) + 1
                time.sleep(0.05)
            counts[name]["runs"] += 1
            time.sleep(PAUSE)

    threads = [threading.Thread(target=work, args=(name, attack), daemon=True)
               for name, attack in attacks.all().items() if not only or name in only.split(",")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until + 3 - time.time()))
    return counts


TENANTS: dict[str, Callable[..., Any]] = {"polite": polite, "neighbour": neighbour, "hostile": hostile}


# --- the servers, and what is measured ---------------------------------------------------------------------------


class Memory:
    """Watches the memory of this process's descendants, except for those in `tenants`."""

    def __init__(self, tenants: list[int]):
        self._tenants, self.peak, self._over = tenants, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.25):
            self.peak = max(self.peak, sum(map(_resident, self._servers())))

    def close(self) -> None:
        """Stops watching."""
        self._over.set()
        self._thread.join()


    def _servers(self) -> list[int]:
        found = [os.getpid()]
        for one in found:
            for task in Path(f"/proc/{one}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    found += (pid for pid in map(int, task.read_text().split()) if pid not in self._tenants)
        return found[1:]


def _resident(pid: int) -> int:
    """Bytes that are the process's own: what a fork shares with its parent does not count twice."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return 0


@contextlib.contextmanager
def servers(folder: Path, *options: str) -> Iterator[tuple[str, str]]:
    """A group with the shipped model, `options` beside its own, and an HTTP server; yields both addresses."""
    from allspark_launch.group.background import background_group, shipped_model
    from support.http_helpers import http_server_for

    tokens, pool_tokens = folder / "tokens", folder / "pool-tokens"
    roles = dict.fromkeys(TENANT_NAMES, "generate")
    tokens.write_text("".join(f"{roles.get(name, name)} {key}\n" for name, key in KEYS.items()))
    pool_tokens.write_text(f"door {KEYS['door']}\n")
    for file in (tokens, pool_tokens):
        file.chmod(0o600)
    model = ["--model", str(shipped_model()), "--max-length", "1024", "--token-file", str(tokens),
             "--set", f"target_token_latency={TARGET_MS}", *options]
    with background_group(model, timeout=120.0) as group, http_server_for(
            group.addresses[0], token_file=str(tokens), pool_token_file=str(pool_tokens)) as http:
        yield group.addresses[0], f"http://{http}"


def phase(name: str, wire: str, http: str, seconds: float, only: str = "") -> dict[str, Any]:
    """The polite tenant beside `name`; returns what it measured, and what the other one did."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "launch", TESTS)))}

    def start(role: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "fuzz.hostile_tenant", "--role", role, "--wire", wire, "--http", http,
                 "--only", only]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
                                   cwd=TESTS)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    processes = {role: start(role) for role in (name, "polite")}
    memory, until = Memory([process.pid for process in processes.values()]), time.time() + seconds + 2
    answers = {}
    for process in processes.values():
        assert process.stdin is not None
        print(until, file=process.stdin, flush=True)
    for role, process in processes.items():
        answers[role] = json.loads(process.communicate(timeout=seconds + 120)[0])
    memory.close()
    return {"polite": answers["polite"], "other": answers[name], "memory": memory.peak}


def measure(seconds: float, only: str = "", rounds: int = 2) -> dict[str, Any]:
    """Both phases in turn, `rounds` times, and their ratios."""
    found: dict[str, list[dict[str, Any]]] = {"neighbour": [], "hostile": []}
    with tempfile.TemporaryDirectory() as folder, servers(Path(folder)) as (wire, http):
        for _ in range(rounds):
            for name, phases in found.items():
                phases.append(phase(name, wire, http, seconds / rounds, only if name == "hostile" else ""))
        with ClientEngine(wire, token=KEYS["admin"]) as engine:
            restarts = engine._server_info().restarts
    result: dict[str, Any] = {"restarts": restarts}
    for name, phases in found.items():
        polite = {what: [value for one in phases for value in one["polite"][what]] for what in phases[0]["polite"]}
        result[name] = {
            "polite": {what: _figures(values) for what, values in polite.items()},
            "memory": max(one["memory"] for one in phases), "other": [one["other"] for one in phases]}
    beside = [result[name]["polite"] for name in ("hostile", "neighbour")]
    result["ratios"] = {what: {p: beside[0][what][p] / beside[1][what][p] for p in ("p50", "p99", "max")}
                        for what in beside[0]}
    return result


def _figures(values: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values, [50, 99]).tolist() if values else (float("nan"), float("nan"))
    return {"count": len(values), "p50": p50, "p99": p99, "max": max(values, default=float("nan"))}


def main() -> None:
    """Measures and prints, or is one of the tenants."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="for each of the two phases")
    parser.add_argument("--only", default="", help="names of attacks, with commas; default: all")
    for name in ("--role", "--wire", "--http"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=2, help="how often the phases alternate")
    a = parser.parse_args()
    if not a.role:
        print(json.dumps(measure(a.seconds, a.only, a.rounds), indent=1))
        return
    if a.role != "polite":
        os.nice(19)
    more = {"only": a.only} if a.role == "hostile" else {}
    print(json.dumps(TENANTS[a.role](a.wire, a.http, **more)), flush=True)
    os._exit(0)     # threads may still wait for answers


if __name__ == "__main__":
    main()
