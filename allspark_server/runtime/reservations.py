"""Memory that ranks on this host have reserved but not touched yet, and CPUs that groups compute on. Groups that start
at the same time must not count the same free bytes, nor pin threads to the same CPUs.

A group's supervisor (an agent on other hosts) writes a file with its CPUs to this user's folder in /dev/shm and locks
it as long as it runs. Each load writes one with its size and locks it as long as the model is held. Pages are touched
while weights load and requests fill the cache; the growth of the process since then shows how many.
Processes of other users, or in containers with their own /dev/shm, do not see each other.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_PAGE = os.sysconf("SC_PAGE_SIZE")
_LOCK = "lock"
_CPUS = "cpus-"     # begins the names of files with CPUs
LOCK_SECONDS = 2.0  # a process holds the lock for less than a millisecond, unless it is suspended


def folder() -> Path:
    """The folder of this user's reservations."""
    return Path(f"/dev/shm/allspark-memory-{os.geteuid()}")


def _open_folder() -> int:
    """A descriptor of `folder()`, which is created if needed. Raises OSError if other users can access it."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder(), 0o700)
    fd = os.open(folder(), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(fd)
        raise PermissionError(f"{folder()} is not a private folder of this user")
    return fd


@contextlib.contextmanager
def planning() -> Iterator[None]:
    """A context in which no other process measures and reserves memory or CPUs."""
    try:
        directory = _open_folder()
    except OSError as error:
        logger.debug("nothing is known of other groups: %s", error)
        yield
        return
    lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
    os.close(directory)
    deadline = time.monotonic() + LOCK_SECONDS
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    logger.warning("nothing is known of other groups: %s: %s", folder() / _LOCK, error)
                    break
                time.sleep(0.005)
        yield
    finally:
        os.close(lock)


def _group() -> str:
    """Identifies the group: its supervisor's socket, else mpirun's name for it, else this process's id."""
    return os.environ.get("ALLSPARK_SUPERVISOR") or os.environ.get("PMIX_NAMESPACE") or str(os.getpid())


class Reservation:
    """`size` bytes that this process will use for model `name` on NUMA nodes `nodes` ([]: any nodes)."""

    _held: dict[str, str] = {}  # file name -> model, of this process
    _guard = threading.Lock()

    def __init__(self, name: str, size: int, nodes: list[int]):
        self._file = f"{os.getpid()}-{id(self):x}"
        self._owner = os.getpid()
        self._fd = _write(self._file, {"group": _group(), "pid": os.getpid(), "name": name, "size": size,
                                       "nodes": nodes, "resident": resident(os.getpid())})
        if self._fd >= 0:
            with self._guard:
                self._held[self._file] = name

    def release(self) -> None:
        """Removes the reservation. Idempotent."""
        if self._fd < 0 or os.getpid() != self._owner:  # a forked child has no reservation
            return
        with self._guard:
            self._held.pop(self._file, None)
        _remove(self._file, self._fd)
        self._fd = -1

    __del__ = release


class CpuReservation:
    """The CPUs that a group computes on, as far as this process knows of them."""

    def __init__(self) -> None:
        self._fd, self._count, self._file = -1, 0, ""
        self._cpus: frozenset[int] = frozenset()

    def others(self) -> dict[int, int]:
        """The CPUs that other groups have reserved, each with the process that did, without those of this group."""
        try:
            directory = _open_folder()
        except OSError:
            return {}
        found: dict[int, int] = {}
        try:
            for file in os.listdir(directory):
                entry = _locked_entry(file, directory) if file.startswith(_CPUS) and file != self._file else None
                if isinstance(entry, dict) and isinstance(cpus := entry.get("cpus"), list):
                    pid = entry["pid"] if isinstance(entry.get("pid"), int) else 0
                    found |= {cpu: pid for cpu in cpus if isinstance(cpu, int)}
        finally:
            os.close(directory)
        return {cpu: pid for cpu, pid in found.items() if cpu not in self._cpus}

    def take(self, cpus: Iterable[int]) -> None:
        """Reserves these CPUs instead of those before."""
        self.close()
        self._count += 1
        self._cpus = frozenset(cpus)
        self._file = f"{_CPUS}{os.getpid()}-{id(self):x}-{self._count}"
        self._fd = _write(self._file, {"pid": os.getpid(), "cpus": sorted(self._cpus)})

    def close(self) -> None:
        """Reserves nothing any more. Idempotent."""
        if self._fd >= 0:
            _remove(self._file, self._fd)
        self._fd, self._cpus = -1, frozenset()


def _write(file: str, entry: dict) -> int:
    """Writes a reservation, whole or not at all; returns the descriptor that locks it, or -1."""
    try:
        directory = _open_folder()
    except OSError as error:
        logger.debug("no reservation: %s", error)
        return -1
    fd = -1
    try:
        fd = os.open(f".{file}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)
        fcntl.flock(fd, fcntl.LOCK_EX)
        data = json.dumps(entry).encode()
        if os.write(fd, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.rename(f".{file}", file, src_dir_fd=directory, dst_dir_fd=directory)
        return fd
    except OSError as error:
        logger.warning("other groups do not see what this one reserves: %s: %s", folder() / file, error.strerror)
        if fd >= 0:
            _remove(file, fd)
        return -1
    finally:
        os.close(directory)


def _remove(file: str, fd: int) -> None:
    for path in (folder() / file, folder() / f".{file}"):
        with contextlib.suppress(OSError):
            path.unlink()
    os.close(fd)


def resident(pid: int) -> int:
    """Bytes of private memory that a process has touched, without mapped files; 0 if unknown."""
    try:
        pages, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
        return (int(pages) - int(shared)) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0


def pending(nodes: list[int]) -> int:
    """Bytes on `nodes` ([]: any nodes) that are reserved and not touched yet.

    For this process's own group, only models count for which this process also has a reservation. So other ranks'
    parts of a model that is being loaded do not count.
    """
    try:
        directory = _open_folder()
    except OSError:
        return 0
    with Reservation._guard:
        mine = set(Reservation._held.values())
    processes: dict[int, list[dict]] = {}
    try:
        for file in os.listdir(directory):
            if file != _LOCK and not file.startswith((".", _CPUS)):
                entry = _entry(file, directory, set(nodes), mine)
                if entry is not None:
                    processes.setdefault(entry["pid"], []).append(entry)
    finally:
        os.close(directory)
    # Memory that a process touched since its first reservation belongs to one of its reservations.
    return sum(max(0, sum(e["size"] for e in entries) - max(0, resident(pid) - min(e["resident"] for e in entries)))
               for pid, entries in processes.items())


def _entry(file: str, directory: int, nodes: set[int], mine: set[str]) -> dict | None:
    """The reservation of memory in a file; None if it does not count on these nodes."""
    entry = _locked_entry(file, directory)
    try:
        if entry is None or (entry["group"] == _group() and entry["name"] not in mine):
            return None
        if nodes and entry["nodes"] and not nodes & set(entry["nodes"]):
            return None
        numbers = (entry["pid"], entry["size"], entry["resident"])
        return entry if all(isinstance(number, int) for number in numbers) else None
    except (KeyError, TypeError) as error:
        logger.debug("reservation %s is ignored: %s", file, error)
        return None


def _locked_entry(file: str, directory: int) -> Any:
    """The content of a file whose process runs; None without one."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return None  # it was released in the meantime
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.unlink(file, dir_fd=directory)  # its process was killed
            return None
        return json.loads(os.read(fd, 65536))
    except (OSError, ValueError) as error:
        logger.debug("reservation %s is ignored: %s", file, error)
        return None
    finally:
        os.close(fd)
