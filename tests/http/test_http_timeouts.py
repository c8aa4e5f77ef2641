"""The HTTP server's time limits for clients that stop sending or reading. In this process, with faster clocks."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import uvicorn

from allspark_launch.group.http_server import open_socket
from allspark_server.access import Client, Role
from allspark_server.http import bodies, call, protocol
from allspark_server.http.errors import ApiError

HEADERS = [(b"content-type", b"application/json")]


async def read(reader: bodies.BodyReader, receive, client: str = "") -> bytes:
    with reader.share(client) as share:
        return await share.read({"headers": HEADERS}, receive)


def test_slow_writers(monkeypatch):
    monkeypatch.setattr(bodies, "CHUNK_SECONDS", 0.05)
    monkeypatch.setattr(bodies, "WHOLE_SECONDS", 0.3)
    reader = bodies.BodyReader(1000, 1000)

    async def silent():
        await asyncio.sleep(10)

    async def drip():
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b" ", "more_body": True}

    for receive in (silent, drip):
        began = time.monotonic()
        with pytest.raises(ApiError) as found:
            asyncio.run(read(reader, receive))
        assert found.value.status == 408 and time.monotonic() - began < 2


def test_bodies_all_together(monkeypatch):
    """The bodies of all requests together are bounded; their share is given back when they end."""
    cheap(monkeypatch)
    reader = bodies.BodyReader(3000, 6000)
    monkeypatch.setattr(reader, "_most", 6000)
    held = asyncio.Event()

    async def half():
        if not held.is_set():
            held.set()
            return {"type": "http.request", "body": b"x" * 2900, "more_body": True}
        await asyncio.sleep(10)

    async def small():
        return {"type": "http.request", "body": b"x" * 200, "more_body": False}

    async def run():
        first = asyncio.ensure_future(read(reader, half))
        await held.wait()
        await asyncio.sleep(0.01)
        with pytest.raises(ApiError) as found:
            await read(reader, small)
        assert found.value.status == 503 and found.value.retry_after
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        assert len(await read(reader, small)) == 200

    asyncio.run(run())


def test_who_sends_much_waits(monkeypatch):
    """After a burst, a client's bodies are read at a limited rate; others' are read at once."""
    monkeypatch.setattr(bodies, "_BURST", 1000)
    monkeypatch.setattr(bodies, "_RATE", 10_000)
    reader = bodies.BodyReader(10_000, 1 << 20)

    async def body():
        return {"type": "http.request", "body": b" " * 4000, "more_body": False}

    async def small():
        return {"type": "http.request", "body": b" " * 900, "more_body": False}

    async def run():
        began = time.monotonic()
        await read(reader, body, "greedy")
        assert 0.2 < time.monotonic() - began < 1
        began = time.monotonic()
        slow = asyncio.ensure_future(read(reader, body, "greedy"))
        await asyncio.sleep(0)
        await read(reader, small, "polite")
        assert not slow.done() and time.monotonic() - began < 0.2
        await slow
        assert time.monotonic() - began > 0.3

    asyncio.run(run())


def cheap(monkeypatch):
    """Smaller costs of bodies, which are easy to add up."""
    monkeypatch.setattr(bodies, "_ASCII_COST", 2)
    monkeypatch.setattr(bodies, "_WIDE_COST", 6)


def test_a_body_counts_until_its_request_ends(monkeypatch):
    cheap(monkeypatch)
    reader = bodies.BodyReader(1000, 12_000)

    async def text(body: bytes):
        async def receive():
            return {"type": "http.request", "body": body, "more_body": False}

        with reader.share("one") as share:
            await share.read({"headers": HEADERS}, receive)
            yield

    async def run():
        open_requests = [text(b"x" * 1000) for _ in range(4)] + [text("é".encode() * 50)]
        for request in open_requests:       # 8,600 bytes of memory
            await anext(request)
        with pytest.raises(ApiError, match="of this client") as found:
            await anext(text(b"x" * 1000))
        assert found.value.status == 503 and found.value.retry_after == 1
        with reader.share("another") as share:
            share.take(2000)
            with pytest.raises(ApiError, match="Too many large requests are being served"):
                share.take(2000)
        for request in open_requests:
            await anext(request, None)
        assert reader._held == 0 and not reader._held_by

    asyncio.run(run())


@pytest.mark.parametrize("unread, late, stuck", [(0, 0.5, False), (0, 30, False), (0, 61, True), (1 << 17, 0.5, False),
                                                 (1 << 17, 2, True)])
def test_slow_readers(unread, late, stuck):
    """A client that does not read is cut off after a while, and soon if much piles up."""
    aborted = []

    async def send(_):
        await asyncio.sleep(10)

    async def run():
        server = SimpleNamespace(pool=None, strict_fields=False)
        one = call.Call(server, {"headers": [], "extensions": {"allspark.abort": lambda: aborted.append(True)}}, send,
                        Client(Role.READ))
        one._answers.append(SimpleNamespace(started=True, unread=unread))
        one.task = asyncio.ensure_future(one.write(b"x"))
        await asyncio.sleep(0)
        assert one.stuck(time.monotonic() + late) is stuck
        one.abort()
        with pytest.raises(asyncio.CancelledError):
            await one.task
        assert aborted

    asyncio.run(run())


@contextlib.contextmanager
def server(monkeypatch, **limits):
    """The HTTP server's connections with an application that always answers "fine"."""
    for name, value in limits.items():
        monkeypatch.setattr(*((protocol, name) if name.isupper() else (protocol.Connection, name)), value)

    async def application(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"fine"})

    listener, address = open_socket("127.0.0.1:0")
    running = uvicorn.Server(uvicorn.Config(application, http=protocol.Connection, lifespan="off", log_config=None,
                                            timeout_graceful_shutdown=1))
    thread = threading.Thread(target=running.run, args=([listener],))
    thread.start()
    try:
        yield lambda: socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=10)
    finally:
        running.should_exit = True
        thread.join()


