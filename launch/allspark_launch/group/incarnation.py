"""One incarnation of a group: the time from the start of its mpirun to the end of its last process. Holds the state
that heartbeats report of its ranks, and decides whether it must be ended.
"""
from __future__ import annotations

import collections
import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allspark_server.runtime.binding import die_with_parent

from .agents import Agent, Agents
from .processes import OutOfMemory, is_stopped, neutral_for_oom, processes_of_session


@dataclass
class Limits:
    """Times in seconds, and how often a group may fail."""

    heartbeat_timeout: float = 10.0     # a process may be busy for seconds without letting its other threads run
    stopped_timeout: float = 3.0
    health_timeout: float = 30.0        # rank 0 makes a health call to itself every second
    start_timeout: float = 120.0        # until every rank has sent its first heartbeat
    step_timeout: float = 300.0         # a step takes milliseconds to seconds: a rank in a longer one hangs
    stop_timeout: float = 10.0          # for a clean end after the drain limit, before processes are killed
    kill_timeout: float = 3.0           # between SIGTERM to mpirun and SIGKILL to all processes
    loss_timeout: float = 0.5           # the same, if the ranks have been killed already
    proven: float = 30.0                # a group that was ready for this long counts as having served
    survival: float = 10.0              # that killed processes may exist without giving memory back
    max_failures: int = 5               # consecutive incarnations that served nothing
    first_backoff: float = 0.5          # doubled after each failure
    max_backoff: float = 30.0
    tolerated_ends: int = 5             # in a window, after which a group that had served is started again at once
    window: float = 600.0

    def backoff(self, failures: int) -> float:
        """The pause in seconds before the next start, after this many consecutive failures."""
        return min(self.first_backoff * 2 ** min(failures - 1, 30), self.max_backoff) if failures > 0 else 0.0


@dataclass
class Start:
    """How to start an incarnation: the mpirun line, additions to the environment, the number of ranks, and the folder
    of their shared memory, which is emptied in the end.
    """

    words: list[str]
    environment: dict[str, str]
    ranks: int
    shared_memory: Path | None = None


@dataclass
class Rank:
    """What the heartbeats report of one rank."""

    pid: int
    last: float = 0.0           # time of the last heartbeat
    state: str = "starting"
    loaded: float = 1.0         # part of the model that is being loaded
    step_seconds: float = 0.0   # how long its present step has taken so far
    stopped_since: float = 0.0  # stopped by SIGSTOP; 0: it runs
    pid_fd: int = -1            # readable once it has ended
    ended: bool = False
    agent: Agent | None = None  # of the other host that it runs on
    numbers: dict[str, Any] = field(default_factory=dict)     # its memory and its steps, for metrics

    @property
    def stopped(self) -> bool:
        """Whether SIGSTOP has stopped its process."""
        return self.pid in self.agent.stopped if self.agent else is_stopped(self.pid)


