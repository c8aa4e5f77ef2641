"""Measures the cost of the HTTP server, in front of a scripted engine: bench_http.py {against-grpc,streams,rate} ….

The scripted engine is a gRPC server that sends the same word to every request once per interval, so that only the HTTP
server is measured. It is compared with AsyncClientEngine on the same streams.

    against-grpc   64 streams, interleaved runs: tokens/s of HTTP relative to gRPC's, and how much later the first
                   token comes: of 64 that begin at once on open connections, of one that begins among 64, of one alone
    streams        1,000 streams through one worker: its resident memory, idle and with all of them open
    rate           256 streams as fast as the script allows: tokens/s, and the worker's CPU time per token, which
                   gives the rate of N workers with a core each
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import grpc.aio
import psutil

from allspark_client import AsyncClientEngine, convert
from allspark_client._proto import allspark_pb2 as pb
from allspark_client.types import ModelInfo
from allspark_launch.group.http_server import HttpOptions, http_server

MODEL, WORD, PROMPT = "script", " word", 16


# --- the script's engine -----------------------------------------------------------------------------------------


class Session:
    """One client's stream: a token for each request when it comes, so that first tokens do not wait for an interval,
    and then in every interval one message with a token for each, assembled from constant bytes.
    """

    def __init__(self, interval: float):
        self._interval, self._live = interval, {}
        self._out: asyncio.Queue[bytes] = asyncio.Queue(8)

    async def serve(self, requests):
        """The Session call."""
        reading = asyncio.ensure_future(self._read(requests))
        stepping = asyncio.ensure_future(self._step())
        try:
            yield pb.SessionResponse(info=pb.ServerInfo(
                protocol=convert.PROTOCOL, rank_nums=1, models=[pb.ModelState(name=MODEL, running=True)])
            ).SerializeToString()
            while True:
                yield await self._out.get()
        finally:
            reading.cancel()
            stepping.cancel()

    async def _read(self, requests):
        async for data in requests:
            message = pb.SessionRequest.FromString(data)
            if message.HasField("start"):
                request = message.start
                started = pb.RequestEvent(id=request.id, started=pb.Started(prompt_ids=range(PROMPT)))
                token = pb.RequestEvent(id=request.id, elements=[pb.Elements(ids=[1], text=WORD)])
                self._live[request.id] = [
                    request.request.config.max_new_tokens, pb.SessionResponse(events=[token]).SerializeToString()]
                await self._out.put(pb.SessionResponse(events=[started]).SerializeToString()
                                    + b"".join(self._token(request.id)))
            else:
                self._live.pop(message.release or message.stop, None)

    async def _step(self):
        while True:
            await asyncio.sleep(self._interval)
            parts = [part for name in list(self._live) for part in self._token(name)]
            if parts:
                await self._out.put(b"".join(parts))

    def _token(self, name: str) -> list[bytes]:
        """A request's next token, and its end behind the last one."""
        entry = self._live[name]
        entry[0] -= 1
        if entry[0]:
            return [entry[1]]
        del self._live[name]
        end = pb.RequestEvent(id=name, status=pb.GENERATE_FINISHED, finish_reason="length",
                              stat=pb.RequestStat(context_token_length=PROMPT))
        return [entry[1], pb.SessionResponse(events=[end]).SerializeToString()]


def serve_script(address: str, interval: float) -> None:
    """Runs the scripted engine until the process is ended."""
    info = convert.model_info_to_pb(ModelInfo(name=MODEL, max_length=1 << 20, vocab_size=1000, model_hash="script"))
    answers = {"GetModelInfo": info, "GetServerInfo": pb.ServerInfo(
        protocol=convert.PROTOCOL, models=[pb.ModelState(name=MODEL, running=True)])}

    def once(answer):
        async def call(_, __):
            return answer.SerializeToString()
        return grpc.unary_unary_rpc_method_handler(call)

    async def session(requests, _):
        async for message in Session(interval).serve(requests):
            yield message

    async def run():
        server = grpc.aio.server()
        methods = {name: once(answer) for name, answer in answers.items()}
        methods["Session"] = grpc.stream_stream_rpc_method_handler(session)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("allspark.Allspark", methods),))
        server.add_insecure_port(address)
        await server.start()
        print("ready", flush=True)
        await server.wait_for_termination()

    asyncio.run(run())


