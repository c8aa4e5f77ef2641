"""Processes with limits of time and memory, for work on what strangers have made: chat templates and images.

If a request exceeds a limit, its process ends and a later request starts another. The program of such a process is a
file with a function `answer(request: bytes, continues: bool) -> list[bytes]`, whose parts follow each other in the
answer. The process runs this file, which sets the limits and calls the function. Neither file imports the package, so
that a process starts fast and is small.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import runpy
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence

WAIT_SECONDS = 20.0  # wall-clock limit, for a process that gets no CPU time
NICE = 5  # of the processes: steps go before
PIPE_BYTES = 1 << 20  # of requests and answers on their way
PROCESSES = 4  # the most of a pool that run at a time: one request that takes long does not keep others waiting

_RUN = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
_HEADER = struct.Struct("<Q?")  # length of what follows; whether it continues the request before


class LimitedProcess:
    """One process of a program, for one thread at a time. `seconds`: CPU time of a request, so that a busy machine does
    not shorten it. `memory`: bytes that it may take beyond what it has when it starts. `work`: what it does, such as
    "chats are being rendered".
    """

    def __init__(self, program: str, seconds: float, memory: int, work: str) -> None:
        # The process ends when its standard input is closed.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _RUN, __file__, program, str(seconds), str(memory)], cwd="/",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._input, False)
        for pipe in (self._input, self._output):  # fewer turns of both sides, which are slow on a busy machine
            with contextlib.suppress(OSError):  # the user has many large pipes
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._seconds, self._memory, self._work, self._asked = seconds, memory, work, False
        self.known: set[str] = set()  # names of what the program keeps, as those who ask count

    @property
    def alive(self) -> bool:
        """Whether the process runs and waits for a request."""
        return not self._asked and self._process.poll() is None

    def ask(self, request: Sequence[bytes], continues: bool = False) -> memoryview:
        """The program's answer. `continues`: the request shares its time with the one before. ValueError if the process
        exceeded a limit; its text continues the name of what was worked on. AllSparkError if it got too little of a
        processor to tell.
        """
        self._asked = True
        answer = self._exchange([_HEADER.pack(sum(map(len, request)), continues), *request])
        if answer is None:
            raise ValueError(f"takes more than {self._seconds:g} s of a processor or {self._memory >> 20} MiB of "
                             "memory")
        self._asked = False
        return answer

    def _exchange(self, request: list[bytes]) -> memoryview | None:
        deadline, answer, length = time.monotonic() + WAIT_SECONDS, bytearray(), sys.maxsize
        left = [memoryview(part) for part in reversed(request)]
        poll = select.poll()
        poll.register(self._output, select.POLLIN)
        poll.register(self._input, select.POLLOUT)
        while len(answer) < length:
            ready = poll.poll(max(0.0, 1e3 * (deadline - time.monotonic())))
            if not ready:  # the process has not used its time, which would have ended it
                from allspark_client.errors import AllSparkError, AsStatus  # not in the processes

                raise AllSparkError(AsStatus.ALLSPARK_RUNTIME_ERROR,
                                    f"the server is too busy: {self._work}, and this one got less than "
                                    f"{self._seconds:g} s of a processor within {WAIT_SECONDS:g} s; send the request "
                                    "again later", retryable=True)
            try:
                for file, _ in ready:
                    if file == self._input:
                        left[-1] = left[-1][os.write(self._input, left[-1]):]
                        while left and not left[-1]:
                            left.pop()
                        if not left:
                            poll.unregister(self._input)
                    elif part := os.read(self._output, 1 << 20):
                        answer += part
                    else:
                        return None
            except OSError:  # the process has ended
                return None
            if length == sys.maxsize and len(answer) >= _HEADER.size:
                length = _HEADER.size + _HEADER.unpack_from(answer)[0]
                if length > self._memory:
                    return None
        return memoryview(answer)[_HEADER.size:]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


class ProcessPool:
    """A few processes of one program. Safe to use from several threads, and after a fork."""

    def __init__(self, program: str, seconds: float, memory: int, work: str) -> None:
        """`program`: its file. `work`: what requests wait for, such as "chats are being rendered"."""
        self._program, self._seconds, self._memory, self._work = program, seconds, memory, work
        self._forget()
        _POOLS.add(self)

    def _forget(self) -> None:
        """Starts anew. After a fork the pipes belong to the parent."""
        self._lock = threading.Lock()
        self._idle: list[LimitedProcess] = []
        self._closed = False
        self._room = threading.BoundedSemaphore(PROCESSES)

    @contextlib.contextmanager
    def process(self) -> Iterator[LimitedProcess]:
        """A process for one request. AllSparkError if none becomes free for long."""
        room = self._room
        if not room.acquire(timeout=WAIT_SECONDS):
            from allspark_client.errors import AllSparkError, AsStatus  # not in the processes

            raise AllSparkError(AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR,
                                f"{PROCESSES} other {self._work} since {WAIT_SECONDS:g} s; send it again later",
                                retryable=True)
        try:
            process = self._take()
            try:
                yield process
            finally:
                with self._lock:
                    keep = process.alive and not self._closed
                    if keep:
                        self._idle.append(process)
                if not keep:
                    process.close()
        finally:
            room.release()

    def start(self) -> None:
        """Starts a process if none runs, so that the first request does not wait for it."""
        with self._lock:
            if not self._idle:
                self._idle.append(self._new())

    def close(self) -> None:
        """Ends the idle processes at once, the others after their requests."""
        with self._lock:
            self._closed = True
            while self._idle:
                self._idle.pop().close()

    def _new(self) -> LimitedProcess:
        return LimitedProcess(self._program, self._seconds, self._memory, self._work)

    def _take(self) -> LimitedProcess:
        with self._lock:
            while self._idle:  # the last one, which has most likely what the request needs
                if (process := self._idle.pop()).alive:
                    return process
                process.close()
        return self._new()


_POOLS: weakref.WeakSet[ProcessPool] = weakref.WeakSet()


def _after_fork() -> None:
    for pool in list(_POOLS):
        pool._forget()


os.register_at_fork(after_in_child=_after_fork)


# ---- what the process runs -------------------------------------------------------------------------------------


def main(program: str, seconds: float, memory: int) -> None:
    """Answers requests, each a header and its bytes, in the same form until the input ends."""
    answer = runpy.run_path(program)["answer"]
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()  # do not count what libraries reserve
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    left = seconds
    while header := sys.stdin.buffer.read(_HEADER.size):
        length, continues = _HEADER.unpack(header)
        request = sys.stdin.buffer.read(length)
        signal.setitimer(signal.ITIMER_PROF, left if continues else seconds)  # SIGPROF ends the process wherever it is
        parts = answer(request, continues)
        left = max(signal.setitimer(signal.ITIMER_PROF, 0)[0], 1e-3)
        del request
        sys.stdout.buffer.writelines([_HEADER.pack(sum(map(len, parts)), False), *parts])
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))  # sys.argv[1] is this file
