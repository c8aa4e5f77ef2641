"""Groups that are asked to stop: running requests finish normally, and new ones go elsewhere."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from allspark_client import AllSparkError, ClientEngine, GenerateRequestStatus
from allspark_launch.cli import main
from allspark_launch.group.background import shipped_model
from support.fake_engine import FakeEngine
from support.fake_service import expected, serving, tokens, wait_until

PROMPT = [1, 2, 3]


def test_a_draining_member_gets_no_new_requests(tmp_path):
    with serving(f"unix:{tmp_path}/a", FakeEngine(0.01)) as (a, first), \
            serving(f"unix:{tmp_path}/b", FakeEngine(0.01)) as (b, second), \
            ClientEngine([first, second]) as client, ClientEngine(first) as other:
        _, _, running = client.start_request("m", {"input_ids": PROMPT}, {"max_new_tokens": 200})
        first_tokens = len(running.Get().ids_from_generate)
        assert len(a.live) == 1
        a_service = other._pool.members[0]
        from allspark_client._proto import allspark_pb2 as pb
        info = a_service.call("Drain", pb.DrainRequest(), pb.ServerInfo)
        assert info.draining and info.requests == 1
        for _ in range(3):
            _, _, queue = client.start_request("m", {"input_ids": PROMPT}, {"max_new_tokens": 3})
            assert tokens(queue) == expected(PROMPT, 3)
        assert len(a.submitted) == 1 and len(b.submitted) == 3
        with pytest.raises(AllSparkError, match="takes no new requests"):
            ClientEngine(first, reconnect_timeout=0.3).start_request("m", {"input_ids": PROMPT}, {"max_new_tokens": 3})
        assert len(tokens(running)) + first_tokens == 200
        assert running.GenerateStatus() is GenerateRequestStatus.GenerateFinished
        assert not a_service.call("Drain", pb.DrainRequest(undo=True), pb.ServerInfo).draining
        _, _, queue = other.start_request("m", {"input_ids": PROMPT}, {"max_new_tokens": 3})
        assert tokens(queue) == expected(PROMPT, 3)


def test_a_draining_member_takes_requests_that_lost_their_server(tmp_path):
    """It may be the last member that can continue them."""
    with serving(f"unix:{tmp_path}/a", FakeEngine(0.01)) as (a, address), ClientEngine(address) as client:
        session = client._pool.members[0].session()
        _, _, queue = client.start_request("m", {"input_ids": PROMPT}, {"max_new_tokens": 100})
        queue.Get()
        from allspark_client._proto import allspark_pb2 as pb
        client._pool.members[0].call("Drain", pb.DrainRequest(), pb.ServerInfo)
        session._call.cancel()      # the connection breaks
        tokens(queue)
        assert queue.GenerateStatus() is GenerateRequestStatus.GenerateFinished and queue.GeneratedLength() == 100
        assert a.submitted[-1].resumed


def test_pool_drain_waits_for_the_last_request(tmp_path, capsys):
    with serving(f"unix:{tmp_path}/a", FakeEngine(0.01)) as (a, address), ClientEngine(address) as client:
        _, _, queue = client.start_request("m", {"input_ids": PROMPT}, {"max_new_tokens": 150})
        reader = threading.Thread(target=lambda: tokens(queue))
        reader.start()
        queue.Get()
        assert main(["pool", "drain", "--address", address, "--limit", "0.3"]) == 1
        assert "1 requests ran; after 1 s 1 still do" in capsys.readouterr().out
        assert main(["pool", "drain", "--address", address]) == 0
        assert not a.live and "0 still do" in capsys.readouterr().out
        assert main(["pool", "status", "--address", address]) == 0
        assert "draining" in capsys.readouterr().out
        assert main(["pool", "drain", "--address", address, "--undo"]) == 0
        wait_until(lambda: main(["pool", "status", "--address", address]) == 0, 2)
        assert "serving" in capsys.readouterr().out
        reader.join()


class Group:
    """`allspark serve` with a model, started as systemd does it."""

    def __init__(self, folder, **options):
        self.told: list[bytes] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._listener.bind(str(folder / "notify"))
        self.config, self.ready = folder / "group.json", folder / "ready"
        self.address = f"unix:{folder}/s"
        self.options = {"models": [str(shipped_model())], "ranks": 1, "address": self.address, **options}
        self.write()
        environment = {**os.environ, "NOTIFY_SOCKET": str(folder / "notify"), "WATCHDOG_USEC": "1500000"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "allspark_launch", "serve", "--config", str(self.config), "--ready-file",
             str(self.ready)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        threading.Thread(target=self._listen, daemon=True).start()

    def write(self, **options) -> None:
        self.config.write_text(json.dumps(self.options | options))

    def _listen(self) -> None:
        while True:
            self.told.append(self._listener.recv(1000))

    def wait_ready(self) -> None:
        wait_until(lambda: self.ready.exists() or self.process.poll() is not None, 60)
        assert self.process.poll() is None, self.process.stdout.read()


@pytest.fixture()
def group(tmp_path):
    started = []

    def start(**options):
        started.append(Group(tmp_path, **options))
        started[-1].wait_ready()
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()


def test_a_stop_waits_for_requests_and_systemd_hears_of_it(group):
    served = group(drain_limit=60)
    with ClientEngine(served.address) as client:
        model = client.list_models()[0].name
        many = {"max_new_tokens": 1800, "early_stopping": False}    # longer than two of the supervisor's reports take
        queues = [client.start_request(model, {"input_ids": [*PROMPT, i]}, many)[2] for i in range(24)]
        queues[-1].Get()
        wait_until(lambda: b"STATUS=serving: 24 requests" in served.told, 10)
        served.write(drain_limit=50, ranks=2)
        served.process.send_signal(signal.SIGHUP)
        wait_until(lambda: served.told.count(b"READY=1") == 2, 10)
        served.process.terminate()
        wait_until(lambda: any(text.startswith(b"STATUS=draining: 24") for text in served.told), 10)
        for queue in queues:
            tokens(queue)
            assert queue.GenerateStatus() is GenerateRequestStatus.GenerateFinished and queue.GeneratedLength() == 1800
    log = served.process.communicate(timeout=30)[0]
    assert served.process.returncode == 0, log
    assert "what has changed here needs a restart: ranks" in log
    assert "24 requests have 50 s to end" in log and "24 requests have ended by themselves, 0 are ended now" in log
    assert {b"WATCHDOG=1", b"STOPPING=1"} <= set(served.told)


def test_a_stop_ends_requests_at_its_limit_and_says_how_many(group):
    served = group(drain_limit=0.5, log_format="json", log_requests=True)
    with ClientEngine(served.address, reconnect_timeout=1) as client:
        model = client.list_models()[0].name
        queues = [client.start_request(model, {"input_ids": PROMPT},
                                       {"max_new_tokens": 2000, "early_stopping": False,
                                        "user_request_id": f"r{i}"})[2] for i in range(3)]
        queues[0].Get()
        began = time.monotonic()
        served.process.terminate()
        log = served.process.communicate(timeout=30)[0]
        assert time.monotonic() - began < 5 and served.process.returncode == 0
        assert "0 requests have ended by themselves, 3 are ended now" in log
    entries = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert {"rank 0", "allspark"} <= {entry["process"] for entry in entries}
    ended = [entry for entry in entries if entry["logger"] == "allspark_server.requests"]
    assert len(ended) == 3 and all(entry["reason"] == "interrupted" and entry["prompt_tokens"] == 3 for entry in ended)
    assert {entry["request"] for entry in ended} == {"r0", "r1", "r2"}
