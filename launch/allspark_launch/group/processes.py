"""Processes of a group: whether they run, and what is left of them."""
from __future__ import annotations

import contextlib
import errno
import os
import time

import psutil

from allspark_server.runtime import memory

#: errors of pidfd_open without which a process can still be polled: no such call, or no descriptor is left
_NO_PIDFD = (errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_FREED_BYTES, _LONGEST_FREEING = 64 << 20, 600.0


class Freeing:
    """Tells killed processes that still give their memory back to the kernel, which takes a minute for a terabyte, from
    processes that SIGKILL does not end, for example in a driver. The memory of a process that is being freed is not
    shown as its own, so the machine's counts. `patience`: seconds without progress; in all it may take ten minutes.
    """

    def __init__(self, patience: float):
        self._patience, self._began = patience, time.monotonic()
        self._since, self._free = self._began, psutil.virtual_memory().available

    def is_stuck(self) -> bool:
        """Whether there was no progress for too long."""
        now, free = time.monotonic(), psutil.virtual_memory().available
        if free >= self._free + _FREED_BYTES:
            self._since, self._free = now, free
        return now - self._since > self._patience or now - self._began > _LONGEST_FREEING


class OutOfMemory:
    """Tells whether the kernel has killed processes of this process's cgroup because memory ran out."""

    def __init__(self) -> None:
        self._before = memory.out_of_memory_kills()

    def explain(self) -> str:
        """What the kernel has killed since the last call, in parentheses; "" if nothing."""
        before, self._before = self._before, memory.out_of_memory_kills()
        killed = self._before - before
        if killed <= 0:
            return ""
        limit = memory.cgroup_limit()
        what = f"the cgroup's memory limit of {limit / 2**30:.2f} GiB was reached" if limit else "memory ran out"
        return (f" ({what} and the kernel killed {killed} process{'es' * (killed > 1)}; allow more memory, or lower "
                "max_length, max_batch or the number of HTTP workers)")


def processes_of_session(session: int) -> list[int]:
    """The ids of the processes of a session, without zombies."""
    running = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(pid) == session and psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE,
                                                                                  psutil.STATUS_DEAD):
                running.append(pid)
    return running


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP has stopped a process. One that a debugger holds does not count."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def reap_orphans(session: int = 0) -> None:
    """Takes the exit status of children that have ended: of those of a session, or of all. A supervisor that is process
    1 of a container inherits the ranks of an mpirun that was killed. A child that leads its session is left out, as the
    code that started it waits for it.
    """
    with contextlib.suppress(ChildProcessError):            # no child at all
        if not session:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            return
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid == session or os.getsid(ended.si_pid) != session:
                return
            os.waitpid(ended.si_pid, 0)


def open_pid(pid: int) -> int:
    """A descriptor that becomes readable when the process ends, at once if it has ended; -1 on kernels without pidfds,
    where callers poll.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        read_end, write_end = os.pipe()
        os.close(write_end)
        return read_end
    except (OSError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_PIDFD:
            raise
        return -1


def is_alive(pid: int) -> bool:
    """Whether the process exists. A zombie does."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def neutral_for_oom() -> None:
    """Called in a new process: drops an inherited protection from the kernel's out-of-memory killer."""
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:
            if int(file.read()) < 0:
                file.seek(0)
                file.write("0")
