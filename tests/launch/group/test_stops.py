"""Stops, drains and reloads at random moments: none is missed, and none is slower than its limit.

$ALLSPARK_TEST_STOPS is how many of them (1,000 take about an hour on 2 cores), $ALLSPARK_TEST_SEED chooses them.
"""
from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from allspark_client import AllSparkError, ClientEngine
from allspark_launch.group.background import shipped_model
from allspark_launch.pool.members import Member, Target
from support.waiting import wait_for

COUNT, SEED = int(os.environ.get("ALLSPARK_TEST_STOPS", "1000")), int(os.environ.get("ALLSPARK_TEST_SEED", "1"))
#: seconds for a stop besides its drain limit, and for a reload or a drain to take effect; the machine may be busy
STOP_SECONDS, REACTION_SECONDS = 6.0, 3.0
MOMENTS = ("idle", "a client has just gone", "under load", "loading")
LONG = {"max_new_tokens": 100_000, "early_stopping": False}


class Service:
    """`allspark serve` or `allspark http`, with a configuration file and a log."""

    def __init__(self, folder: Path, command: str, **options):
        self.folder, self.command, self.options = folder, command, options
        self.config, self.log, self.ready = folder / "config.json", folder / "log", folder / "ready"
        self.ready.unlink(missing_ok=True)
        self.write()
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "allspark_launch", command, "--config", str(self.config), "--ready-file",
                 str(self.ready)], stdout=log, stderr=log, start_new_session=True)

    def write(self, **changed) -> None:
        self.options |= changed
        self.config.write_text(json.dumps(self.options))

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_ready(self) -> None:
        wait_for(lambda: self.ready.exists() or self.process.poll() is not None, 120)
        assert self.process.poll() is None, self.text()

    def stop(self) -> float:
        """Sends SIGTERM; returns how long the process and all its children took to end."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        began = time.monotonic()
        self.process.terminate()
        self.process.wait(60)
        psutil.wait_procs(children, 10)
        took = time.monotonic() - began
        assert not any(child.is_running() and child.status() != "zombie" for child in children), self.text()
        return took


@contextlib.contextmanager
def load(address: str, requests: int):
    """Requests that do not end by themselves. Yields a function that makes their client vanish."""
    client = ClientEngine(address, resume=False)
    try:
        model = client.list_models()[0].name
        queues = [client.start_request(model, {"input_ids": [1, 2, i]}, LONG)[2] for i in range(requests)]
        for queue in queues:
            queue.Get()
        yield client.close
    except AllSparkError:
        yield lambda: None      # the server is gone already
    finally:
        client.close()


def reload(service: Service, chance: random.Random) -> float:
    """Returns how long a reload took to arrive, at rank 0 for a group."""
    def arrived() -> int:
        return service.text().count("the configuration was read again" if service.command == "serve" else "replaced")

    before = arrived()
    service.write(drain_limit=chance.choice([0, 0.5, 1.5]))
    began = time.monotonic()
    service.process.send_signal(signal.SIGHUP)
    wait_for(lambda: arrived() >= before + (2 if service.command == "serve" else 1), 15)
    return time.monotonic() - began


def drain(address: str) -> float:
    """Returns how long a drain and its end took to show in the health of the group."""
    began = time.monotonic()
    with Member(Target("m", address)) as member:
        for undo in (False, True):
            member.drain(undo, 0.0 if undo else 30.0)
            wait_for(lambda undo=undo: member.serves() == undo, 15)
    return time.monotonic() - began


def run_group(folder: Path, chance: random.Random, slowest: dict, counts: Counter) -> None:
    """One group: a few reloads and drains, then a stop."""
    service = Service(folder, "serve", models=[str(shipped_model())], ranks=1, cpus_per_rank=1,
                      address=f"unix:{folder}/s", drain_limit=chance.choice([0, 0.5, 1.5]))
    try:
        moment = chance.choice(MOMENTS)
        if moment == "loading":
            time.sleep(chance.uniform(0.0, 4.0))
            note(slowest, counts, f"stop while {moment}", service.stop(), STOP_SECONDS)
            assert service.process.returncode in (0, -signal.SIGTERM), service.text()
            return
        service.wait_ready()
        address = service.options["address"]
        with load(address, 4) if moment != "idle" else contextlib.nullcontext(lambda: None) as vanish:
            for _ in range(chance.randrange(16)):
                if chance.random() < 0.6:
                    note(slowest, counts, "reload", reload(service, chance), REACTION_SECONDS)
                else:
                    note(slowest, counts, "drain", drain(address), REACTION_SECONDS)
            limit = service.options["drain_limit"] if moment == "under load" else 0.0
            if moment == "a client has just gone":
                threading.Thread(target=vanish).start()
                time.sleep(chance.choice([0.0, 0.005, 0.05, 0.3]))
                limit = service.options["drain_limit"]      # rank 0 may not have noticed yet
            note(slowest, counts, f"stop, {moment}", service.stop() - limit, STOP_SECONDS)
        assert service.process.returncode == 0 and "did not stop in time" not in service.text(), service.text()
    finally:
        service.process.kill()
        service.process.wait()


def run_http(folder: Path, chance: random.Random, slowest: dict, counts: Counter) -> None:
    """One HTTP server: reloads, then a stop."""
    service = Service(folder, "http", address="127.0.0.1:0", insecure=True, pool=[f"unix:{folder}/none"],
                      workers=chance.choice([1, 2]), drain_limit=1)
    try:
        if chance.random() < 0.7:
            service.wait_ready()
            for _ in range(chance.randrange(4)):
                note(slowest, counts, "reload of http", reload(service, chance), REACTION_SECONDS)
        else:
            time.sleep(chance.uniform(0.0, 3.0))
        note(slowest, counts, "stop of http", service.stop() - service.options["drain_limit"], STOP_SECONDS)
        assert service.process.returncode in (0, -signal.SIGTERM), service.text()
    finally:
        service.process.kill()
        service.process.wait()


def note(slowest: dict, counts: Counter, what: str, took: float, limit: float) -> None:
    counts[what] += 1
    slowest[what] = max(slowest.get(what, 0.0), took)
    assert took < limit, f"{what}: {took:.1f} s"


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_stops_drains_and_reloads_at_random_moments(tmp_path_factory, capsys):
    chance, slowest, counts = random.Random(SEED), {}, Counter()
    while sum(counts.values()) < COUNT:
        run = run_http if chance.random() < 0.2 else run_group
        run(tmp_path_factory.mktemp("s"), chance, slowest, counts)
        if sum(counts.values()) % 50 < 5:
            with capsys.disabled():
                print(f"\n{sum(counts.values())}: slowest", {what: round(took, 2) for what, took in slowest.items()})
    with capsys.disabled():
        print("\n", dict(counts), {what: round(took, 2) for what, took in slowest.items()})
