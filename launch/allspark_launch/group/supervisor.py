"""Keeps a group alive: starts its mpirun, listens for heartbeats, ends all of it when any of it is lost, starts it
again, and leaves no process behind, whoever is killed.

 - Each rank sends a datagram a second. A rank that has ended is lost at once, one that was stopped after
   `stopped_timeout` seconds, one that is silent for other reasons after `heartbeat_timeout`; and a group whose rank 0
   answers no health call after `health_timeout`.
 - mpirun gets SIGTERM from the kernel if the supervisor dies, ranks get SIGKILL if mpirun dies, and a rank whose
   heartbeat finds no supervisor exits. So nothing outlives a `kill -9` of either.
 - The group runs in a session of its own: its processes are found by session id even after mpirun is gone, and a
   Ctrl-C at the terminal reaches the supervisor only, which stops the group in order.
 - On other hosts an agent does all that; a host that is silent for some seconds is lost, and the group is started again
   once the lease of what ran there is surely over.
"""
from __future__ import annotations

import collections
import json
import logging
import math
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from allspark_server.runtime.binding import die_with_parent

from .agents import Agent, Agents
from .notify import Notifier
from .processes import is_alive, is_stopped, neutral_for_oom, open_pid, processes_of_session, reap_orphans

logger = logging.getLogger(__name__)

REPORT_SECONDS = 1.0        # between two reports of what ranks count
LOG_LINES = 60              # of the ranks' output, kept for the error when the supervisor gives up


class GroupFailed(RuntimeError):
    """The group could not be kept running; the text has the reason and the ranks' last lines. misconfigured: it would
    end like this again, until somebody changes its options or what they name.
    """

    def __init__(self, text: str, misconfigured: bool = False):
        super().__init__(text)
        self.misconfigured = misconfigured


@dataclass
class Limits:
    """Times in seconds."""

    heartbeat_timeout: float = 10.0     # a process may be busy for some seconds without letting its threads run
    stopped_timeout: float = 3.0
    health_timeout: float = 30.0        # rank 0 makes a health call of its own each second
    start_timeout: float = 120.0        # until every rank has sent its first heartbeat
    step_timeout: float = 300.0         # a step takes milliseconds to seconds; ranks that hang in one are stuck
    stop_timeout: float = 10.0          # for a clean end, before processes are killed; beside the drain's limit
    kill_timeout: float = 3.0           # between SIGTERM to mpirun and SIGKILL to everything
    loss_timeout: float = 0.5           # the same, once the ranks have been killed
    proven: float = 30.0                # a group that was ready for so long has served, even if nobody asked it
    max_failures: int = 5               # lives in a row that served nothing
    first_backoff: float = 0.5          # doubled with each of them
    max_backoff: float = 30.0


@dataclass
class Start:
    """What a life of the group is started with: the mpirun line, additions to the environment, and how many ranks must
    report.
    """

    words: list[str]
    environment: dict[str, str]
    ranks: int


@dataclass
class Rank:
    """What the heartbeats said of one rank."""

    pid: int
    last: float
    state: str = "starting"
    loaded: float = 1.0         # part of the model that is being loaded
    step_seconds: float = 0.0   # how long its present step has been going on
    stopped_since: float = 0.0  # by somebody, with SIGSTOP; 0: it runs
    pid_fd: int = -1            # readable once it has ended
    ended: bool = False
    agent: Agent | None = None  # of the other host that it runs on
    numbers: dict = field(default_factory=dict)     # of its memory and its steps, for metrics


@dataclass
class _Run:
    """One life of the group."""

    process: subprocess.Popen
    started: float
    expected: int               # ranks
    ranks: dict[int, Rank] = field(default_factory=dict)
    ready_since: float = 0.0
    healthy: float = 0.0        # when rank 0's own health call was answered last; 0: it makes none
    requests: int = 0           # that rank 0 had at its last heartbeat
    draining: bool = False
    loading: str = ""           # what is being loaded, for people
    answered: bool = False      # a step was computed for a request
    error: str = ""
    fatal: bool = False         # starting again would not help
    misconfigured: bool = False # nor would starting this supervisor again


