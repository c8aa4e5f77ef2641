"""A pool of real groups under load, rolled by real commands that are killed. Only systemd is a fake."""
from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from allspark_client import ClientEngine
from allspark_launch.group.background import shipped_model
from allspark_launch.pool.members import Member, Target
from support.fake_service import wait_until
from support.seed import SEED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

# In the place of systemctl: asks the test's process.
SYSTEMCTL = """#!{python} -SE
import json, socket, sys
with socket.socket(socket.AF_UNIX) as asked:
    asked.connect({socket!r})
    asked.sendall(json.dumps(sys.argv[1:]).encode() + b"\\n")
    code, output = json.loads(asked.makefile().readline())
print(output)
sys.exit(code)
"""
COMMAND = "import sys\nfrom allspark_launch.pool import units\nunits.RUN_DIR = sys.argv.pop(1)\n" \
          "from allspark_launch.cli import main\nsys.exit(main(sys.argv[1:]))\n"
ANSWER = 40


class Systemd:
    """Runs the members of a pool as systemd does."""

    def __init__(self, folder: Path):
        self.folder, self.run_dir = folder, folder / "run"
        self.processes: dict[str, subprocess.Popen] = {}
        self._lock = threading.Lock()       # of jobs, which come one after the other
        systemd = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                answer = systemd.control(json.loads(self.rfile.readline()))
                with contextlib.suppress(OSError):      # the command was killed; what it asked for is done
                    self.wfile.write(json.dumps(answer).encode() + b"\n")

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True

        self._server = Server(str(folder / "s"), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        (folder / "bin").mkdir()
        (folder / "bin/systemctl").write_text(SYSTEMCTL.format(python=sys.executable, socket=str(folder / "s")))
        (folder / "bin/systemctl").chmod(0o755)

    def control(self, words: list[str]) -> tuple[int, str]:
        action, *units = (word for word in words if word != "--now")
        members = [re.fullmatch(r".*@(.*)\.service", unit)[1] for unit in units if "@" in unit]
        if action == "is-active":
            return 0, "active" if self.alive(members[0]) else "inactive"
        with self._lock:
            for member in members:
                if action in ("stop", "restart", "disable"):
                    self.stop(member)
                if action in ("start", "restart") and not self.alive(member):
                    self.start(member)
                if action == "reload":
                    self.processes[member].send_signal(signal.SIGHUP)
        return 0, ""

    def alive(self, member: str) -> bool:
        return member in self.processes and self.processes[member].poll() is None

    def start(self, member: str) -> None:
        unit = (self.folder / "u/allspark-p@.service").read_text()
        command = re.search(r"^ExecStart=(.*)$", unit, re.M)[1].replace("%i", member)
        file = self.folder / "c/p" / f"{member}.env"
        environment = dict(line.split("=", 1) for line in file.read_text().splitlines())
        (self.run_dir / "p" / member).mkdir(parents=True, exist_ok=True)
        (self.folder / "state").mkdir(exist_ok=True)
        ready = self.folder / f"{member}.ready"
        ready.unlink(missing_ok=True)
        words = shlex.split(command.replace("/var/lib/allspark/p", str(self.folder / "state")))
        with open(self.folder / f"{member}.log", "ab") as log:
            self.processes[member] = subprocess.Popen([*words, "--ready-file", str(ready)], stdout=log, stderr=log,
                                                      env={**os.environ, **environment})
        wait_until(lambda: ready.exists() or not self.alive(member), 120)

    def stop(self, member: str) -> None:
        if self.alive(member):
            self.processes[member].terminate()
            self.processes[member].wait(120)
        shutil.rmtree(self.run_dir / "p" / member, ignore_errors=True)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        for member in self.processes:
            self.stop(member)


@pytest.fixture()
def systemd(tmp_path):
    folder = Path(tempfile.mkdtemp(dir="/tmp"))     # the path of a socket is limited to 107 bytes
    systemd = Systemd(folder)
    yield systemd
    systemd.close()
    shutil.rmtree(folder)


class Load:
    """Clients whose requests must all be answered, each with the tokens of the first answer."""

    def __init__(self, addresses: list[str], count: int = 2):
        self._addresses, self._end = addresses, threading.Event()
        self.finished, self.wrong, self._wanted = 0, [], []
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(120)

    def _run(self) -> None:
        try:
            with ClientEngine(self._addresses, reconnect_timeout=120) as client:
                while not self._end.is_set():
                    _, handle, queue = client.start_request("m", {"input_ids": list(range(5, 25))}, {
                        "max_new_tokens": ANSWER, "top_k": 1, "early_stopping": False})
                    got = [i for elements in queue for i in elements.ids_from_generate]
                    client.release_request("m", handle)
                    self._wanted = self._wanted or got
                    if got != self._wanted or len(got) != ANSWER:
                        self.wrong.append(got)
                    self.finished += 1
        except Exception as error:
            self.wrong.append(error)


def rank_0(systemd: Systemd, member: str) -> int | None:
    """The process of a member's rank 0: a descendant of its supervisor."""
    import psutil
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(systemd.processes[member].pid).children(recursive=True):
            if "allspark_server" in process.cmdline() and process.environ().get("OMPI_COMM_WORLD_RANK") == "0":
                return process.pid
    return None


def test_rolls_that_are_killed_lose_no_request(systemd):
    """Each roll changes both members and is killed at a random moment; in some, a group is lost while it drains."""
    print(f"ALLSPARK_TEST_SEED={SEED}")
    chance, folder = random.Random(SEED), systemd.folder
    environment = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    addresses = [f"unix:{systemd.run_dir}/p/{member}/socket" for member in "ab"]

    def apply() -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-c", COMMAND, str(systemd.run_dir), "pool", "apply", "--config", str(folder / "p.json"),
             "--unit-dir", str(folder / "u"), "--config-dir", str(folder / "c")], env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def configure(log_format: str) -> None:
        (folder / "p.json").write_text(json.dumps({
            "name": "p", "user": "root",
            "defaults": {
                "log_format": log_format, "share_cpus": True, "ranks": 1, "cpus_per_rank": 1, "drain_limit": 60,
                "models": [{"model_name": "m", "model_path": str(shipped_model()), "engine_max_length": 256}]},
            "member": [{"name": "a"}, {"name": "b"}]}))

    def completed() -> str:
        process = apply()
        output = process.communicate(timeout=400)[0]
        assert process.returncode == 0, (output, *((folder / f"{m}.log").read_text()[-3000:] for m in "ab"))
        return output

    configure("text")
    completed()
    lost = 0
    with Load(addresses) as load:
        for number in range(6):
            log_format = ("json", "text")[number % 2]
            configure(log_format)
            began, process = time.monotonic(), apply()
            at = chance.uniform(0.5, 25)
            while process.poll() is None and time.monotonic() < began + at:
                if number % 3 == 2 and lost <= number // 3 and (pid := rank_0(systemd, "a")):
                    with Member(Target("a", addresses[0])) as member, contextlib.suppress(Exception):
                        if member.info().draining:
                            os.kill(pid, signal.SIGKILL)        # a crash while it drains
                            lost += 1
                time.sleep(0.05)
            process.kill()
            process.communicate()
            completed()
            for name, address in zip("ab", addresses):
                report = json.loads((systemd.run_dir / "p" / name / "running.json").read_text())
                assert report["options"].get("log_format", "text") == log_format
                with Member(Target(name, address)) as member:
                    assert not member.info().draining and member.serves()
            before = load.finished
            wait_until(lambda before=before: load.finished > before + 2 or load.wrong, 120)
        assert completed().count(": unchanged") == 2
    assert not load.wrong and load.finished > 20, (load.wrong[:3], load.finished)
    print(f"{load.finished} requests, {lost} groups lost while they drained")
