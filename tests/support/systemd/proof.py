"""Proves a pool under a real systemd, from installation to removal, while clients stream. boot.sh runs it."""
from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from allspark_client import ClientEngine
from allspark_launch.group.background import shipped_model
from allspark_launch.pool.members import Member, Target
from allspark_launch.pool.units import socket_address

FILE = Path("/etc/allspark/pool.json")
COMMAND = [sys.executable, "-m", "allspark_launch", "pool"]
ODD = 'a "b" $HOME \\ %i'
BEGAN = time.monotonic()
ANSWER, KILLS = 40, 4


def say(*words: object) -> None:
    print(f"{time.monotonic() - BEGAN:6.1f}", *words, flush=True)


def pool(action: str, *words: str, status: int = 0) -> str:
    """Runs a command, which must end with this status; returns what it prints."""
    command = [*COMMAND, action, "--config", str(FILE), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    say(action, *words, "->", done.returncode)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def write(members: str = "ab", model: str = "", **defaults: object) -> None:
    FILE.parent.mkdir(exist_ok=True)
    models = [{"model_name": "m", "model_path": model or str(shipped_model()), "engine_max_length": 256}]
    FILE.write_text(json.dumps({
        "defaults": {"share_cpus": True, "ranks": 1, "cpus_per_rank": 1, "drain_limit": 60, "models": models,
                     "environment": {"PYTHONPATH": os.environ["PYTHONPATH"], "ODD": ODD}, **defaults},
        "member": [{"name": name} for name in members]}))


def unit(member: str, key: str) -> str:
    return subprocess.run(["systemctl", "show", "-P", key, f"allspark-default@{member}.service"], capture_output=True,
                          text=True, check=True).stdout.strip()


def connect(member: str) -> Member:
    return Member(Target(member, socket_address("default", member)))


def check(members: str, key: str, value: str) -> None:
    """Checks that the members run with a value of an option, and take requests."""
    for member in members:
        report = json.loads(Path(f"/run/allspark/default/{member}/running.json").read_text())
        assert report["options"].get(key, "text") == value, report
        with connect(member) as one:
            assert one.serves() and not one.info().draining


def rank_of(member: str) -> int:
    """The process of a member's rank."""
    group = Path("/sys/fs/cgroup", unit(member, "ControlGroup").lstrip("/"), "cgroup.procs").read_text().split()
    return next(int(pid) for pid in group
                if Path("/proc", pid, "cmdline").read_bytes().split(b"\0")[2:3] == [b"allspark_server"])


class Load:
    """Clients whose requests must all be answered, each with the tokens of the first answer."""

    def __init__(self) -> None:
        self.end, self.finished, self.wrong, self.wanted = threading.Event(), 0, [], []
        self.threads = [threading.Thread(target=self.run, daemon=True) for _ in range(2)]
        for thread in self.threads:
            thread.start()

    def run(self) -> None:
        try:
            with ClientEngine([socket_address("default", member) for member in "ab"], reconnect_timeout=120) as client:
                while not self.end.is_set():
                    _, handle, queue = client.start_request("m", {"input_ids": list(range(5, 25))}, {
                        "max_new_tokens": ANSWER, "top_k": 1, "early_stopping": False})
                    got = [i for elements in queue for i in elements.ids_from_generate]
                    client.release_request("m", handle)
                    self.wanted = self.wanted or got
                    if got != self.wanted or len(got) != ANSWER:
                        self.wrong.append(got)
                    self.finished += 1
        except Exception as error:
            self.wrong.append(error)

    def check(self) -> None:
        before, deadline = self.finished, time.monotonic() + 60
        while self.finished < before + 2 and not self.wrong:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        say(f"{self.finished} requests, wrong: {self.wrong}")
        assert not self.wrong


def main() -> None:
    write()
    assert "there is no user 'allspark'" in pool("install", "--now", status=1)
    assert not Path("/etc/systemd/system/allspark-default@.service").exists()
    subprocess.run(["useradd", "--system", "allspark"], check=True)
    pool("install", "--now")
    process = Path("/proc", unit("a", "MainPID"))
    assert process.stat().st_uid != 0 and f"ODD={ODD}" in (process / "environ").read_text().split("\0")
    assert "serving" in pool("status")
    load, chance = Load(), random.Random()
    for number in range(KILLS):
        write(log_format=("json", "text")[number % 2])
        roll = subprocess.Popen([*COMMAND, "apply", "--config", str(FILE)], stdout=subprocess.DEVNULL,
                                stderr=subprocess.DEVNULL)
        time.sleep(chance.uniform(0.5, 15))
        roll.kill()
        say("apply was killed" if roll.wait() < 0 else "apply has ended")
        pool("apply")
        check("ab", "log_format", ("json", "text")[number % 2])
        load.check()
    write(log_level="warning")
    assert "a: reloaded" in pool("apply") and "b: unchanged" in pool("apply")
    check("ab", "log_level", "warning")

    pool("drain", "a")
    os.kill(rank_of("a"), signal.SIGKILL)
    deadline = time.monotonic() + 60
    while True:
        try:
            with connect("a") as member:
                info = member.info()
            if info.restarts:
                break
        except Exception:   # it starts again
            assert time.monotonic() < deadline
        time.sleep(0.2)
    assert info.draining
    say("a drained group was lost, and is back draining")
    pool("drain", "a", "--undo")

    write(model="/nowhere")
    assert "not restarted: b" in pool("apply", status=1)
    assert (unit("a", "ExecMainStatus"), unit("b", "ActiveState")) == ("78", "active")
    pool("apply", status=1)
    assert unit("b", "ActiveState") == "active"
    load.check()
    write(log_format="json")
    pool("apply")
    check("ab", "log_format", "json")
    write("a", log_format="json")
    pool("apply")
    assert unit("b", "ActiveState") == "inactive"
    load.check()
    load.end.set()
    for thread in load.threads:
        thread.join(60)
    pool("uninstall")
    left = [*Path("/etc/allspark").rglob("*.env"), *Path("/etc/systemd/system").glob("allspark*"),
            *Path("/run/allspark").glob("*/*"), *Path("/tmp").glob("allspark-run-*"),
            *(path for path in Path("/dev/shm").iterdir() if not path.name.startswith("allspark-memory-"))]
    assert not left, left
    say("PROVEN")


if __name__ == "__main__":
    main()
