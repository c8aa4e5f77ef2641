"""Keeps a group running. The supervisor starts mpirun, receives heartbeats, ends the whole group when a part of it is
lost, and starts it again. No process is left behind, whichever process is killed.

 - Each rank sends a datagram a second. A rank is lost at once when it has ended, after `stopped_timeout` when SIGSTOP
   has stopped it, after `heartbeat_timeout` when it is silent for another reason. A group is lost when its rank 0
   answers no health call within `health_timeout`.
 - The kernel sends SIGTERM to mpirun if the supervisor dies, and SIGKILL to the ranks if mpirun dies. A rank exits if
   its heartbeat reaches no supervisor. So no process survives a `kill -9` of the supervisor or of mpirun.
 - The group runs in a new session (setsid(2)). Its processes are found by the session's id even after mpirun has
   ended. A Ctrl-C at the terminal reaches only the supervisor, which stops the group in order.
 - On other hosts an agent does the same. A host that is silent for some seconds is lost; the group starts again once
   the lease of its processes there has certainly expired.
"""
from __future__ import annotations

import collections
import contextlib
import json
import logging
import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from allspark_server.signals import Signals

from ..output import write_whole
from .agents import Agent, Agents
from .incarnation import Incarnation, Limits, Rank, Start
from .mpi import MpiNotFound
from .notify import Notifier
from .processes import Freeing, is_alive, open_pid, processes_of_session, reap_orphans

logger = logging.getLogger(__name__)

REPORT_SECONDS = 1.0        # between two reports of the ranks' metrics
LOG_LINES = 60              # of the ranks' output; the error shows them when the supervisor gives up


class GroupFailed(RuntimeError):
    """The group could not be kept running. The text has the reason and the ranks' last lines. `misconfigured`: every
    start would fail like this until the options, or files that they name, are changed.
    """

    def __init__(self, text: str, misconfigured: bool = False):
        super().__init__(text)
        self.misconfigured = misconfigured


