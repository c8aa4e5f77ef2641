"""The supervisor's agent on another host, started there by ssh or srun: python -m allspark_launch.group.agent.

Both exchange lines of JSON on the agent's standard input and output, so there is no listener to secure: ssh or Slurm
decides who may connect. The only permission needed is to run commands on the host. The agent places ranks on its host,
runs mpirun's daemon, forwards the ranks' heartbeats and reports at once when a rank has ended. It ends all ranks when
it is asked to, when its standard input is closed, or when its lease expires.

The lease: the supervisor answers each message {"alive": k} with {"lease": k}, which is valid for LEASE_SECONDS after
the agent sent that message. So LEASE_SECONDS after the last answered message, no process of the group runs here.
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
from typing import Any

import psutil

from allspark_client.version import __version__
from allspark_server import logs
from allspark_server.runtime.binding import adopt_orphans, die_with_parent, memory_policy_allowed
from allspark_server.runtime.hosts import SECRET_FILE
from allspark_server.runtime.reservations import CpuReservation, planning
from allspark_server.signals import Signals

from ..machine.placement import place, place_beside
from ..machine.topology import read_topology
from ..output import write_whole
from .folders import private_folder, short_parent, trusted
from .mpi import clean_environment
from .processes import Freeing, is_stopped, neutral_for_oom, open_pid, reap_orphans

logger = logging.getLogger(__name__)

LEASE_SECONDS = 5.0
ALIVE_SECONDS = 0.5
MAX_UNSENT = 1 << 20        # bytes that may wait for the supervisor to read them
EXIT_LEASE = 5


class Agent:
    """Runs ranks on this host. runtime_dir: a private folder. shared_memory: a folder that is emptied after each
    incarnation of the group, or None.
    """

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
        self._signals = Signals(signal.SIGTERM)
        self._selector.register(self._signals, selectors.EVENT_READ, self._close)
        self._unread, self._unsent = b"", bytearray()
        self._ranks: dict[int, int] = {}            # process id -> pidfd
        self._sent: dict[int, float] = {}           # alive messages without an answer -> time
        self._count = 0
        self._lease = time.monotonic()
        self._reserved = CpuReservation()           # of the ranks on this host, as long as this process runs
        self._closed = False                        # the supervisor has closed our standard input, or SIGTERM came
        os.set_blocking(0, False)
        os.set_blocking(1, False)

    def run(self) -> int:
        """Runs until the supervisor is gone; returns the exit status."""
        self._tell({"hello": self._hello()})
        next_alive = 0.0
        try:
            while not self._closed:
                now = time.monotonic()
                if now > self._lease + LEASE_SECONDS:
                    logger.error("no message of the supervisor for %g s: the ranks are ended", LEASE_SECONDS)
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
            raise OSError("the supervisor does not read messages any more")

    def _read_heartbeats(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                data = self._heartbeats.recv(65536)
                try:
                    message = json.loads(data)
                    pid = int(message["pid"])
                except (ValueError, TypeError, KeyError):
                    logger.warning("a malformed heartbeat was ignored")
                    continue
                if pid not in self._ranks:
                    self._ranks[pid] = descriptor = open_pid(pid)
                    if descriptor >= 0:
                        self._selector.register(descriptor, selectors.EVENT_READ, partial(self._gone, pid))
                self._tell({"heartbeat": message})

    def _gone(self, pid: int) -> None:
        self._read_heartbeats()     # its last messages
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
                    survivors = self._end()
                    self._lease = time.monotonic()      # that took a while, but nothing runs now
                    self._tell({"survivors": survivors} if survivors else {"ended": True})

    def _place(self, strict: bool, **options: Any) -> dict:
        try:
            with planning():
                topology, others = read_topology(), self._reserved.others()
                placement = place_beside(topology, others, lambda machine: place(machine, **options))
                self._reserved.take({cpu for rank in placement.ranks for cpu in rank.bound_cpus} - others.keys())
        except ValueError as error:
            return {"error": str(error)}
        placed, allowed = asdict(placement), memory_policy_allowed()
        if strict and not allowed:
            return {"error": "strict: this system does not let processes choose their memory policy"}
        if not allowed:
            for rank in placed["ranks"]:
                rank["memory_node"] = None
            placed["warnings"].append("this system does not let processes choose their memory policy; memory is placed "
                                      "by first touch")
        return placed

    def _launch(self, command: str, environment: dict[str, str], secret: str) -> None:
        """Starts mpirun's daemon by a shell's command line. Its ranks read the incarnation's secret from a file that
        only this user can read.
        """
        write_whole(Path(self._home, SECRET_FILE), secret, 0o600)
        whole = {**clean_environment(self._home), **environment, **self._environment}
        subprocess.Popen(["sh", "-c", f"exec 2>&1; {command}"], env=whole, stdin=subprocess.DEVNULL, stdout=2,
                         start_new_session=True, preexec_fn=_as_daemon)

    def _close(self) -> None:
        self._signals.read()
        self._closed = True

    def _end(self) -> list[int]:
        """Ends every process of the group on this host: all descendants. This process adopts orphans among them.
        Returns the ids of those that do not end.
        """
        freeing, next_alive = Freeing(LEASE_SECONDS), time.monotonic() + ALIVE_SECONDS
        while (left := psutil.Process().children(recursive=True)) and not freeing.is_stuck():
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            reap_orphans()
            if not self._closed and time.monotonic() >= next_alive:
                next_alive = time.monotonic() + ALIVE_SECONDS
                with contextlib.suppress(OSError):
                    self._alive(time.monotonic())
            time.sleep(0.02)
        for descriptor in self._ranks.values():
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(descriptor)
                os.close(descriptor)
        self._ranks.clear()
        Path(self._home, SECRET_FILE).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            for file in self._shared_memory.iterdir() if self._shared_memory else ():
                file.unlink(missing_ok=True)
        return [process.pid for process in left]


def _as_daemon() -> None:
    die_with_parent(signal.SIGKILL)
    neutral_for_oom()


def main() -> int:
    """Runs an agent on standard input and output; returns the exit status."""
    for number in (signal.SIGINT, signal.SIGHUP):       # the supervisor ends it
        signal.signal(number, signal.SIG_IGN)
    logs.set_up("agent", os.environ.get("ALLSPARK_LOG", "INFO"), "text")
    adopt_orphans()
    with contextlib.ExitStack() as stack:
        runtime_dir = stack.enter_context(private_folder(short_parent()))
        shared_memory = stack.enter_context(private_folder("/dev/shm")) if trusted("/dev/shm") else None
        return Agent(runtime_dir, shared_memory).run()


if __name__ == "__main__":
    sys.exit(main())
