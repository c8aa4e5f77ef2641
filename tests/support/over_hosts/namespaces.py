"""Hosts made of namespaces: each has its own network, name, /etc/hosts and /dev/shm. They share process ids and files.
Needs root.
"""
from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
_SETUP = """
set -e
hostname {name}
mount --make-rprivate /
mount -t tmpfs -o size=4g tmpfs /dev/shm
mount --bind {hosts} /etc/hosts
ip link set lo up
touch {ready}
exec sleep infinity
"""


def _do(words: str) -> None:
    subprocess.run(words.split(), check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=20)


def why_not() -> str:
    """What keeps namespaces from working here; "" if nothing does."""
    if os.geteuid() != 0:
        return "namespaces with networks need root"
    done = subprocess.run(["unshare", "--net", "--uts", "--mount", "ip", "link", "add", "type", "veth"],
                          capture_output=True, text=True)
    return "" if done.returncode == 0 else f"no namespaces here: {done.stderr.strip()}"


class Hosts:
    """Hosts h0, h1, … with the addresses 10.77.0.1, … on a switch in a namespace of its own."""

    def __init__(self, count: int, folder: Path):
        self.names = [f"h{i}" for i in range(count)]
        self.folder = folder
        self._processes: dict[str, subprocess.Popen] = {}
        self._shells: list[subprocess.Popen] = []

    def start(self) -> None:
        file = self.folder / "hosts"
        file.write_text("127.0.0.1 localhost\n" + "".join(f"{self.address(n)} {n}\n" for n in self.names))
        self._namespace("switch", file)
        self.run("switch", "ip", "link", "add", "name", "switch0", "type", "bridge")
        self.run("switch", "ip", "link", "set", "switch0", "up")
        for name in self.names:
            self._namespace(name, file)
            _do(f"ip link add to-{name} netns {self.pid('switch')} type veth peer name eth0 netns {self.pid(name)}")
            self.run("switch", "ip", "link", "set", f"to-{name}", "master", "switch0", "up")
            self.run(name, "ip", "address", "add", f"{self.address(name)}/24", "dev", "eth0")
            self.run(name, "ip", "link", "set", "eth0", "up")
            self._shells.append(subprocess.Popen([*self.enter(name), sys.executable, str(HERE / "shell_server.py")],
                                                 stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                                 start_new_session=True))
        for shell in self._shells:
            assert shell.stdout.readline() == b"listening\n"

    def _namespace(self, name: str, hosts: Path) -> None:
        ready = self.folder / f"{name}.ready"
        script = _SETUP.format(name=name, hosts=hosts, ready=ready)
        self._processes[name] = subprocess.Popen(["unshare", "--net", "--uts", "--mount", "sh", "-c", script],
                                                 stdin=subprocess.DEVNULL, start_new_session=True)
        deadline = time.monotonic() + 10
        while not ready.exists():
            assert time.monotonic() < deadline and self._processes[name].poll() is None, f"namespaces of {name}"
            time.sleep(0.01)

    def address(self, name: str) -> str:
        return f"10.77.0.{self.names.index(name) + 1}"

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def enter(self, name: str) -> list[str]:
        """Command words that run something on a host. The hosts share this machine's processors out among
        themselves.
        """
        cpus = sorted(os.sched_getaffinity(0))
        own = cpus[self.names.index(name) % len(cpus)] if name in self.names else cpus[0]
        return ["taskset", "--cpu-list", str(own), "nsenter", "--target", str(self.pid(name)), "--net", "--uts",
                "--mount", "--"]

    def run(self, name: str, *words: str) -> str:
        return subprocess.run([*self.enter(name), *words], check=True, capture_output=True, text=True, timeout=20,
                              stdin=subprocess.DEVNULL).stdout

    def link(self, name: str, state: str) -> None:
        """Sets a host's cable "up" or "down" at the switch. The host itself does not notice it in time."""
        self.run("switch", "ip", "link", "set", f"to-{name}", state)

    def processes(self, name: str) -> list[int]:
        """Processes that run on a host."""
        wanted, found = os.stat(f"/proc/{self.pid(name)}/ns/uts").st_ino, []
        own = {self.pid(name), *(shell.pid for shell in self._shells)}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.stat(entry / "ns/uts").st_ino == wanted and int(entry.name) not in own:
                    found.append(int(entry.name))
        return found

    def close(self) -> None:
        for name in self._processes:
            for pid in self.processes(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
        for process in [*self._shells, *self._processes.values()]:
            process.kill()
            process.wait()


@contextlib.contextmanager
def hosts(count: int, folder: Path) -> Iterator[Hosts]:
    found = Hosts(count, folder)
    try:
        found.start()
        yield found
    finally:
        found.close()


REMOTE_SHELL = f"{sys.executable} {HERE / 'shell_client.py'}"
