"""Pools whose members come and go while a client runs: in a watched file, and by DNS."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time

import httpx
import pytest

from allspark_client import AllSparkError, AsStatus, ClientEngine, discovery, pool
from allspark_client.connection_options import server_addresses
from support.fake_engine import FakeEngine
from support.fake_service import expected, server_process, serving, tokens, wait_until
from support.http_helpers import http_server_for

PROMPT = [1, 2, 3]


def start(client, count=20, prompt=PROMPT):
    return client.start_request("m", {"input_ids": prompt}, {"max_new_tokens": count, "eos_token_id": -1})[2]


def addresses(client) -> list[str]:
    return [member.address for member in client.members()]


@pytest.mark.parametrize("given", ["dns:host", "dns::50051", "dns:host:0", "dns:host:x", "file:"])
def test_wrong_sources(given):
    with pytest.raises(ValueError, match="address="):
        server_addresses(given)


def test_members_of_a_file(tmp_path, caplog):
    path = tmp_path / "members"
    with serving(f"unix:{tmp_path}/a", FakeEngine(0.01)) as (one, a), \
            serving(f"unix:{tmp_path}/b", FakeEngine(0.01)) as (two, b):
        path.write_text(f"# the pool\n\n {a}\n")
        with ClientEngine(f"file:{path}", reconnect_timeout=5) as client:
            running = start(client, 200)
            running.Get()
            path.write_text(f"{b}\n")       # a leaves, with a live request
            wait_until(lambda: addresses(client) == [b] and client.members()[0].connected, 5)
            assert tokens(start(client)) == expected(PROMPT, 20) and len(two.submitted) == 1
            assert len(one.live) == 1, "its request goes on"
            leaving = client._pool._leaving[0]
            assert sum(len(e.ids_from_generate) for e in running) > 100 and not one.live
            wait_until(lambda: not client._pool._leaving and leaving._closed, 5)
            path.write_text(f"{a}\n{b}\nnot an address\n")
            wait_until(lambda: "stay as they were" in caplog.text, 5)
            assert addresses(client) == [b]
            path.write_text(f"{a}\n{b}\n")
            wait_until(lambda: addresses(client) == [a, b], 5)
            path.write_text("")
            wait_until(lambda: not addresses(client), 5)
            waiting = threading.Thread(target=lambda: results.append(tokens(start(client))))
            results: list[list[int]] = []
            waiting.start()
            time.sleep(0.3)
            path.write_text(f"{a}\n")
            waiting.join(10)
            assert results == [expected(PROMPT, 20)]


def test_a_pool_without_members(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "_FIRST_CONTACT_SECONDS", 0.3)
    path = tmp_path / "members"
    path.write_text("")
    with pytest.raises(AllSparkError, match=f"no server is named by file:{path}") as caught:
        ClientEngine(f"file:{path}")
    assert caught.value.status is AsStatus.ALLSPARK_IO_ERROR


def test_members_of_a_name(tmp_path, monkeypatch):
    """All addresses of the name; a resolver that fails for a time changes nothing, a name without addresses empties."""
    monkeypatch.setattr(discovery, "DNS_SECONDS", 0.1)
    monkeypatch.setattr(discovery.DnsName, "every", 0.1)
    with serving("127.0.0.1:0") as (_, first):
        port = int(first.rpartition(":")[2])
        answer: list[str] | int = ["127.0.0.1"]
        resolve = socket.getaddrinfo

        def fake(name, *rest, **more):
            if name != "pods.example":
                return resolve(name, *rest, **more)
            if isinstance(answer, int):
                raise socket.gaierror(answer, "no")
            return [(socket.AF_INET6 if ":" in host else socket.AF_INET, 1, 6, "", (host, port)) for host in answer * 2]

        monkeypatch.setattr(socket, "getaddrinfo", fake)
        with ClientEngine(f"dns:pods.example:{port}") as client:
            assert addresses(client) == [f"127.0.0.1:{port}"] and tokens(start(client)) == expected(PROMPT, 20)
            answer = socket.EAI_AGAIN
            time.sleep(0.4)
            assert tokens(start(client)) == expected(PROMPT, 20)
            answer = ["127.0.0.1", "127.0.0.2", "::1"]
            wait_until(lambda: addresses(client) == [f"127.0.0.1:{port}", f"127.0.0.2:{port}", f"[::1]:{port}"], 5)
            answer = socket.EAI_NONAME
            wait_until(lambda: not addresses(client), 5)
    assert discovery.DnsName("dns:pods.example:7").find is not None
    assert discovery.Found("10.0.0.1:7", "pods.example").server_name == "pods.example"


def test_an_http_server_follows_the_file(tmp_path):
    path = tmp_path / "members"
    with serving(f"unix:{tmp_path}/a") as (one, a), serving(f"unix:{tmp_path}/b") as (two, b):
        path.write_text(f"{a}\n")
        with http_server_for(f"file:{path}", insecure=True) as address, \
                httpx.Client(base_url=f"http://{address}") as http:
            def ask() -> int:
                return http.post("/v1/completions", json={"model": "m", "prompt": PROMPT, "max_tokens": 3}).status_code

            assert ask() == 200 and len(one.submitted) == 1
            path.write_text(f"{b}\n")
            wait_until(lambda: ask() == 200 and two.submitted, 5)


@pytest.mark.parametrize("seconds", [4, pytest.param(120, marks=pytest.mark.slow)])
def test_no_request_is_lost_while_members_come_and_are_killed(tmp_path, seconds):
    """Every second one member is added, and another one killed or taken off the list."""
    path, rng, failures, done = tmp_path / "members", random.Random(seconds), [], [0]
    with contextlib.ExitStack() as stack:
        processes, count = {}, iter(range(1000))

        def add() -> None:
            process, address = stack.enter_context(server_process(f"unix:{tmp_path}/{next(count)}"))
            processes[address] = process

        def write() -> None:
            path.write_text("".join(f"{address}\n" for address in processes))

        for _ in range(3):
            add()
        write()
        client = stack.enter_context(ClientEngine(f"file:{path}", reconnect_timeout=20))
        ends = time.monotonic() + seconds

        def work(seed: int) -> None:
            own = random.Random(seed)
            while time.monotonic() < ends and not failures:
                prompt, length = [own.randrange(1, 600) for _ in range(3)], own.randrange(5, 80)
                try:
                    found = tokens(start(client, length, prompt))
                except AllSparkError as error:
                    failures.append(error)
                    return
                if found != expected(prompt, length):
                    failures.append((prompt, length, found))
                done[0] += 1

        workers = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for worker in workers:
            worker.start()
        while time.monotonic() < ends - 2:
            add()
            victim = rng.choice(list(processes))
            process = processes.pop(victim)
            if rng.random() < 0.5:
                process.kill()
            write()
            time.sleep(1)
        for worker in workers:
            worker.join(30)
            assert not worker.is_alive()
    assert not failures and done[0] > seconds
