"""Memory that ranks on this host have reserved but not touched yet. Groups that start at the same time must not count
the same free bytes.

Each load writes a file with its size to this user's folder in /dev/shm and locks it as long as the model is held. Pages
are touched while weights load and requests fill the cache; the growth of the process since then shows how many.
Processes of other users, or in containers with their own /dev/shm, do not see each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_PAGE = os.sysconf("SC_PAGE_SIZE")
_LOCK = "lock"
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
    """A context in which no other rank measures and reserves free memory."""
    try:
        directory = _open_folder()
    except OSError as error:
        logger.debug("memory is planned without regard to other groups: %s", error)
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
                    logger.warning("memory is planned without regard to other groups: %s: %s", folder() / _LOCK, error)
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
        self._fd, self._file = -1, f"{os.getpid()}-{id(self):x}"
        self._owner = os.getpid()
        entry = {"group": _group(), "pid": os.getpid(), "name": name, "size": size, "nodes": nodes,
                 "resident": resident(os.getpid())}
        try:
            directory = _open_folder()
        except OSError as error:
            logger.debug("no reservation: %s", error)
            return
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fd = os.open(f".{self._file}", flags, 0o600, dir_fd=directory)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            os.write(self._fd, json.dumps(entry).encode())
            os.rename(f".{self._file}", self._file, src_dir_fd=directory, dst_dir_fd=directory)     # complete
        except OSError as error:
            logger.debug("no reservation: %s", error)
            self.release()
            return
        finally:
            os.close(directory)
        with self._guard:
            self._held[self._file] = name

    def release(self) -> None:
        """Removes the reservation. Idempotent."""
        if self._fd < 0 or os.getpid() != self._owner:  # a forked child has no reservation
            return
        with self._guard:
            self._held.pop(self._file, None)
        for file in (folder() / self._file, folder() / f".{self._file}"):
            with contextlib.suppress(OSError):
                file.unlink()
        os.close(self._fd)
        self._fd = -1

    __del__ = release


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
            if file != _LOCK and not file.startswith("."):
                entry = _entry(file, directory, set(nodes), mine)
                if entry is not None:
                    processes.setdefault(entry["pid"], []).append(entry)
    finally:
        os.close(directory)
    # Memory that a process touched since its first reservation belongs to one of its reservations.
    return sum(max(0, sum(e["size"] for e in entries) - max(0, resident(pid) - min(e["resident"] for e in entries)))
               for pid, entries in processes.items())


def _entry(file: str, directory: int, nodes: set[int], mine: set[str]) -> dict | None:
    """The reservation in a file; None if it does not count on these nodes."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return None  # it was released in the meantime
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.unlink(file, dir_fd=directory)  # its process was killed
            return None
        entry = json.loads(os.read(fd, 65536))
        if entry["group"] == _group() and entry["name"] not in mine:
            return None
        if nodes and entry["nodes"] and not nodes & set(entry["nodes"]):
            return None
        numbers = (entry["pid"], entry["size"], entry["resident"])
        return entry if all(isinstance(number, int) for number in numbers) else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.debug("reservation %s is ignored: %s", file, error)
        return None
    finally:
        os.close(fd)
