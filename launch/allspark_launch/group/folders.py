"""Private folders for sockets, state and shared memory, in directories that everybody may write to."""
from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

PREFIX = "allspark-run-"
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def trusted(parent: str) -> bool:
    """Whether only this user and root can rename or replace files that this user creates in `parent`."""
    try:
        status = os.stat(parent)
    except OSError:
        return False
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return (stat.S_ISDIR(status.st_mode) and status.st_uid in (0, os.geteuid())
            and (not others_write or bool(status.st_mode & stat.S_ISVTX)) and os.access(parent, os.W_OK | os.X_OK))


def short_parent() -> str:
    """A directory for private folders with sockets: the path of a Unix socket is limited to 107 bytes."""
    for parent in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir()):
        if parent and len(parent) < 60 and trusted(parent):
            return parent
    return "/tmp"


@contextlib.contextmanager
def private_folder(parent: str) -> Iterator[Path]:
    """A new folder below `parent`, removed at the end. Also removes folders of processes that were killed.

    A folder in use is locked. Unlike a process id, a lock works across containers. A client that starts a group for
    itself locks its folder in the same way (allspark_client/local_group.py).
    """
    remove_stale(parent)
    folder, lock = _locked_folder(parent)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked_folder(parent: str) -> tuple[str, int]:
    """A new folder, and the descriptor that holds its lock."""
    while True:
        folder = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
        if (lock := _lock(folder)) is not None:
            return folder, lock


def make_again(folder: Path) -> int:
    """Makes a private folder again that was removed while it was in use; returns the descriptor that holds its lock.
    Raises OSError if that is not possible, or if somebody else has made it.
    """
    while True:
        folder.mkdir(mode=0o700)
        if (lock := _lock(folder)) is not None:
            return lock


def _lock(folder: str | Path) -> int | None:
    """The descriptor that holds the lock of a new folder; None if another process has removed it as stale before."""
    try:
        lock = os.open(folder, _FLAGS)
    except FileNotFoundError:
        return None
    with contextlib.suppress(OSError):              # a file system without locks: no process removes stale folders
        fcntl.flock(lock, fcntl.LOCK_EX)
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(lock), os.lstat(folder)):
            return lock
    os.close(lock)
    return None


def remove_stale(parent: str) -> None:
    """Removes folders of this user's processes that were killed. Does not follow links, and leaves folders of other
    users alone, as well as a parent in which others could replace a folder during its removal.
    """
    if not trusted(parent):
        return
    for folder in Path(parent).glob(PREFIX + "*"):
        try:
            lock = os.open(folder, _FLAGS)
        except OSError:
            continue                                # a link, a file, not ours, or gone
        try:
            if os.fstat(lock).st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)        # BlockingIOError: in use
                shutil.rmtree(folder)
        except OSError as error:
            logger.debug("%s is kept: %s", folder, error)
        finally:
            os.close(lock)