class Supervisor:
    """Runs one group until it is asked to stop.

    start(owed): plans a life of the group. `owed`: of how many ranks the lost life was whose requests wait to go on, 0
    if none do; only as many ranks can continue them. Raises ValueError where there is no way. runtime_dir: an existing
    private folder, for the heartbeat socket. shared_memory: a folder that is emptied after each life of the group.
    ready_file: written as JSON {"addresses", "pid", "ranks"} once the group serves, or {"error"} when the supervisor
    gives up. parent_pid: stop when that process ends. on_output: gets each chunk of bytes the group prints. on_ready:
    gets what is written to the ready file. on_progress: gets a model's name and how much of it every rank has loaded,
    0…1. on_reload: called when `request_reload` was; rank 0 is told then. notifier: hears how things are.
    drain_limit: s that requests have to end when a stop is asked for; inf: as long as they take. agents: of the other
    hosts.
    """

    def __init__(self, start: Callable[[int], Start], runtime_dir: Path, *,
                 shared_memory: Path | None = None, ready_file: Path | None = None, parent_pid: int = 0,
                 limits: Limits | None = None, on_output: Callable[[bytes], None] | None = None,
                 on_ready: Callable[[dict], None] | None = None,
                 on_progress: Callable[[str, float], None] | None = None,
                 on_reload: Callable[[], None] = lambda: None, notifier: Notifier | None = None,
                 drain_limit: float = 0.0, agents: Agents | None = None):
        self._start, self._limits, self.drain_limit = start, limits or Limits(), drain_limit
        self._shared_memory, self._on_progress, self._on_reload = shared_memory, on_progress, on_reload
        self._ready_file, self._on_output, self._on_ready = ready_file, on_output, on_ready
        self._notifier = notifier or Notifier()
        self._tail: collections.deque[str] = collections.deque(maxlen=LOG_LINES)
        self._selector = selectors.DefaultSelector()
        self._stopping = ""                 # why, once asked to
        self._hurry = False                 # asked again: requests are not waited for any more
        self._reload = False
        self._ever_ready = False
        self._owed = 0                      # ranks of the life whose requests wait to go on
        self.restarts = 0
        self._report_file = runtime_dir / "group.json"
        self._reported: dict = {}
        self._report_at = 0.0
        self._stop_by = math.inf            # when requests were waited for long enough
        path = runtime_dir / "heartbeat"
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)
        self._selector.register(self._socket, selectors.EVENT_READ, "heartbeat")
        self._agents = agents
        if agents is not None:
            self._selector.register(agents.selector, selectors.EVENT_READ, "agent")
        self._environment = {"ALLSPARK_SUPERVISOR": str(path), "TMPDIR": str(runtime_dir)}
        self._parent_pid, self._parent_fd = parent_pid, -1
        if parent_pid:
            self._parent_fd = open_pid(parent_pid)
            if self._parent_fd >= 0:
                self._selector.register(self._parent_fd, selectors.EVENT_READ, "parent")
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, "wake")

    def request_stop(self, reason: str) -> None:
        """Ask for a clean end; from a signal handler or any thread. Asked twice, requests are not waited for."""
        self._hurry = bool(self._stopping)
        self._stopping = self._stopping or reason
        self._wake()

    def request_reload(self) -> None:
        """Have `on_reload` called, and rank 0 told; from a signal handler or any thread."""
        self._reload = True
        self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"x")
        except BlockingIOError:
            logger.debug("a wake-up is already pending")

    def run(self) -> None:
        """Run the group until a stop is asked for, or the parent ends. Raises GroupFailed when giving up."""
        failures = 0
        try:
            while not self._stopping or (self._owed and not self._hurry and time.monotonic() < self._stop_by):
                run = self._run_once()
                if self._stopping and not self._owed:
                    break
                ready = time.monotonic() - run.ready_since if run.ready_since else 0.0
                failures = 0 if run.answered or ready >= self._limits.proven else failures + 1
                if (run.fatal and not self._ever_ready) or failures >= self._limits.max_failures:
                    raise GroupFailed(self._report(run, failures), run.misconfigured)
                # One that had served is owed at once.
                delay = min(self._limits.first_backoff * 2 ** (failures - 1), self._limits.max_backoff) if failures else 0
                logger.warning("the group ended (%s); starting it again in %.1f s", run.error, delay)
                self._notifier.status(f"starting again: {run.error}")
                self._wait(delay)
                self.restarts += 1
            if self._stopping:
                logger.info("stopped: %s", self._stopping)
            self._remove_ready_file()
        except GroupFailed as error:
            self._notifier.status(f"failed: {error}")
            self._write_ready_file({"error": str(error)})
            raise
        finally:
            self._notifier.stopping()
            self._close()

    def _run_once(self) -> _Run:
        """One life of the group, from start to the end of its last process."""
        owed, self._owed = self._owed, 0
        try:
            start = self._start(owed)
        except ValueError as error:
            if not self._ever_ready:
                raise
            raise GroupFailed(f"the group cannot be started again: {error}") from error
        # A life after ones that never served is a start still: the configuration's models must load.
        environment = {**start.environment, **self._environment,
                       "ALLSPARK_RESTARTS": str(self.restarts if self._ever_ready else 0),
                       "ALLSPARK_OWES": "1" if owed else ""}
        process = subprocess.Popen(start.words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_as_mpirun)
        run = _Run(process, time.monotonic(), start.ranks)
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, "output")
        process_fd = open_pid(process.pid)
        if process_fd >= 0:
            self._selector.register(process_fd, selectors.EVENT_READ, "exit")
        lost = False
        try:
            while process.poll() is None:
                self._handle(run, 1.0)
                if self._stopping and (not owed or run.ready_since or self._hurry):
                    self._stop(run)
                    break
                problem = self._problem(run)
                if problem:
                    logger.warning("%s: the group is ended", problem)
                    run.error, lost = run.error or problem, True
                    break
                self._tell(run)
        finally:
            self._end(run, lost)
            self._read_heartbeats(run)
            while self._read_output(run):
                pass
            for descriptor in (process_fd, *(rank.pid_fd for rank in run.ranks.values())):
                if descriptor >= 0:
                    self._selector.unregister(descriptor)
                    os.close(descriptor)
            self._unregister_output(run)
            process.stdout.close()
        if not run.error:
            code = process.returncode
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
            run.error = f"mpirun {how}"
        if not (self._stopping and process.returncode == 0) and (run.requests or (not run.ready_since and owed)):
            self._owed = run.expected if run.requests else owed
        return run

    def _handle(self, run: _Run, timeout: float) -> None:
        """Wait for something to happen and take note of it."""
        before = time.monotonic()
        events = {key.data for key, _ in self._selector.select(timeout)}
        if time.monotonic() - before > timeout + 2:         # this process was suspended: silence proves nothing
            run.healthy = run.healthy and time.monotonic()
            for rank in run.ranks.values():
                rank.last = time.monotonic()
        if "output" in events:
            self._read_output(run)
        if "heartbeat" in events:
            self._read_heartbeats(run)
        if "agent" in events:
            self._read_agents(run)
        if "wake" in events:
            os.read(self._wake_read, 4096)
        if "rank" in events:
            self._note_ended(run)
        if "parent" in events or (self._parent_pid and self._parent_fd < 0 and not is_alive(self._parent_pid)):
            self._stopping, self._hurry = self._stopping or f"the parent process {self._parent_pid} has ended", True
        if self._reload:
            self._reload = False
            self._do_reload(run)
        if os.getpid() == 1:
            reap_orphans(run.process.pid)

    def _read_agents(self, run: _Run) -> None:
        for agent, message in self._agents.poll():
            if "heartbeat" in message:
                self._note_heartbeat(run, message["heartbeat"], agent)
            for rank in run.ranks.values():
                if rank.agent is agent and rank.pid == message.get("gone"):
                    rank.ended = True

    def _note_ended(self, run: _Run) -> None:
        self._read_heartbeats(run)                               # its last words
        for rank in run.ranks.values():
            if rank.pid_fd >= 0 and any(key.fd == rank.pid_fd for key, _ in self._selector.select(0)):
                self._selector.unregister(rank.pid_fd)
                os.close(rank.pid_fd)
                rank.pid_fd, rank.ended = -1, True

    def _do_reload(self, run: _Run) -> None:
        self._notifier.reloading()
        try:
            self._on_reload()
        except (ValueError, TypeError, OSError) as error:
            logger.error("the configuration is as it was: %s", error)
        else:
            self._signal_rank0(run, signal.SIGHUP)
        if run.ready_since:
            self._notifier.ready()

    def _problem(self, run: _Run) -> str:
        """Why the group must be ended now, or ""."""
        now = time.monotonic()
        for agent in self._agents.all if self._agents is not None else ():
            if not agent.ended and (why := agent.why_lost()):
                return why
        if run.fatal or any(r.state == "failed" for r in run.ranks.values()):
            return run.error or "a rank failed"
        for number, rank in sorted(run.ranks.items()):
            which = f"rank {number} (process {rank.pid}{f' on {rank.agent.name}' if rank.agent else ''})"
            if rank.ended and run.process.poll() is None:
                return f"{which} has ended, or was killed"
            stopped = rank.pid in rank.agent.stopped if rank.agent else is_stopped(rank.pid)
            rank.stopped_since = (rank.stopped_since or now) if stopped else 0.0
            if rank.stopped_since and now - rank.stopped_since >= self._limits.stopped_timeout:
                return f"{which} was stopped {now - rank.stopped_since:.0f} s ago"
            if now - rank.last > self._limits.heartbeat_timeout:
                return f"{which} has been silent for {now - rank.last:.0f} s"
            if rank.step_seconds > self._limits.step_timeout:
                return f"{which} has been in one step for {rank.step_seconds:.0f} s"
        if run.ready_since and run.healthy and now - run.healthy > self._limits.health_timeout:
            return f"rank 0 has not answered a health call for {now - run.healthy:.0f} s"
        if len(run.ranks) < run.expected and now - run.started > self._limits.start_timeout:
            missing = sorted(set(range(run.expected)) - set(run.ranks))
            return f"no sign of rank(s) {missing} {self._limits.start_timeout:.0f} s after the start"
        return ""

    def _tell(self, run: _Run) -> None:
        """Systemd, how things are. It hears no sign of life while something is wrong with the group, or it is being
        ended; each of these has a limit of its own, shorter than the watchdog's.
        """
        self._notifier.alive()
        self._write_report(run)
        if run.draining:
            text = f"draining: {run.requests} requests run"
        elif run.ready_since:
            text = f"serving: {run.requests} requests" + (f", {self.restarts} restarts" if self.restarts else "")
        else:
            text = f"starting: {run.loading or f'{len(run.ranks)} of {run.expected} ranks'}"
        self._notifier.status(text)

    def _read_heartbeats(self, run: _Run) -> None:
        while True:
            try:
                message = json.loads(self._socket.recv(65536))
            except BlockingIOError:
                return
            except (ValueError, UnicodeDecodeError):
                logger.warning("a heartbeat that is not JSON was ignored")
                continue
            if "launch" in message:
                self._agents.launch(message["launch"], message["command"])
            else:
                self._note(run, message)

    def _note(self, run: _Run, message: dict) -> None:
        pid = int(message["pid"])
        try:
            session = os.getsid(pid)
        except ProcessLookupError:
            session = run.process.pid if message.get("error") else 0    # its last words still count
        if session != run.process.pid:
            return                                          # of a life that is over
        self._note_heartbeat(run, message)

    def _note_heartbeat(self, run: _Run, message: dict, agent: Agent | None = None) -> None:
        """agent: of the host from which it came; None: from this one."""
        pid = int(message["pid"])
        rank = run.ranks.get(int(message["rank"]))
        if rank is None:
            rank = run.ranks[int(message["rank"])] = Rank(pid, 0.0, pid_fd=-1 if agent else open_pid(pid), agent=agent)
            if rank.pid_fd >= 0:
                self._selector.register(rank.pid_fd, selectors.EVENT_READ, "rank")
        rank.pid, rank.last, rank.state = pid, time.monotonic(), message["state"]
        rank.step_seconds = float(message.get("step_seconds", 0.0))
        rank.numbers = message.get("numbers", rank.numbers)
        run.answered = run.answered or bool(message.get("served"))
        if "requests" in message:
            run.requests, run.draining = int(message["requests"]), bool(message.get("draining"))
        if "healthy_seconds" in message:
            run.healthy = time.monotonic() - float(message["healthy_seconds"])
        if "loading" in message:
            rank.loaded = float(message["part"])
            run.loading = f"{message['loading']}, {min(r.loaded for r in run.ranks.values()):.0%} loaded"
            if self._on_progress is not None:
                self._on_progress(str(message["loading"]), min(r.loaded for r in run.ranks.values()))
        if message.get("error") and not run.error:
            run.error = message["error"]
            run.fatal, run.misconfigured = bool(message.get("fatal")), bool(message.get("misconfigured"))
        if rank.state == "ready" and "addresses" in message and not run.ready_since:
            run.ready_since = time.monotonic()
            self._ever_ready = True
            ready = {"addresses": message["addresses"], "pid": os.getpid(), "ranks": run.expected}
            logger.info("serving on %s", ", ".join(message["addresses"]))
            self._write_ready_file(ready)
            self._notifier.ready()
            if self._on_ready is not None:
                self._on_ready(ready)

    def _read_output(self, run: _Run) -> bool:
        """Take what the group has printed; False when there is nothing (more)."""
        try:
            data = os.read(run.process.stdout.fileno(), 65536)
        except BlockingIOError:
            return False
        if not data:
            self._unregister_output(run)                    # or it would be readable for ever
            return False
        self._tail.extend(data.decode(errors="replace").splitlines())
        if self._on_output is not None:
            self._on_output(data)
        return True

    def _unregister_output(self, run: _Run) -> None:
        if run.process.stdout in self._selector.get_map():
            self._selector.unregister(run.process.stdout)

    def _signal_rank0(self, run: _Run, number: signal.Signals) -> bool:
        """Whether there is a rank 0 that serves, and it was told."""
        rank0 = run.ranks.get(0)
        if rank0 is None or not run.ready_since:
            return False
        try:
            os.kill(rank0.pid, number)
        except ProcessLookupError:
            return False
        return True

    def _stop(self, run: _Run) -> None:
        """A clean end: rank 0 lets its requests end, closes the service and lets the other ranks go. A group that does
        not serve yet has nothing to close. Returns early if the group is lost meanwhile.
        """
        if not self._signal_rank0(run, signal.SIGUSR1):
            return
        self._stop_by = min(self._stop_by, time.monotonic() + self.drain_limit)
        hurried = math.inf
        while run.process.poll() is None:
            self._handle(run, min(0.2, self._limits.stop_timeout))
            now = time.monotonic()
            if self._hurry and hurried == math.inf:
                hurried = now
                self._signal_rank0(run, signal.SIGUSR1)     # again: at once
            if min(self._stop_by, hurried) + self._limits.stop_timeout < now:
                logger.warning("rank 0 did not stop in time: its processes are killed, with %d requests", run.requests)
                run.requests = 0
                return
            if run.requests and (problem := self._problem(run)):
                run.error = run.error or problem
                logger.warning("the group was lost while it was drained of %d requests: %s", run.requests, problem)
                return
            self._tell(run)

    def _end(self, run: _Run, lost: bool) -> None:
        """Make sure that nothing of this life is left. `lost`: some of it cannot go on, and nothing is asked of the
        rest: its requests wait.
        """
        process = run.process
        if lost:
            if self._agents is not None:
                self._agents.kill()
            for rank in run.ranks.values():
                if not rank.ended and rank.agent is None:
                    _kill(rank.pid)
        if process.poll() is None:
            process.terminate()
            deadline = time.monotonic() + (self._limits.loss_timeout if lost else self._limits.kill_timeout)
            while process.poll() is None and time.monotonic() < deadline:
                self._handle(run, 0.05 if lost else 0.1)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            left = processes_of_session(process.pid)
            for pid in left:
                _kill(pid)
            if process.poll() is not None and not left:
                if os.getpid() == 1:
                    reap_orphans()
                if self._agents is not None:
                    self._agents.end(self._notifier.alive)
                for file in self._shared_memory.iterdir() if self._shared_memory else ():
                    file.unlink(missing_ok=True)
                return
            time.sleep(0.02)
        raise GroupFailed(f"processes {processes_of_session(process.pid)} of the group survive SIGKILL")

    def _wait(self, seconds: float) -> None:
        """Sleep, but not through a stop."""
        deadline = time.monotonic() + seconds
        while not self._stopping and (left := deadline - time.monotonic()) > 0:
            events = {key.data for key, _ in self._selector.select(min(left, 1.0))}
            self._notifier.alive()
            if "wake" in events:
                os.read(self._wake_read, 4096)
            if "parent" in events:
                self._stopping, self._hurry = f"the parent process {self._parent_pid} has ended", True
            if "heartbeat" in events:
                self._socket.recv(65536)                    # of a life that is over
            if "agent" in events:
                self._agents.poll()

    def _report(self, run: _Run, failures: int) -> str:
        what = run.error if run.fatal else f"the group ended {failures} times in a row before it had served, last: " \
                                           f"{run.error}"
        tail = "\n".join(f"  {line}" for line in list(self._tail)[-20:])
        return f"{what}\nlast lines of the ranks:\n{tail}" if tail and not run.fatal else what

    def _write_report(self, run: _Run) -> None:
        """For rank 0: what all ranks have said."""
        report = {"restarts": self.restarts, "ranks": [run.ranks[number].numbers for number in sorted(run.ranks)]}
        now = time.monotonic()
        if report == self._reported or now < self._report_at + REPORT_SECONDS:
            return
        self._reported, self._report_at = report, now
        _write_json(self._report_file, report)

    def _write_ready_file(self, content: dict) -> None:
        if self._ready_file is None:
            return
        _write_json(self._ready_file, content)

    def _remove_ready_file(self) -> None:
        if self._ready_file is not None:
            self._ready_file.unlink(missing_ok=True)

    def _close(self) -> None:
        self._selector.close()
        self._socket.close()
        for fd in (self._wake_read, self._wake_write, self._parent_fd):
            if fd >= 0:
                os.close(fd)


def _write_json(file: Path, content: dict) -> None:
    """A reader sees all of it or nothing."""
    temporary = file.with_name(file.name + ".new")
    try:
        temporary.write_text(json.dumps(content) + "\n")
        temporary.replace(file)
    except OSError as error:
        logger.error("%s cannot be written: %s", file.name, error.strerror)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        logger.debug("process %d ended by itself", pid)


def _as_mpirun() -> None:
    """In the process that becomes mpirun."""
    die_with_parent(signal.SIGTERM)
    neutral_for_oom()
