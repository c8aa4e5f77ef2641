"""Keeps a group alive: starts its mpirun, listens for heartbeats, ends all of it when any of it is lost, starts it
again, and leaves no process behind, whoever is killed.

 - Each rank sends a datagram a second. A rank silent for `heartbeat_timeout` seconds is lost.
 - mpirun gets SIGTERM from the kernel if the supervisor dies, ranks get SIGKILL if mpirun dies, and a rank whose
   heartbeat finds no supervisor exits. So nothing outlives a `kill -9` of either.
 - The group runs in a session of its own: its processes are found by session id even after mpirun is gone, and a
   Ctrl-C at the terminal reaches the supervisor only, which stops the group in order.
"""
from __future__ import annotations

import collections
import contextlib
import errno
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

from allspark_server.runtime.binding import die_with_parent

logger = logging.getLogger(__name__)

LOG_LINES = 60              # of the ranks' output, kept for the error when the supervisor gives up


class GroupFailed(RuntimeError):
    """The group could not be kept running; the text has the reason and the ranks' last lines. misconfigured: it would
    end like this again, until somebody changes its options or what they name."""

    def __init__(self, text: str, misconfigured: bool = False):
        super().__init__(text)
        self.misconfigured = misconfigured


@dataclass
class Limits:
    """Times in seconds."""
    heartbeat_timeout: float = 10.0
    start_timeout: float = 120.0        # until every rank has sent its first heartbeat
    step_timeout: float = 300.0         # a step takes milliseconds to seconds; ranks that hang in one are stuck
    stop_timeout: float = 10.0          # for a clean end, before processes are killed
    kill_timeout: float = 3.0           # between SIGTERM to mpirun and SIGKILL to everything
    proven: float = 30.0                # a group that was ready for so long has served, even if nobody asked it
    max_failures: int = 5               # lives in a row that served nothing
    first_backoff: float = 0.5          # doubled with each of them
    max_backoff: float = 30.0


@dataclass
class Rank:
    """What the heartbeats said of one rank."""
    pid: int
    last: float
    state: str = "starting"
    loaded: float = 1.0         # part of the model that is being loaded
    step_seconds: float = 0.0   # how long its present step has been going on


@dataclass
class _Run:
    """One life of the group."""
    process: subprocess.Popen
    started: float
    ranks: dict[int, Rank] = field(default_factory=dict)
    ready_since: float = 0.0
    answered: bool = False      # a step was computed for a request
    error: str = ""
    fatal: bool = False         # starting again would not help
    misconfigured: bool = False # nor would starting this supervisor again