@dataclass
class Incarnation:
    """The state of one incarnation of a group. `expected`: the number of ranks. `started`, `ready_since` and `healthy`
    are monotonic times.
    """

    process: subprocess.Popen[bytes]
    started: float
    expected: int
    shared_memory: Path | None = None
    ranks: dict[int, Rank] = field(default_factory=dict)
    ready_since: float = 0.0
    healthy: float = 0.0        # when rank 0's last health call was answered; 0: it has made none
    requests: int = 0           # that rank 0 had at its last heartbeat
    draining: bool = False
    reload_due: bool = False    # once rank 0 serves
    drained_until: float = 0.0  # a client's drain ends then (monotonic); inf: it must be undone
    loading: str = ""           # the model that is being loaded
    loads: str = "loaded"       # what part of it is reported: "loaded" or "warmed up"
    answered: bool = False      # a step was computed for a request
    error: str = ""
    fatal: bool = False         # starting the group again would fail too
    misconfigured: bool = False     # and so would starting the supervisor again
    tail: collections.deque[str] = field(default_factory=collections.deque)     # the last lines of all incarnations
    out_of_memory: OutOfMemory = field(default_factory=OutOfMemory)

    @classmethod
    def begin(cls, start: Start, environment: dict[str, str], tail: collections.deque[str]) -> Incarnation:
        """Starts mpirun, in a session of its own."""
        process = subprocess.Popen(start.words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_as_mpirun)
        begun = cls(process, time.monotonic(), start.ranks, start.shared_memory, tail=tail)
        os.set_blocking(begun.output, False)
        return begun

    @property
    def output(self) -> int:
        """The file descriptor of the output of mpirun and the ranks."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    @property
    def loaded(self) -> float:
        """The part of the model that every rank has loaded, or warmed up."""
        return min((rank.loaded for rank in self.ranks.values()), default=0.0)

    def is_heartbeat_of(self, message: dict[str, Any]) -> bool:
        """Whether a heartbeat from this host belongs to this incarnation and not to an earlier one."""
        try:
            session = os.getsid(int(message["pid"]))
        except ProcessLookupError:
            return bool(message.get("error"))       # the last message of a rank that has ended
        return session == self.process.pid

    def update(self, message: dict[str, Any]) -> Rank:
        """Notes what a heartbeat of a known rank reports; returns the rank."""
        rank = self.ranks[int(message["rank"])]
        rank.pid, rank.last, rank.state = int(message["pid"]), time.monotonic(), message["state"]
        rank.step_seconds = float(message.get("step_seconds", 0.0))
        rank.numbers = message.get("numbers", rank.numbers)
        self.answered = self.answered or bool(message.get("served"))
        if "requests" in message:
            self.requests, self.draining = int(message["requests"]), bool(message.get("draining"))
            self.drained_until = time.monotonic() + float(message.get("drain_left", 0.0))
        if "healthy_seconds" in message:
            self.healthy = time.monotonic() - float(message["healthy_seconds"])
        if "loading" in message:
            self.loading, rank.loaded = str(message["loading"]), float(message["part"])
            self.loads = str(message.get("what", "loaded"))
        if message.get("error") and not self.error:
            self.error = message["error"]
            self.fatal, self.misconfigured = bool(message.get("fatal")), bool(message.get("misconfigured"))
        return rank

    def problem(self, limits: Limits, agents: Agents | None) -> str:
        """Why the group must be ended now, or ""."""
        now = time.monotonic()
        for agent in agents.all if agents is not None else ():
            if not agent.ended and (why := agent.why_lost()):
                return why
        if self.fatal or any(rank.state == "failed" for rank in self.ranks.values()):
            return self.error or "a rank failed"
        for number, rank in sorted(self.ranks.items()):
            which = f"rank {number} (process {rank.pid}{f' on {rank.agent.name}' if rank.agent else ''})"
            if rank.ended and self.process.poll() is None:
                return f"{which} has ended, or was killed{self.out_of_memory.explain()}"
            rank.stopped_since = (rank.stopped_since or now) if rank.stopped else 0.0
            if rank.stopped_since and now - rank.stopped_since >= limits.stopped_timeout:
                return f"{which} was stopped {now - rank.stopped_since:.0f} s ago"
            if now - rank.last > limits.heartbeat_timeout:
                return f"{which} has been silent for {now - rank.last:.0f} s"
            if rank.step_seconds > limits.step_timeout:
                return f"{which} has been in one step for {rank.step_seconds:.0f} s"
        if self.ready_since and self.healthy and now - self.healthy > limits.health_timeout:
            return f"rank 0 has not answered a health call for {now - self.healthy:.0f} s"
        if len(self.ranks) < self.expected and now - self.started > limits.start_timeout:
            missing = sorted(set(range(self.expected)) - set(self.ranks))
            return f"no heartbeat of rank(s) {missing} {limits.start_timeout:.0f} s after the start"
        return ""

    def signal_rank0(self, number: signal.Signals) -> bool:
        """Sends a signal to rank 0. Returns False if rank 0 does not serve."""
        rank0 = self.ranks.get(0)
        if rank0 is None or not self.ready_since:
            return False
        try:
            os.kill(rank0.pid, number)
        except ProcessLookupError:
            return False
        return True

    def kill_ranks(self) -> None:
        """Kills the ranks of this host."""
        for rank in self.ranks.values():
            if not rank.ended and rank.agent is None:
                _kill(rank.pid)

    def kill_session(self) -> list[int]:
        """Kills the processes of the session and returns their ids."""
        processes = processes_of_session(self.process.pid)
        for pid in processes:
            _kill(pid)
        return processes

    def empty_shared_memory(self) -> None:
        """Removes what killed ranks have left in their folder."""
        with contextlib.suppress(FileNotFoundError):        # logind has removed it, for example
            for file in self.shared_memory.iterdir() if self.shared_memory else ():
                file.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the output of an incarnation that has ended. Notes how mpirun ended if no rank reported an error."""
        assert self.process.stdout is not None
        self.process.stdout.close()
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        self.error = self.error or f"mpirun {how}{self.out_of_memory.explain()}"

    def status(self, restarts: int) -> str:
        """One line for the service manager's status."""
        if self.draining:
            return f"draining: {self.requests} requests run"
        if self.ready_since:
            return f"serving: {self.requests} requests" + (f", {restarts} restarts" if restarts else "")
        if self.loading:
            return f"starting: {self.loading}, {self.loaded:.0%} {self.loads}"
        return f"starting: {len(self.ranks)} of {self.expected} ranks"

    def failure(self, failures: int) -> str:
        """The error of a supervisor that gives up after so many failures in a row."""
        if self.fatal:
            return self.error
        reason = f"the group ended {failures} times in a row before it had served, last: {self.error}"
        tail = "\n".join(f"  {line}" for line in list(self.tail)[-20:])
        return f"{reason}\nlast lines of the ranks:\n{tail}" if tail else reason


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):       # it has ended by itself
        os.kill(pid, signal.SIGKILL)


def _as_mpirun() -> None:
    """Runs in the new process, before it becomes mpirun."""
    die_with_parent(signal.SIGTERM)
    neutral_for_oom()
