"""Health checks and metrics of the HTTP server while its groups drain, fail, or are busy."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from allspark_client import ClientEngine
from allspark_client._proto import allspark_pb2 as pb
from support.fake_engine import FakeEngine
from support.fake_service import serving
from support.http_helpers import http_server_for
from support.waiting import wait_for


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    """An HTTP server in front of two members: (client, their engines, their addresses)."""
    folder = tmp_path_factory.mktemp("members")
    with serving(f"unix:{folder}/a", FakeEngine(0.001)) as (a, one), \
            serving(f"unix:{folder}/b", FakeEngine(0.001)) as (b, two), \
            http_server_for("", insecure=True, pool=[one, two]) as address, \
            httpx.Client(base_url=f"http://{address}", timeout=30) as client:
        yield client, (a, b), (one, two)


def test_draining(rig):
    """Ready until every member drains; live all the time."""
    client, _, addresses = rig

    def drain(address, undo=False):
        with ClientEngine(address) as engine:
            engine._pool.members[0].call("Drain", pb.DrainRequest(undo=undo), pb.ServerInfo)

    drain(addresses[0])
    wait_for(lambda: [member["draining"] for member in client.get("/pool").json()["members"]] == [True, False], 5)
    time.sleep(0.7)     # until the next look
    assert client.get("/health").status_code == 200
    drain(addresses[1])
    found = wait_for(lambda: (answer := client.get("/health/ready")).status_code == 503 and answer, 5)
    assert found.json() == {"status": "unavailable", "reason": "the pool is draining"}
    assert found.headers["retry-after"] == "1" and client.get("/health").status_code == 503
    assert client.get("/health/live").json() == {"status": "ok"}
    assert {member["draining"] for member in client.get("/pool").json()["members"]} == {True}
    for address in addresses:
        drain(address, undo=True)
    wait_for(lambda: client.get("/health/ready").json() == {"status": "ok"}, 5)


def test_health_while_all_threads_wait(rig, monkeypatch):
    """Health needs none of the threads that calls wait on."""
    client, engines, _ = rig
    release, waiting = threading.Event(), threading.Semaphore(0)

    def encode(*_, **__):
        waiting.release()
        release.wait(20)
        return [1]

    for engine in engines:
        monkeypatch.setattr(engine._models["m"].input.tokenizer, "encode", encode)
    try:
        with ThreadPoolExecutor(24) as threads:
            calls = [threads.submit(client.post, "/tokenize", json={"model": "m", "prompt": "x"}) for _ in range(24)]
            while waiting.acquire(timeout=0.5):
                pass
            until = time.monotonic() + 1.2
            while time.monotonic() < until:
                answer = client.get("/health", timeout=1)
                assert answer.status_code == 200, answer.text
                time.sleep(0.1)
            release.set()
            assert {call.result().status_code for call in calls} == {200}
    finally:
        release.set()


def test_tokens_of_failed_and_abandoned_streams_are_counted(rig):
    client, _, _ = rig

    def tokens(kind):
        name = f'allspark_http_{kind}_tokens_total{{model="m"}}'
        lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith(name)]
        return sum(float(line.split()[-1]) for line in lines)

    body = {"model": "m", "prompt": [999, 1], "max_tokens": 50, "stream": True}
    prompt, generated = tokens("prompt"), tokens("generated")
    assert '"error"' in client.post("/v1/completions", json=body).text      # the fake model fails after 2 tokens
    wait_for(lambda: (tokens("prompt"), tokens("generated")) == (prompt + 2, generated + 2), 5)
    body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 900, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as stream:
        next(stream.iter_lines())
    wait_for(lambda: tokens("prompt") == prompt + 5 and tokens("generated") > generated + 2, 5)
