"""Private folders for sockets, state and shared memory, in places that everybody may write to."""
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
    """Whether nobody but this user and root can rename or replace what this user makes in `parent`."""
    try:
        status = os.stat(parent)
    except OSError:
        return False
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return (stat.S_ISDIR(status.st_mode) and status.st_uid in (0, os.geteuid())
            and (not others_write or bool(status.st_mode & stat.S_ISVTX)) and os.access(parent, os.W_OK | os.X_OK))


def short_parent() -> str:
    """Where private folders for sockets may be made: a Unix socket's path is limited to 107 bytes."""
    for parent in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir()):
        if parent and len(parent) < 60 and trusted(parent):
            return parent
    return "/tmp"


@contextlib.contextmanager
def private_folder(parent: str) -> Iterator[Path]:
    """A new folder below `parent`, removed at the end; removes those of processes that were killed, too.

    A lock on the folder itself tells which are alive: unlike a process id, that holds across containers. A client that
    starts a group for itself locks its folder likewise (allspark_client/local_group.py).
    """
    remove_stale(parent)
    folder, lock = _locked_folder(parent)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked_folder(parent: str) -> tuple[str, int]:
    """A new folder and the descriptor that holds its lock."""
    while True:
        folder = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
        try:
            lock = os.open(folder, _FLAGS)
        except FileNotFoundError:
            continue                                # another process took it for a stale one, before it was locked
        with contextlib.suppress(OSError):          # a file system without locks: then nobody can take it for stale
            fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.lstat(folder)):
                return folder, lock
        os.close(lock)


def remove_stale(parent: str) -> None:
    """Removes the folders of this user's processes that were killed. Links are not followed; what belongs to others
    is left alone, and so is a parent in which others could exchange a folder while it is being removed.
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
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)        # BlockingIOError: its owner lives
                shutil.rmtree(folder)
        except OSError as error:
            logger.debug("%s stays: %s", folder, error)
        finally:
            os.close(lock)
