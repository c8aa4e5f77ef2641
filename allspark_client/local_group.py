"""The server group that `ClientEngine()` starts for itself: `allspark serve` in a process of its own."""
from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from .environment import check_environment
from .errors import AllSparkError, AsStatus

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
_STOP_SECONDS = 15.0
_LOG_TAIL = 2000
_PREFIX = "allspark-run-"      # a directory with this prefix is removed once no process holds its lock


class SelfStartedGroup:
    """A supervisor with its ranks. They serve on a Unix socket in a private directory until stop() is called."""

    def __init__(self) -> None:
        if importlib.util.find_spec("allspark_launch") is None:
            raise AllSparkError(
                AsStatus.ALLSPARK_INVALID_CALL_ERROR,
                "no address was given, and the launcher is not installed here to start a server group: give an "
                "address, set ALLSPARK_ADDRESS, or install the server (pip install allspark-numa)")
        import fcntl  # not on Windows, where the launcher is not either

        check_environment()
        self._owner = os.getpid()
        self._directory = _short_directory()
        # This process holds the lock until it ends. A supervisor that outlives it, or the next group, removes
        # directories that no process holds.
        self._lock = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._ready_file = os.path.join(self._directory, "ready.json")
        self._log_file = os.path.join(self._directory, "server.log")
        command = [sys.executable, "-m", "allspark_launch", "serve",
                   "--address", f"unix:{os.path.join(self._directory, 'allspark.sock')}",
                   "--model-root", "/", "--ready-file", self._ready_file, "--parent-pid", str(os.getpid())]
        logger.info("starting a server group: %s (log: %s)", " ".join(command), self._log_file)
        with open(self._log_file, "wb") as log:
            # A session of its own: Ctrl-C in the terminal reaches only this process, which then stops the group.
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                                             start_new_session=True)

    def wait(self, timeout: float) -> list[str]:
        """Wait until the group is healthy, at most `timeout` seconds; returns its addresses.

        Raises AllSparkError with the end of its log if it does not start.
        """
        deadline = time.monotonic() + timeout
        while True:
            ready = self._read_ready()
            if ready is not None:
                if "error" in ready:
                    self._fail(str(ready["error"]))
                logger.info("the server group (pid %d) serves on %s", self._process.pid, ", ".join(ready["addresses"]))
                return list(ready["addresses"])
            if self._process.poll() is not None:
                self._fail(f"it exited with status {self._process.returncode}")
            if time.monotonic() > deadline:
                self._fail(f"it was not ready within {timeout:g} s")
            time.sleep(_POLL_SECONDS)

    def failure(self) -> str | None:
        """Why the group cannot come back: its supervisor has ended. None while it may."""
        if self._process.poll() is None:
            return None
        return f"its supervisor exited with status {self._process.returncode}{self._tail()}"

    def stop(self) -> None:
        """End the group; idempotent. In a forked child it does nothing: the group belongs to the parent."""
        if os.getpid() != self._owner:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                logger.warning("the server group (pid %d) did not stop within %g s; killing it", self._process.pid,
                               _STOP_SECONDS)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)    # the remaining processes, if any
        except (ProcessLookupError, PermissionError):
            logger.debug("nothing is left of the server group %d", self._process.pid)
        self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _read_ready(self) -> dict[str, Any] | None:
        try:
            with open(self._ready_file, encoding="utf-8") as file:
                ready: dict[str, Any] = json.load(file)
                return ready
        except FileNotFoundError:
            return None

    def _tail(self) -> str:
        try:
            with open(self._log_file, "rb") as file:
                file.seek(max(0, os.path.getsize(self._log_file) - _LOG_TAIL))
                text = file.read().decode(errors="replace").strip()
        except OSError:
            return ""
        return f"; the end of its log:\n{text}" if text else ""

    def _fail(self, why: str) -> None:
        tail = self._tail()
        self.stop()
        raise AllSparkError(AsStatus.ALLSPARK_RUNTIME_ERROR, f"starting a server group failed: {why}{tail}")


def _short_directory() -> str:
    """A private directory with a path so short that its socket's path fits the 107 bytes that Unix allows."""
    directory = tempfile.mkdtemp(prefix=_PREFIX)
    if len(os.fsencode(directory)) > 80:
        os.rmdir(directory)
        directory = tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp")
    return directory
