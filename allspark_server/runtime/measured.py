"""Files of what was measured on this machine, in the user's cache: read at every start, written where there is none."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOCK_SECONDS = 10.0    # for another process to measure the same thing

logger = logging.getLogger(__name__)


def folder(variable: str, name: str) -> Path:
    """The folder that an environment variable names; else `allspark/NAME` in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get(variable) or Path(cache) / "allspark" / name)


def write(path: Path, content: dict[str, Any], otherwise: str) -> None:
    """Replaces the file, so that readers see the old or the new one. If that fails, a warning says so; `otherwise`:
    what follows from that.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".partial", delete=False) as file:
            try:
                json.dump(content, file, indent=1)
                file.close()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        logger.warning("%s cannot be written (%s): %s", path, error.strerror, otherwise)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Processes that share a file measure one after the other, at best once. Without a lock if it cannot be had."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = stack.enter_context(open(path.with_suffix(".lock"), "w", encoding="utf-8"))
            end = time.monotonic() + LOCK_SECONDS
            while time.monotonic() < end:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.02)
        yield
