"""How the workers of an HTTP server divide connections."""
from __future__ import annotations

import contextlib
import os
import signal
import socket
import time

import psutil
import pytest

from allspark_launch.group.http_server import HttpOptions, http_server
from allspark_server.http.counts import ConnectionCounts, make_file


def held(pids: list[int]) -> list[int]:
    """The number of connections of each worker, with those that the client has closed and the worker has not yet."""
    return [sum(found.status != psutil.CONN_LISTEN for found in psutil.Process(pid).net_connections("tcp"))
            for pid in pids]


def wait_until(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def server():
    options = HttpOptions(address="127.0.0.1:0", workers=3, insecure=True, pool=["127.0.0.1:1"])
    with http_server(options) as running:
        wait_until(lambda: len(running.pids) == 3 and all(worker.serves for worker in running._workers))
        yield running


def connect(server, stack: contextlib.ExitStack, number: int) -> None:
    host, _, port = server.address.rpartition(":")
    for _ in range(number):
        stack.enter_context(socket.create_connection((host, int(port)), timeout=10))


def test_workers_have_equally_many_connections(server):
    with contextlib.ExitStack() as stack:
        connect(server, stack, 30)
        wait_until(lambda: sum(held(server.pids)) == 30)
        assert max(held(server.pids)) - min(held(server.pids)) <= 2
    uneven = 0      # a worker that gets no core for its time misses a connection, but not mostly
    for _ in range(20):
        wait_until(lambda: sum(held(server.pids)) == 0)
        with contextlib.ExitStack() as stack:
            connect(server, stack, 3)
            wait_until(lambda: sum(held(server.pids)) == 3)
            uneven += max(held(server.pids)) - min(held(server.pids))   # 0 if each has one, else 2 or 3
    assert uneven < 24


def test_others_take_the_connections_of_one_that_is_stopped_or_has_ended(server):
    stopped = server.pids[0]
    os.kill(stopped, signal.SIGSTOP)
    try:
        with contextlib.ExitStack() as stack:
            connect(server, stack, 20)
            wait_until(lambda: sum(held(server.pids)) == 20)
            counts = held(server.pids)
            assert counts[0] == 0 and min(counts[1:]) >= 6
    finally:
        os.kill(stopped, signal.SIGKILL)
    wait_until(lambda: stopped not in server.pids and len(server.pids) == 3
               and all(worker.serves for worker in server._workers))
    with contextlib.ExitStack() as stack:
        connect(server, stack, 9)
        wait_until(lambda: sum(held(server.pids)) == 9)
        assert max(held(server.pids)) - min(held(server.pids)) <= 2


def test_counts_are_shared():
    file = make_file(3)
    one, other = ConnectionCounts(file), ConnectionCounts(file)
    os.close(file)
    one.join(0)
    assert other.ahead_of(0) == 0       # the others are absent
    other.join(2)
    one.add(0, 2)
    assert one.ahead_of(0) == 1 and one.ahead_of(2) == 0
    other.leave(2)
    other.add(2, -1)                    # a connection that ends later
    assert one.ahead_of(0) == 0 and one.ahead_of(2) == 1


def test_workers_end_without_an_error(server):
    with contextlib.ExitStack() as stack:
        connect(server, stack, 6)
        wait_until(lambda: sum(held(server.pids)) == 6)
        workers = [worker.process for worker in server._workers]
        server.drain()
        assert server.wait(30)
    assert [process.returncode for process in workers] == 3 * [-signal.SIGTERM]     # raised again once all has ended
