"""The number of connections of each worker of an HTTP server, in memory that they and the launcher share."""

from __future__ import annotations

import mmap
import os

#: the count of a worker that accepts no connections
_ABSENT = 2**31 - 1


class ConnectionCounts:
    """A number for each worker. Only that worker changes it, but for the end of its process."""

    def __init__(self, file: int):
        """`file`: a descriptor of `make_file`, which may be closed afterwards."""
        self._memory = mmap.mmap(file, 0)
        self._counts = memoryview(self._memory).cast("i")

    def join(self, worker: int) -> None:
        """A worker begins to accept connections."""
        self._counts[worker] = 0

    def add(self, worker: int, number: int) -> None:
        """Counts new connections, or those that have ended if `number` is negative."""
        if self._counts[worker] != _ABSENT:
            self._counts[worker] += number

    def leave(self, worker: int) -> None:
        """A worker accepts no more connections, or has ended."""
        self._counts[worker] = _ABSENT

    def ahead_of(self, worker: int) -> int:
        """How many workers have fewer connections."""
        own = self._counts[worker]
        return sum(count < own for count in self._counts)


def make_file(workers: int) -> int:
    """A file in memory for so many workers, none of which accepts yet: its descriptor. Raises OSError."""
    file = os.memfd_create("allspark-http", os.MFD_CLOEXEC)
    os.write(file, _ABSENT.to_bytes(4, "little") * workers)
    return file
