"""Requests that wait for a group: a pool that was scaled to zero, and comes because somebody waits."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from allspark_launch.group.http_server import HttpOptions, http_server
from support.fake_engine import FakeEngine, expected
from support.fake_service import serving
from support.metrics import samples
from support.waiting import wait_for

BODY = {"model": "m", "prompt": [7, 8, 9], "max_tokens": 5, "temperature": 0, "return_token_ids": True}


class WaitingServer:
    """A running HTTP server in front of the groups that the file `members` lists: none at first."""

    def __init__(self, folder, server, client):
        self.members, self.server, self.client = folder / "members", server, client

    def waiting(self) -> float:
        return samples(self.client.get("/metrics").text)[("allspark_http_requests_waiting",)]

    def gone(self) -> None:
        """Waits until the server knows that there is no group."""
        wait_for(lambda: self.client.get("/health/ready").status_code == 503, 10)

    @contextlib.contextmanager
    def group(self, folder):
        """A group that is in the list while it runs."""
        with serving(f"unix:{folder}/{time.monotonic_ns()}", FakeEngine(0.001)) as (_, address):
            self.members.write_text(address + "\n")
            try:
                yield
            finally:
                self.members.write_text("")


@contextlib.contextmanager
def waiting_server(folder, **options):
    (folder / "members").write_text("")
    with http_server(HttpOptions(**{"address": "127.0.0.1:0", "insecure": True, "pool": [f"file:{folder}/members"],
                                    **options})) as server, \
            httpx.Client(base_url=f"http://{server.address}", timeout=60) as client:
        wait_for(lambda: server.serves and client.get("/health/live").status_code == 200, 30)
        yield WaitingServer(folder, server, client)


def test_requests_wait_for_the_first_group_and_for_the_next(tmp_path):
    """They are counted meanwhile, and answered once a group is there: when none has ever been, and after the last.
    The second round does not wait until both workers know that the group has gone.
    """
    with waiting_server(tmp_path, wait_limit=60.0, workers=2) as found, ThreadPoolExecutor(4) as threads:
        for _ in range(2):
            calls = [threads.submit(found.client.post, "/v1/completions", json=BODY) for _ in range(3)]
            wait_for(lambda: found.waiting() == 3, 10)
            found.gone()
            with found.group(tmp_path):
                answers = [call.result() for call in calls]
                assert [answer.status_code for answer in answers] == [200] * 3, answers[0].text
                assert answers[0].json()["choices"][0]["token_ids"] == expected([7, 8, 9], 5)
                assert found.waiting() == 0


def test_a_request_that_comes_as_the_last_group_goes(tmp_path):
    """The server learns within half a second that there is no group; such a request waits for the next one, too."""
    with waiting_server(tmp_path, wait_limit=60.0) as found, ThreadPoolExecutor(1) as threads:
        with found.group(tmp_path):
            wait_for(lambda: found.client.get("/health/ready").status_code == 200, 10)
            assert found.client.post("/v1/completions", json=BODY).status_code == 200
        call = threads.submit(found.client.post, "/v1/completions", json=BODY)
        wait_for(lambda: found.waiting() == 1, 10)
        with found.group(tmp_path):
            answer = call.result()
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["token_ids"] == expected([7, 8, 9], 5)


def test_a_stream_begins_while_it_waits(tmp_path):
    """Proxies see comments; a client that gives up waits no more."""
    with waiting_server(tmp_path, wait_limit=60.0, heartbeat=0.2) as found:
        with found.client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()
            assert next(lines).startswith(": ") and found.waiting() == 1
            with found.group(tmp_path):
                rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""] and found.waiting() == 0
        found.gone()
        with found.client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
            next(answer.iter_lines())
        wait_for(lambda: found.waiting() == 0, 5)


def test_the_limit(tmp_path):
    with waiting_server(tmp_path, wait_limit=1.0) as found:
        began = time.monotonic()
        answer = found.client.post("/v1/completions", json=BODY)
        assert answer.status_code == 503 and 1.0 <= time.monotonic() - began < 3.0
        assert answer.json()["error"]["message"] == "No group has come within 1 s: the pool cannot be reached"
        assert answer.headers["retry-after"] == "1" and found.waiting() == 0


@pytest.mark.parametrize("end", [signal.SIGKILL, pytest.param(None, marks=pytest.mark.slow)])
def test_requests_of_a_worker_that_has_ended_wait_no_more(tmp_path, end):
    """Neither one that is killed nor one that a reload replaces leaves its count: nobody would scale down again."""
    with waiting_server(tmp_path, wait_limit=60.0) as found:
        def ask() -> None:
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(f"http://{found.server.address}/v1/completions", json=BODY, timeout=60)

        thread = threading.Thread(target=ask)
        thread.start()
        wait_for(lambda: found.waiting() == 1, 10)
        (before,) = found.server.pids
        if end is not None:
            os.kill(before, end)
        else:
            found.server.reload(HttpOptions(**{**vars(found.server.options), "wait_limit": 59.0}))
        wait_for(lambda: found.server.serves and found.server.pids not in ([], [before]), 60)  # a start, if busy
        if end is not None:
            thread.join(10)
            with httpx.Client(base_url=f"http://{found.server.address}") as client:
                found.client = client
                wait_for(lambda: found.waiting() == 0, 10)
        else:
            with found.group(tmp_path), httpx.Client(base_url=f"http://{found.server.address}") as client:
                thread.join(30)
                found.client = client
                wait_for(lambda: found.waiting() == 0, 10)
        assert not thread.is_alive()
