"""The supervisor's hands on another host, which it starts there by ssh or srun: python -m allspark_launch.group.agent.

They talk by lines of JSON on standard input and output, so no listener needs a guard: who may run commands on a host
may do this. The agent places ranks on its host, runs mpirun's daemon, passes on the ranks' heartbeats, tells at once when
one has ended, and ends them all when it is told to, when the supervisor's end of the line is closed, or when its lease
runs out.

The lease: each message {"alive": k} is answered {"lease": k}, and holds for LEASE_SECONDS from when it was sent. So
whoever has waited that long since the last one it got knows that nothing of the group runs here any more.
"""
from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import psutil

from allspark_client.version import __version__
from allspark_server import logs
from allspark_server.runtime.binding import adopt_orphans, die_with_parent, memory_policy_allowed

from ..machine.placement import place
from ..machine.topology import read_topology
from .folders import private_folder, short_parent, trusted
from .mpi import clean_environment
from .processes import is_stopped, neutral_for_oom, open_pid, reap_orphans

logger = logging.getLogger(__name__)

LEASE_SECONDS = 5.0
ALIVE_SECONDS = 0.5
MAX_UNSENT = 1 << 20        # bytes that the supervisor has not taken
EXIT_LEASE = 5


class Agent:
    """runtime_dir: a private folder. shared_memory: another, which is emptied after each incarnation of the group; or None."""

    def __init__(self, runtime_dir: Path, shared_memory: Path | None):
        self._shared_memory = shared_memory
        self._environment = {"ALLSPARK_SUPERVISOR": str(runtime_dir / "heartbeat"), "TMPDIR": str(runtime_dir)}
        if shared_memory is not None:
            self._environment["ALLSPARK_SHARED_MEMORY"] = str(shared_memory)
        self._home = str(runtime_dir)
        self._heartbeats = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._heartbeats.bind(self._environment["ALLSPARK_SUPERVISOR"])
        self._heartbeats.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._heartbeats, selectors.EVENT_READ, self._read_heartbeats)
        self._selector.register(0, selectors.EVENT_READ, self._read_commands)
        self._unread, self._unsent = b"", bytearray()
        self._ranks: dict[int, int] = {}            # process: descriptor
        self._sent: dict[int, float] = {}           # alive messages that were not answered yet
        self._count = 0
        self._lease = time.monotonic()
        self._closed = False                        # the supervisor's end of the line
        os.set_blocking(0, False)
        os.set_blocking(1, False)

    def run(self) -> int:
        """Until the supervisor is gone; the exit status."""
        self._tell({"hello": self._hello()})
        next_alive = 0.0
        try:
            while not self._closed:
                now = time.monotonic()
                if now > self._lease + LEASE_SECONDS:
                    logger.error("nothing was heard of the supervisor for %g s: the group is ended", LEASE_SECONDS)
                    return EXIT_LEASE
                if now >= next_alive:
                    next_alive = now + ALIVE_SECONDS
                    self._alive(now)
                for key, _ in self._selector.select(next_alive - now):
                    key.data()
                reap_orphans()
        finally:
            self._end()
        return 0

    def _hello(self) -> dict:
        topology = read_topology()
        return {"version": __version__, "host": socket.gethostname(), "nodes": len(topology.default_nodes),
                "cores": sum(len(n.cores) for n in topology.nodes)}

    def _alive(self, now: float) -> None:
        self._count += 1
        self._sent[self._count] = now
        self._tell({"alive": self._count, "stopped": [pid for pid in self._ranks if is_stopped(pid)]})

    def _tell(self, message: dict) -> None:
        self._unsent += json.dumps(message).encode() + b"\n"
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[:os.write(1, self._unsent)]
        if len(self._unsent) > MAX_UNSENT:
            raise OSError("the supervisor takes nothing any more")

    def _read_heartbeats(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                data = self._heartbeats.recv(65536)
                try:
                    message = json.loads(data)
                    pid = int(message["pid"])
                except (ValueError, TypeError, KeyError):
                    logger.warning("a heartbeat that is not one was ignored")
                    continue
                if pid not in self._ranks:
                    self._ranks[pid] = descriptor = open_pid(pid)
                    if descriptor >= 0:
                        self._selector.register(descriptor, selectors.EVENT_READ, partial(self._gone, pid))
                self._tell({"heartbeat": message})

    def _gone(self, pid: int) -> None:
        self._read_heartbeats()      # its last words
        descriptor = self._ranks[pid]
        with contextlib.suppress(KeyError):
            self._selector.unregister(descriptor)
            os.close(descriptor)
            self._tell({"gone": pid})

    def _read_commands(self) -> None:
        try:
            data = os.read(0, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._closed = True
            return
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            for name, value in json.loads(line).items():
                if name == "lease":
                    self._lease = max(self._lease, self._sent.get(value, 0.0))
                    self._sent = {k: t for k, t in self._sent.items() if k > value}
                elif name == "place":
                    self._tell({"placed": self._place(**value)})
                elif name == "launch":
                    self._launch(**value)
                elif name == "end":
                    self._end()
                    self._tell({"ended": True})

    def _place(self, strict: bool, **options) -> dict:
        try:
            placement = place(read_topology(), **options)
        except ValueError as error:
            return {"error": str(error)}
        found, allowed = asdict(placement), memory_policy_allowed()
        if strict and not allowed:
            return {"error": "strict: this system does not let processes choose their memory policy"}
        if not allowed:
            for rank in found["ranks"]:
                rank["memory_node"] = None
            found["warnings"].append("this system does not let processes choose their memory policy; memory is placed "
                                     "by first touch")
        return found

    def _launch(self, command: str, environment: dict[str, str]) -> None:
        """Mpirun's daemon, as a shell's command line."""
        whole = {**clean_environment(self._home), **environment, **self._environment}
        subprocess.Popen(["sh", "-c", f"exec 2>&1; {command}"], env=whole, stdin=subprocess.DEVNULL, stdout=2,
                         start_new_session=True, preexec_fn=_as_daemon)

    def _end(self) -> None:
        """End every process of the group here: all descendants, as orphans among them come to this process."""
        deadline = time.monotonic() + LEASE_SECONDS
        while (left := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            reap_orphans()
            time.sleep(0.02)
        for pid, descriptor in self._ranks.items():
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(descriptor)
                os.close(descriptor)
        self._ranks.clear()
        for file in self._shared_memory.iterdir() if self._shared_memory else ():
            file.unlink(missing_ok=True)


def _as_daemon() -> None:
    die_with_parent(signal.SIGKILL)
    neutral_for_oom()


def main() -> int:
    """Run an agent on standard input and output."""
    for number in (signal.SIGINT, signal.SIGHUP):       # its line tells when it is time to go
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    logs.set_up("agent", os.environ.get("ALLSPARK_LOG", "INFO"), "text")
    adopt_orphans()
    with contextlib.ExitStack() as stack:
        runtime_dir = stack.enter_context(private_folder(short_parent()))
        shared_memory = stack.enter_context(private_folder("/dev/shm")) if trusted("/dev/shm") else None
        return Agent(runtime_dir, shared_memory).run()


if __name__ == "__main__":
    sys.exit(main())