@contextlib.contextmanager
def script(interval: float):
    """Runs the scripted engine in a process of its own; yields its address."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/script"
        process = subprocess.Popen([sys.executable, __file__, "serve", "--address", address, "--interval",
                                    str(interval)], stdout=subprocess.PIPE)
        try:
            process.stdout.readline()
            yield address
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


@contextlib.contextmanager
def http_endpoint(address: str, workers: int = 1):
    """Runs an HTTP server in front of it; yields its address and its workers."""
    with http_server(HttpOptions(address="127.0.0.1:0", workers=workers, insecure=True, pool=[address])) as running:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            found = [psutil.Process(pid) for pid in running.pids]
            if len(found) == workers and asyncio.run(answers(running.address)):
                break
            time.sleep(0.2)
        yield running.address, found


# --- who asks ----------------------------------------------------------------------------------------------------


async def answers(address: str) -> bool:
    """Whether a server answers."""
    reader, writer = await connect(address)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    line = await reader.readline()
    writer.close()
    return b" 200 " in line


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(address: str) -> Connection:
    """A connection to a server."""
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def http_stream(address: str, tokens: int, connection: Connection | None = None) -> tuple[float, int]:
    """Streams one completion, on a new connection or on one that is open; returns seconds to the first token and the
    number of tokens.
    """
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": tokens, "stream": True}).encode()
    began = time.perf_counter()
    reader, writer = connection or await connect(address)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
                 + str(len(body)).encode() + b"\r\n\r\n" + body)
    first, count, rest = 0.0, 0, b""
    while b"[DONE]" not in rest:
        data = await reader.read(65536)
        if not data:
            raise RuntimeError(f"the server ended a stream after {count} tokens: {rest[-300:]}")
        rest = rest[-64:] + data
        count += data.count(b'"text":" word')
        if count and not first:
            first = time.perf_counter() - began
    writer.close()
    return first, count


async def grpc_stream(engine: AsyncClientEngine, tokens: int) -> tuple[float, int]:
    """The same with the engine's own client."""
    began, first, count = time.perf_counter(), 0.0, 0
    async with engine.generate(MODEL, {"text": "x"}, {"max_new_tokens": tokens}) as generation:
        async for elements in generation:
            count += len(elements.ids_from_generate)
            first = first or time.perf_counter() - began
    return first, count


async def together(streams: list, spread: float = 0.0) -> tuple[float, float]:
    """Tokens/s of all streams, and the median seconds to their first tokens. They begin within `spread` seconds."""
    async def later(stream, delay: float):
        await asyncio.sleep(delay)
        return await stream

    began = time.perf_counter()
    done = await asyncio.gather(*(later(stream, spread * i / len(streams)) for i, stream in enumerate(streams)))
    seconds = time.perf_counter() - began
    return sum(count for _, count in done) / seconds, statistics.median(first for first, _ in done)


# --- what is measured --------------------------------------------------------------------------------------------