def processes_of_session(session: int) -> list[int]:
    """Ids of the living (not zombie) processes of a session."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(entry))
    return found


def reap_orphans() -> None:
    """Take the exit status of every child that has ended. As process 1 of a container a supervisor inherits the ranks
    of an mpirun that was killed, and nobody else would; between two lives of a group it has no child of its own."""
    with contextlib.suppress(ChildProcessError):            # no child at all
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


class Supervisor:
    """Runs one group until it is asked to stop.

    words, environment: the mpirun line. ranks: how many must report. runtime_dir: an existing private folder, for
    the heartbeat socket. shared_memory: a folder that is emptied after each life of the group. ready_file: written as
    JSON {"addresses", "pid", "ranks"} once the group serves, or {"error"} when the supervisor gives up. parent_pid:
    stop when that process ends. on_output: gets each chunk of bytes the group prints. on_progress: gets a model's name
    and how much of it every rank has loaded, 0…1.
    """

    def __init__(self, words: list[str], environment: dict[str, str], ranks: int, runtime_dir: Path, *,
                 shared_memory: Path | None = None, ready_file: Path | None = None, parent_pid: int = 0,
                 limits: Limits | None = None, on_output: Callable[[bytes], None] | None = None,
                 on_ready: Callable[[dict], None] | None = None,
                 on_progress: Callable[[str, float], None] | None = None):
        self._words, self._ranks, self._limits = words, ranks, limits or Limits()
        self._shared_memory, self._on_progress = shared_memory, on_progress
        self._ready_file, self._on_output, self._on_ready = ready_file, on_output, on_ready
        self._tail: collections.deque[str] = collections.deque(maxlen=LOG_LINES)
        self._selector = selectors.DefaultSelector()
        self._stopping = ""                 # why, once asked to
        self._ever_ready = False
        self.restarts = 0
        path = runtime_dir / "heartbeat"
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)
        self._selector.register(self._socket, selectors.EVENT_READ, "beat")
        self._environment = {**environment, "ALLSPARK_SUPERVISOR": str(path), "TMPDIR": str(runtime_dir)}
        self._parent_pid, self._parent_fd = parent_pid, -1
        if parent_pid:
            self._parent_fd = _open_pid(parent_pid)
            if self._parent_fd >= 0:
                self._selector.register(self._parent_fd, selectors.EVENT_READ, "parent")
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, "wake")

    def request_stop(self, reason: str) -> None:
        """Ask for a clean end; from a signal handler or any thread."""
        self._stopping = self._stopping or reason
        try:
            os.write(self._wake_write, b"x")
        except BlockingIOError:
            logger.debug("a stop is already pending")

    def run(self) -> None:
        """Run the group until a stop is asked for, or the parent ends. Raises GroupFailed when giving up."""
        failures = 0
        try:
            while not self._stopping:
                run = self._run_once()
                if self._stopping:
                    break
                ready = time.monotonic() - run.ready_since if run.ready_since else 0.0
                failures = 0 if run.answered or ready >= self._limits.proven else failures + 1
                if (run.fatal and not self._ever_ready) or failures >= self._limits.max_failures:
                    raise GroupFailed(self._report(run, failures), run.misconfigured)
                delay = min(self._limits.first_backoff * 2 ** max(0, failures - 1), self._limits.max_backoff)
                logger.warning("the group ended (%s); starting it again in %.1f s", run.error, delay)
                self._wait(delay)
                self.restarts += 1
            if self._stopping:
                logger.info("stopped: %s", self._stopping)
            self._remove_ready_file()
        except GroupFailed as error:
            self._write_ready_file({"error": str(error)})
            raise
        finally:
            self._close()

    def _run_once(self) -> _Run:
        """One life of the group, from start to the end of its last process."""
        # A life after ones that never served is a start still: the configuration's models must load.
        environment = {**self._environment, "ALLSPARK_RESTARTS": str(self.restarts if self._ever_ready else 0)}
        process = subprocess.Popen(self._words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, start_new_session=True,
                                   preexec_fn=lambda: die_with_parent(signal.SIGTERM))
        run = _Run(process, time.monotonic())
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, "output")
        process_fd = _open_pid(process.pid)
        if process_fd >= 0:
            self._selector.register(process_fd, selectors.EVENT_READ, "exit")
        try:
            while process.poll() is None:
                self._handle(run, 1.0)
                if self._stopping:
                    self._stop(run)
                    break
                problem = self._problem(run)
                if problem:
                    run.error = run.error or problem
                    break
        finally:
            self._end(run)
            while self._read_output(run):
                pass
            if process_fd >= 0:
                self._selector.unregister(process_fd)
                os.close(process_fd)
            self._unregister_output(run)
            process.stdout.close()
        self._read_beats(run)
        if not run.error:
            code = process.returncode
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
            run.error = f"mpirun {how}"
        return run

    def _handle(self, run: _Run, timeout: float) -> None:
        """Wait for something to happen and take note of it."""
        before = time.monotonic()
        events = {key.data for key, _ in self._selector.select(timeout)}
        if time.monotonic() - before > timeout + 2:         # this process was suspended: silence proves nothing
            for rank in run.ranks.values():
                rank.last = time.monotonic()
        if "output" in events:
            self._read_output(run)
        if "beat" in events:
            self._read_beats(run)
        if "wake" in events:
            os.read(self._wake_read, 4096)
        if "parent" in events or (self._parent_pid and self._parent_fd < 0 and not _alive(self._parent_pid)):
            self._stopping = self._stopping or f"the parent process {self._parent_pid} has ended"

    def _problem(self, run: _Run) -> str:
        """Why the group must be ended now, or "". """
        now = time.monotonic()
        if run.fatal or any(r.state == "failed" for r in run.ranks.values()):
            return run.error or "a rank failed"
        for number, rank in sorted(run.ranks.items()):
            if now - rank.last > self._limits.heartbeat_timeout:
                return f"rank {number} (process {rank.pid}) has been silent for {now - rank.last:.0f} s"
            if rank.step_seconds > self._limits.step_timeout:
                return f"rank {number} (process {rank.pid}) has been in one step for {rank.step_seconds:.0f} s"
        if len(run.ranks) < self._ranks and now - run.started > self._limits.start_timeout:
            missing = sorted(set(range(self._ranks)) - set(run.ranks))
            return f"no sign of rank(s) {missing} {self._limits.start_timeout:.0f} s after the start"
        return ""

    def _read_beats(self, run: _Run) -> None:
        while True:
            try:
                message = json.loads(self._socket.recv(65536))
            except BlockingIOError:
                return
            except (ValueError, UnicodeDecodeError):
                logger.warning("a heartbeat that is not JSON was ignored")
                continue
            self._note(run, message)

    def _note(self, run: _Run, message: dict) -> None:
        pid = int(message["pid"])
        try:
            session = os.getsid(pid)
        except ProcessLookupError:
            session = run.process.pid if message.get("error") else 0    # its last words still count
        if session != run.process.pid:
            return                                          # of a life that is over
        rank = run.ranks.setdefault(int(message["rank"]), Rank(pid, 0.0))
        rank.pid, rank.last, rank.state = pid, time.monotonic(), message["state"]
        rank.step_seconds = float(message.get("step_seconds", 0.0))
        run.answered = run.answered or bool(message.get("served"))
        if "loading" in message:
            rank.loaded = float(message["part"])
            if self._on_progress is not None:
                self._on_progress(str(message["loading"]), min(r.loaded for r in run.ranks.values()))
        if message.get("error") and not run.error:
            run.error = message["error"]
            run.fatal, run.misconfigured = bool(message.get("fatal")), bool(message.get("misconfigured"))
        if rank.state == "ready" and "addresses" in message and not run.ready_since:
            run.ready_since = time.monotonic()
            self._ever_ready = True
            ready = {"addresses": message["addresses"], "pid": os.getpid(), "ranks": self._ranks}
            logger.info("serving on %s", ", ".join(message["addresses"]))
            self._write_ready_file(ready)
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

    def _stop(self, run: _Run) -> None:
        """A clean end: rank 0 closes the service and lets the others go. A group that does not serve yet has nothing
        to close."""
        rank0 = run.ranks.get(0)
        if rank0 is None or not run.ready_since:
            return
        try:
            os.kill(rank0.pid, signal.SIGUSR1)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + self._limits.stop_timeout
        while run.process.poll() is None and time.monotonic() < deadline:
            self._handle(run, min(0.2, self._limits.stop_timeout))

    def _end(self, run: _Run) -> None:
        """Make sure that nothing of this life is left."""
        process = run.process
        if process.poll() is None:
            process.terminate()
            deadline = time.monotonic() + self._limits.kill_timeout
            while process.poll() is None and time.monotonic() < deadline:
                self._handle(run, 0.1)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            left = processes_of_session(process.pid)
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    logger.debug("process %d ended by itself", pid)
            if process.poll() is not None and not left:
                if os.getpid() == 1:
                    reap_orphans()
                for file in self._shared_memory.iterdir() if self._shared_memory else ():
                    file.unlink(missing_ok=True)
                return
            time.sleep(0.02)
        raise GroupFailed(f"processes {processes_of_session(process.pid)} of the group survive SIGKILL")

    def _wait(self, seconds: float) -> None:
        """Sleep, but not through a stop."""
        deadline = time.monotonic() + seconds
        while not self._stopping and (left := deadline - time.monotonic()) > 0:
            events = {key.data for key, _ in self._selector.select(left)}
            if "wake" in events:
                os.read(self._wake_read, 4096)
            if "parent" in events:
                self._stopping = f"the parent process {self._parent_pid} has ended"
            if "beat" in events:
                self._socket.recv(65536)                    # of a life that is over

    def _report(self, run: _Run, failures: int) -> str:
        what = run.error if run.fatal else f"the group ended {failures} times in a row before it had served, last: " \
                                           f"{run.error}"
        tail = "\n".join(f"  {line}" for line in list(self._tail)[-20:])
        return f"{what}\nlast lines of the ranks:\n{tail}" if tail and not run.fatal else what

    def _write_ready_file(self, content: dict) -> None:
        if self._ready_file is None:
            return
        temporary = self._ready_file.with_name(self._ready_file.name + ".new")
        try:
            temporary.write_text(json.dumps(content) + "\n")
            temporary.replace(self._ready_file)             # a reader sees all of it or nothing
        except OSError as error:
            logger.error("the ready file cannot be written: %s", error)

    def _remove_ready_file(self) -> None:
        if self._ready_file is not None:
            self._ready_file.unlink(missing_ok=True)

    def _close(self) -> None:
        self._selector.close()
        self._socket.close()
        for fd in (self._wake_read, self._wake_write, self._parent_fd):
            if fd >= 0:
                os.close(fd)


def _open_pid(pid: int) -> int:
    """A descriptor that becomes readable when the process ends; -1 on kernels without pidfds (callers then poll).
    For a process that is gone already, one that is readable at once."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        read_end, write_end = os.pipe()
        os.close(write_end)
        return read_end
    except (OSError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOSYS, errno.EPERM, errno.EINVAL):
            raise
        return -1


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