def test_connections_that_say_nothing(monkeypatch):
    with server(monkeypatch, HEAD_SECONDS=0.3) as connect:
        for said in (b"", b"GET / HTTP/1.1\r\nhost:", b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET / HT"):
            with connect() as connection:
                began = time.monotonic()
                connection.sendall(said)
                with contextlib.suppress(ConnectionResetError):
                    while connection.recv(1000):
                        continue
                assert time.monotonic() - began < 3


def test_too_many_connections(monkeypatch):
    """The oldest idle connection is closed; one that is being served stays."""
    with server(monkeypatch, limit=4) as connect, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect()) for _ in range(4)]
        time.sleep(0.2)
        more = stack.enter_context(connect())
        more.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"fine" in more.recv(1000)
        with contextlib.suppress(ConnectionResetError):
            assert idle[0].recv(10) == b""
        idle[3].sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"fine" in idle[3].recv(1000)


def test_chunks_of_one_byte_and_endless_trailers(monkeypatch):
    """Overhead of small chunks is allowed; trailers are bounded."""
    head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    with server(monkeypatch) as connect:
        with connect() as connection:
            connection.sendall(head + 20_000 * b"1\r\nx\r\n" + b"0\r\n\r\n")
            assert b"fine" in connection.recv(1000)
        with connect() as connection:
            connection.sendall(head + b"1\r\nx\r\n0\r\n")
            with contextlib.suppress(OSError):
                for _ in range(200):
                    connection.sendall(b"x-trailer: " + b"y" * 1000 + b"\r\n")
                    time.sleep(0.001)
                pytest.fail("takes trailers without end")


def test_who_waits_for_the_first_token_is_not_slow():
    async def send(_):
        return

    async def run():
        one = call.Call(SimpleNamespace(pool=None, strict_fields=False), {"headers": []}, send, Client(Role.READ))
        await one.stream()
        assert not one.stuck(time.monotonic() + 1000)
        await one.write(b"x")
        assert not one.stuck(time.monotonic() + 1000)

    asyncio.run(run())