def against_grpc(options: argparse.Namespace) -> dict:
    async def both(address: str, http: str) -> dict:
        pairs = []
        async with AsyncClientEngine(address) as engine:
            for _ in range(options.runs):
                one = await together([grpc_stream(engine, options.tokens) for _ in range(options.streams)])
                # Open connections, as the gRPC client has one: to open 64 takes this process 20 ms.
                open_ones = [await connect(http) for _ in range(options.streams)]
                two = await together([http_stream(http, options.tokens, one) for one in open_ones])
                spread = options.interval * options.tokens  # the last begins when the first ends
                three = await together([grpc_stream(engine, options.tokens) for _ in range(2 * options.streams)],
                                       2 * spread)
                four = await together([http_stream(http, options.tokens) for _ in range(2 * options.streams)],
                                      2 * spread)
                alone = [(await grpc_stream(engine, 1))[0] for _ in range(20)]
                alone_http = [(await http_stream(http, 1))[0] for _ in range(20)]
                pairs.append((one, two, four[1] - three[1], statistics.median(alone), statistics.median(alone_http)))
        return {
            "grpc_tokens_per_second": round(statistics.median(one[0] for one, *_ in pairs), 1),
            "http_part_of_it": round(statistics.median(two[0] / one[0] for one, two, *_ in pairs), 4),
            "all_at_once_first_token_later_ms": round(
                1e3 * statistics.median(two[1] - one[1] for one, two, *_ in pairs), 2),
            "among_streams_first_token_later_ms": round(1e3 * statistics.median(later for *_, later, _, _ in pairs), 2),
            "alone_first_token_later_ms": round(1e3 * statistics.median(h - g for *_, g, h in pairs), 2),
        }

    with script(options.interval) as address, http_endpoint(address, options.workers) as (http, _):
        return {"workers": options.workers, **asyncio.run(both(address, http))}


def streams(options: argparse.Namespace) -> dict:
    async def hold(http: str, worker: psutil.Process) -> dict:
        before = worker.memory_info().rss
        tasks = [asyncio.ensure_future(http_stream(http, options.tokens)) for _ in range(options.streams)]
        most = before
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.2)
            most = max(most, worker.memory_info().rss)
        for task in tasks:
            task.result()
        return {"streams": options.streams, "idle_mib": before >> 20, "most_mib": most >> 20}

    with script(options.interval) as address, http_endpoint(address) as (http, workers):
        asyncio.run(http_stream(http, 2))
        return asyncio.run(hold(http, workers[0]))


def rate(options: argparse.Namespace) -> dict:
    with script(options.interval) as address, http_endpoint(address, options.workers) as (http, workers):
        asyncio.run(http_stream(http, 2))
        before = sum(sum(worker.cpu_times()[:2]) for worker in workers)
        began = time.perf_counter()
        clients = [subprocess.Popen([sys.executable, __file__, "ask", "--address", http, "--streams",
                                     str(options.streams // options.clients), "--tokens", str(options.tokens)])
                   for _ in range(options.clients)]
        if any(client.wait() for client in clients):
            raise SystemExit("a client failed")
        seconds = time.perf_counter() - began
        used = sum(sum(worker.cpu_times()[:2]) for worker in workers) - before
    tokens = options.streams // options.clients * options.clients * options.tokens
    return {"streams": options.streams, "workers": options.workers, "tokens_per_second": round(tokens / seconds, 1),
            "worker_us_per_token": round(1e6 * used / tokens, 2),
            "tokens_per_second_of_a_core": round(tokens / used, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, defaults in (("against-grpc", (64, 128, 0.02)), ("streams", (1000, 60, 0.5)), ("rate", (256, 400, 0.0)),
                           ("ask", (64, 400, 0.0)), ("serve", (0, 0, 0.02))):
        command = commands.add_parser(name)
        command.add_argument("--streams", type=int, default=defaults[0])
        command.add_argument("--tokens", type=int, default=defaults[1])
        command.add_argument("--interval", type=float, default=defaults[2], help="s between two tokens of the script")
        command.add_argument("--runs", type=int, default=5)
        command.add_argument("--workers", type=int, default=1)
        command.add_argument("--clients", type=int, default=2, help="processes that ask")
        command.add_argument("--address")
    options = parser.parse_args()
    if options.command == "serve":
        serve_script(options.address, options.interval)
    elif options.command == "ask":
        asyncio.run(together([http_stream(options.address, options.tokens) for _ in range(options.streams)]))
    else:
        measure = {"against-grpc": against_grpc, "streams": streams, "rate": rate}[options.command]
        print(json.dumps({"cores": os.cpu_count(), **measure(options)}))


if __name__ == "__main__":
    main()