class Supervisor:
    """Runs one group until it is asked to stop.

    start(owed): plans an incarnation. If requests of a lost incarnation wait to continue, `owed` is its number of
    ranks, because they need the same number again; otherwise 0. Raises ValueError if the group cannot be started.
    runtime_dir: a private folder, for the heartbeat socket. `start` makes it anew if it was removed.
    ready_file: gets JSON: {"addresses", "pid", "ranks"} once the group serves, {"error"} when the supervisor gives up.
    parent_pid: stop when this process ends.
    on_output: gets each chunk of bytes that the group prints.
    on_ready: gets what is written to the ready file.
    on_progress: gets a model's name and the part of it that every rank has loaded, 0…1.
    signals: SIGHUP requests a reload if there is `on_reload`, every other signal a stop.
    on_reload: called after `request_reload`, before rank 0 reloads.
    notifier: reports to systemd.
    drain_limit: seconds that requests may still run after a stop is requested; inf: no limit.
    agents: of the other hosts.
    """

    def __init__(self, start: Callable[[int], Start], runtime_dir: Path, *,
                 ready_file: Path | None = None, parent_pid: int = 0,
                 limits: Limits | None = None, on_output: Callable[[bytes], Any] | None = None,
                 on_ready: Callable[[dict], None] | None = None,
                 on_progress: Callable[[str, float], None] | None = None,
                 signals: Signals | None = None, on_reload: Callable[[], None] | None = None,
                 notifier: Notifier | None = None,
                 drain_limit: float = 0.0, agents: Agents | None = None):
        self._start, self._limits, self.drain_limit = start, limits or Limits(), drain_limit
        self._on_progress, self._on_reload = on_progress, on_reload
        self._ready_file, self._on_output, self._on_ready = ready_file, on_output, on_ready
        self._notifier = notifier or Notifier()
        self._tail: collections.deque[str] = collections.deque(maxlen=LOG_LINES)
        self._selector = selectors.DefaultSelector()
        self._stopping = ""                 # the reason, once a stop is requested
        self._hurry = False                 # a second stop was requested: do not wait for requests
        self._reload = False
        self._ever_ready = False
        self._drained_until = 0.0           # what a client drained stays so in the next incarnation
        self._owed = 0                      # ranks of the lost incarnation whose requests wait to continue
        self.restarts = 0
        self._report_file = runtime_dir / "group.json"
        self._reported: dict = {}
        self._report_at = 0.0
        self._stop_began = math.inf         # when a stop was requested
        self._ends: collections.deque[float] = collections.deque()      # when the last incarnations ended
        self._path = runtime_dir / "heartbeat"
        self._socket = self._open_socket()
        self._agents = agents
        if agents is not None:
            self._selector.register(agents.selector, selectors.EVENT_READ, "agent")
        self._environment = {"ALLSPARK_SUPERVISOR": str(self._path), "TMPDIR": str(runtime_dir)}
        self._parent_pid, self._parent_fd = parent_pid, -1
        if parent_pid:
            self._parent_fd = open_pid(parent_pid)
            if self._parent_fd >= 0:
                self._selector.register(self._parent_fd, selectors.EVENT_READ, "parent")
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, "wake")
        self._signals = signals
        if signals is not None:
            self._selector.register(signals, selectors.EVENT_READ, "signal")

    def _open_socket(self) -> socket.socket:
        self._path.unlink(missing_ok=True)
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            opened.bind(str(self._path))
        except OSError as error:
            opened.close()
            raise OSError(error.errno, f"no socket can be made at {self._path}: {error.strerror}") from None
        opened.setblocking(False)
        self._selector.register(opened, selectors.EVENT_READ, "heartbeat")
        return opened

    def request_stop(self, reason: str) -> None:
        """Requests a clean stop, from any thread. After a second call the supervisor does not wait for requests."""
        self._hurry = bool(self._stopping)
        self._stopping = self._stopping or reason
        self._stop_began = min(self._stop_began, time.monotonic())
        self._wake()

    def request_reload(self) -> None:
        """Requests a call of `on_reload` and a reload of rank 0, from any thread."""
        self._reload = True
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):      # a wake-up is already pending
            os.write(self._wake_write, b"x")

    @property
    def _stop_by(self) -> float:
        """When the drain limit ends, which a reload may change; inf: no stop was requested."""
        return self._stop_began + self.drain_limit

    def run(self) -> None:
        """Runs the group until a stop is requested or the parent ends. Raises GroupFailed when it gives up. Before the
        group has served for the first time, also what `start` raises, and OSError for an mpirun that cannot be run.
        """
        failures = 0
        try:
            while not self._stopping or (self._owed and not self._hurry and time.monotonic() < self._stop_by):
                owed = self._owed
                try:
                    ended = self._run_incarnation()
                except (OSError, MpiNotFound) as error:     # no process or descriptor is left, for example
                    if not self._ever_ready and isinstance(error, (FileNotFoundError, PermissionError, MpiNotFound)):
                        raise
                    self._owed, failures, why = owed, failures + 1, f"it cannot be started: {error}"
                    if failures >= self._limits.max_failures:
                        raise GroupFailed(f"the group cannot be started, {failures} times in a row: {error}") from error
                else:
                    if self._stopping and not self._owed:
                        break
                    ready = time.monotonic() - ended.ready_since if ended.ready_since else 0.0
                    failures = 0 if ended.answered or ready >= self._limits.proven else failures + 1
                    if (ended.fatal and not self._ever_ready) or failures >= self._limits.max_failures:
                        raise GroupFailed(ended.failure(failures), ended.misconfigured and not self._ever_ready)
                    why = ended.error
                delay = self._limits.backoff(max(failures, self._count_ends() - self._limits.tolerated_ends))
                logger.warning("the group ended (%s); starting it again in %.1f s", why, delay)
                self._notifier.status(f"starting again: {why}")
                self._wait(delay)
                self.restarts += 1
            if self._stopping:
                logger.info("stopped: %s", self._stopping)
            if self._ready_file is not None:
                self._ready_file.unlink(missing_ok=True)
        except GroupFailed as error:
            self._notifier.status(f"failed: {error}")
            self._write_ready_file({"error": str(error)})
            raise
        finally:
            self._notifier.stopping()
            self._close()

    def _count_ends(self) -> int:
        """Notes that an incarnation has ended; returns how many have ended lately. A group that serves for a while and
        then runs out of memory, again and again, must not be started without a pause for ever.
        """
        now = time.monotonic()
        self._ends.append(now)
        while self._ends[0] < now - self._limits.window:
            self._ends.popleft()
        return len(self._ends)

    def _run_incarnation(self) -> Incarnation:
        """One incarnation, from its start to the end of its last process."""
        owed, self._owed = self._owed, 0
        try:
            start = self._start(owed)
        except ValueError as error:
            if not self._ever_ready:
                raise
            raise GroupFailed(f"the group cannot be started again: {error}") from error
        removed = not self._path.exists()       # with the private folder, and the list of models in it
        if removed:
            self._selector.unregister(self._socket)
            self._socket.close()
            self._socket = self._open_socket()
        # As long as no incarnation has served, this is a first start: the configuration's models must load.
        environment = {**start.environment, **self._environment,
                       "ALLSPARK_RESTARTS": str(self.restarts if self._ever_ready and not removed else 0),
                       "ALLSPARK_OWES": "1" if owed else "",
                       "ALLSPARK_DRAIN": str(max(0.0, self._drained_until - time.monotonic()))}
        current = Incarnation.begin(start, environment, self._tail)
        process = current.process
        self._selector.register(current.output, selectors.EVENT_READ, "output")
        process_fd = open_pid(process.pid)
        if process_fd >= 0:
            self._selector.register(process_fd, selectors.EVENT_READ, "exit")
        lost = False
        try:
            while process.poll() is None:
                self._handle(current, 1.0)
                if self._stopping and (not owed or current.ready_since or self._hurry
                                       or time.monotonic() > self._stop_by):
                    self._stop(current)
                    break
                problem = current.problem(self._limits, self._agents)
                if problem:
                    logger.warning("%s: the group is ended", problem)
                    current.error, lost = current.error or problem, True
                    break
                self._report(current)
        finally:
            self._end(current, lost)
            self._read_heartbeats(current)
            while self._read_output(current):
                pass
            for descriptor in (process_fd, *(rank.pid_fd for rank in current.ranks.values())):
                if descriptor >= 0:
                    self._selector.unregister(descriptor)
                    os.close(descriptor)
            self._unregister_output(current)
            current.close()
        if current.ready_since:
            self._drained_until = current.drained_until
        if not (self._stopping and process.returncode == 0):
            self._owed = current.expected if current.requests else 0 if current.ready_since else owed
        return current

    # --- events --------------------------------------------------------------------------------------------------

    def _handle(self, current: Incarnation, timeout: float) -> None:
        """Waits for events and handles them."""
        before = time.monotonic()
        events = {key.data for key, _ in self._selector.select(timeout)}
        if time.monotonic() - before > timeout + 2:     # this process was suspended: missing heartbeats prove nothing
            current.healthy = current.healthy and time.monotonic()
            for rank in current.ranks.values():
                rank.last = time.monotonic()
        if "output" in events:
            self._read_output(current)
        if "heartbeat" in events:
            self._read_heartbeats(current)
        if "agent" in events:
            self._read_agents(current)
        if "rank" in events:
            self._note_ended(current)
        self._heed_requests(events, current)
        if os.getpid() == 1:
            reap_orphans(current.process.pid)

    def _read_agents(self, current: Incarnation) -> None:
        for agent, message in self._agents.poll() if self._agents is not None else ():
            if "heartbeat" in message:
                self._note_heartbeat(current, message["heartbeat"], agent)
            for rank in current.ranks.values():
                if rank.agent is agent and rank.pid == message.get("gone"):
                    rank.ended = True

    def _note_ended(self, current: Incarnation) -> None:
        self._read_heartbeats(current)                          # the last messages of the rank
        for rank in current.ranks.values():
            if rank.pid_fd >= 0 and any(key.fd == rank.pid_fd for key, _ in self._selector.select(0)):
                self._selector.unregister(rank.pid_fd)
                os.close(rank.pid_fd)
                rank.pid_fd, rank.ended = -1, True

    def _heed_requests(self, events: set[str], current: Incarnation | None = None) -> None:
        """Handles signals, calls of other threads, and the end of the parent."""
        if "wake" in events:
            os.read(self._wake_read, 4096)
        for number in self._signals.read() if self._signals is not None else ():
            if number == signal.SIGHUP and self._on_reload is not None:
                self._reload = True
            else:
                self.request_stop(number.name)
        if "parent" in events or (self._parent_pid and self._parent_fd < 0 and not is_alive(self._parent_pid)):
            if not self._hurry:
                self.request_stop(f"the parent process {self._parent_pid} has ended")
            self._hurry = True
        if self._reload:
            self._reload = False
            self._do_reload(current)

    def _do_reload(self, current: Incarnation | None) -> None:
        serves = current is not None and bool(current.ready_since)
        if serves:
            self._notifier.reloading()
        try:
            if self._on_reload is not None:
                self._on_reload()
        except (ValueError, TypeError, OSError) as error:
            logger.error("the configuration stays as it was: %s", error)
        else:
            if current is not None and not current.signal_rank0(signal.SIGHUP):
                current.reload_due = True
        if serves:
            self._notifier.ready()

    def _read_heartbeats(self, current: Incarnation) -> None:
        while True:
            try:
                message = json.loads(self._socket.recv(65536))
            except BlockingIOError:
                return
            except (ValueError, UnicodeDecodeError):
                logger.warning("a heartbeat that is not JSON was ignored")
                continue
            if "launch" in message:
                if self._agents is not None:
                    self._agents.launch(message["launch"], message["command"])
            elif current.is_heartbeat_of(message):
                self._note_heartbeat(current, message)

    def _note_heartbeat(self, current: Incarnation, message: dict, agent: Agent | None = None) -> None:
        """Notes a heartbeat from an agent's host, or from this one."""
        number, pid = int(message["rank"]), int(message["pid"])
        if number not in current.ranks:
            rank = current.ranks[number] = Rank(pid, pid_fd=-1 if agent else open_pid(pid), agent=agent)
            if rank.pid_fd >= 0:
                self._selector.register(rank.pid_fd, selectors.EVENT_READ, "rank")
        rank = current.update(message)
        if "loading" in message and self._on_progress is not None:
            self._on_progress(current.loading, current.loaded)
        if rank.state == "ready" and "addresses" in message and not current.ready_since:
            current.ready_since = time.monotonic()
            self._ever_ready = True
            ready = {"addresses": message["addresses"], "pid": os.getpid(), "ranks": current.expected}
            logger.info("serving on %s", ", ".join(message["addresses"]))
            self._write_ready_file(ready)
            self._notifier.ready()
            if current.reload_due:      # it was started with the options before a reload
                current.signal_rank0(signal.SIGHUP)
            if self._on_ready is not None:
                self._on_ready(ready)

    def _read_output(self, current: Incarnation) -> bool:
        """Reads what the group has printed. False if there is nothing (more)."""
        try:
            data = os.read(current.output, 65536)
        except BlockingIOError:
            return False
        if not data:
            self._unregister_output(current)                    # after end of file the descriptor would stay readable
            return False
        self._tail.extend(data.decode(errors="replace").splitlines())
        if self._on_output is not None:
            self._on_output(data)
        return True

    def _unregister_output(self, current: Incarnation) -> None:
        if current.output in self._selector.get_map():
            self._selector.unregister(current.output)

    # --- the end of an incarnation -------------------------------------------------------------------------------

    def _stop(self, current: Incarnation) -> None:
        """Stops the group cleanly: rank 0 waits for its requests, closes the service and releases the other ranks. Does
        nothing if the group does not serve yet. Returns early if the group is lost meanwhile.
        """
        if not current.signal_rank0(signal.SIGUSR1):
            return
        hurried = math.inf
        while current.process.poll() is None:
            self._handle(current, min(0.2, self._limits.stop_timeout))
            clock = time.monotonic()
            if self._hurry and hurried == math.inf:
                hurried = clock
                current.signal_rank0(signal.SIGUSR1)     # the second signal ends the drain
            if min(self._stop_by, hurried) + self._limits.stop_timeout < clock:
                logger.warning("rank 0 did not stop in time: the group is killed, with %d requests", current.requests)
                current.requests = 0
                return
            if current.requests and (problem := current.problem(self._limits, self._agents)):
                current.error = current.error or problem
                logger.warning("the group was lost while it drained %d requests: %s", current.requests, problem)
                return
            self._report(current)

    def _end(self, current: Incarnation, lost: bool) -> None:
        """Ends every process of an incarnation. `lost`: a part of it is gone, so the rest is killed at once,
        and its requests continue in the next incarnation.
        """
        process = current.process
        if lost:
            if self._agents is not None:
                self._agents.kill()
            current.kill_ranks()
        if process.poll() is None:
            process.terminate()
            deadline = time.monotonic() + (self._limits.loss_timeout if lost else self._limits.kill_timeout)
            while process.poll() is None and time.monotonic() < deadline:
                self._handle(current, 0.05 if lost else 0.1)
        freeing = Freeing(self._limits.survival)
        while (left := current.kill_session()) or process.poll() is None:
            if freeing.is_stuck():
                raise GroupFailed(f"processes {processes_of_session(process.pid)} of the group survive SIGKILL")
            self._notifier.alive()
            self._notifier.status(f"ending: {len(left)} killed processes still free their memory")
            if self._agents is not None:
                self._agents.poll()         # renews their leases
            time.sleep(0.02)
        if os.getpid() == 1:
            reap_orphans()
        if self._agents is not None:
            try:
                self._agents.end(self._notifier.alive)
            except RuntimeError as error:
                raise GroupFailed(str(error)) from None
        current.empty_shared_memory()

    def _wait(self, seconds: float) -> None:
        """Sleeps, unless a stop is requested."""
        deadline = time.monotonic() + seconds
        while not self._stopping and (left := deadline - time.monotonic()) > 0:
            events = {key.data for key, _ in self._selector.select(min(left, 1.0))}
            self._notifier.alive()
            self._heed_requests(events)
            if "heartbeat" in events:
                self._socket.recv(65536)                    # drop it: it is from an incarnation that has ended
            if "agent" in events and self._agents is not None:
                self._agents.poll()

    # --- reports -------------------------------------------------------------------------------------------------

    def _report(self, current: Incarnation) -> None:
        """Reports to systemd, and the ranks' metrics to rank 0. The watchdog is not notified while the group has a
        problem or is being ended: each of these has its own time limit, shorter than the watchdog's.
        """
        self._notifier.alive()
        self._notifier.status(current.status(self.restarts))
        report = {"restarts": self.restarts, "ranks": [rank.numbers for _, rank in sorted(current.ranks.items())]}
        clock = time.monotonic()
        if report != self._reported and clock >= self._report_at + REPORT_SECONDS:
            self._reported, self._report_at = report, clock
            _write_json(self._report_file, report)

    def _write_ready_file(self, content: dict) -> None:
        if self._ready_file is not None:
            _write_json(self._ready_file, content)

    def _close(self) -> None:
        self._selector.close()
        self._socket.close()
        for fd in (self._wake_read, self._wake_write, self._parent_fd):
            if fd >= 0:
                os.close(fd)


def _write_json(file: Path, content: dict) -> None:
    try:
        write_whole(file, json.dumps(content) + "\n")
    except OSError as error:
        logger.error("%s cannot be written: %s", file.name, error.strerror)
