"""Output that never waits for its reader: a paused terminal or a hanging log collector must not stop a supervisor."""
from __future__ import annotations

import collections
import contextlib
import io
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TextIO, cast

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

MOST_PENDING = 1 << 20      # bytes
CLOSE_SECONDS = 1.0         # for pending output when the process ends


class Outlet(io.RawIOBase):
    """A raw file over descriptor `fd`. Writes return at once; a thread passes the data on. Data that a slow reader
    leaves no room for is dropped; the reader gets a line with the number of bytes.
    """

    def __init__(self, fd: int):
        self._fd = fd
        self._pending: collections.deque[bytes] = collections.deque()
        self._size = self._dropped = 0
        self._changed = threading.Condition()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name=f"output-{fd}", daemon=True)
        self._thread.start()

    def write(self, data: Buffer) -> int:
        """Accepts the data. Never blocks."""
        data = bytes(data)
        with self._changed:
            if self._size + len(data) > MOST_PENDING:
                self._dropped += len(data)
            else:
                self._pending.append(data)
                self._size += len(data)
            self._changed.notify()
        return len(data)

    def writable(self) -> bool:
        """True."""
        return True

    def isatty(self) -> bool:
        """Whether the descriptor is a terminal."""
        return os.isatty(self._fd)

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    def finish(self) -> bool:
        """Ends the thread once all data is passed on. False if the reader does not read it within a second; then
        further writes are accepted and lost.
        """
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join(CLOSE_SECONDS)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._dropped or self._ending)
                data = b"".join(self._pending)
                if self._dropped:
                    data += b"[%d bytes of output were dropped: they were not read in time]\n" % self._dropped
                self._pending.clear()
                self._size = self._dropped = 0
            if not data:
                return
            self._pass_on(memoryview(data))

    def _pass_on(self, data: memoryview) -> None:
        while data:
            try:
                data = data[os.write(self._fd, data):]
            except BlockingIOError:         # another process made the shared descriptor non-blocking
                time.sleep(0.05)
            except OSError:                 # the reader has gone away
                return


def write_whole(path: Path, text: str, mode: int | None = None) -> None:
    """Writes a file that readers see whole or not at all. `mode`: its permissions. OSError names the file."""
    new = path.with_name(path.name + ".new")
    try:
        with open(new, "w", encoding="utf-8", opener=lambda file, flags: os.open(file, flags, mode or 0o666)) as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(text)
        new.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()        # it may be cut
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def unblocked() -> Iterator[Outlet]:
    """For the length of a with block, sys.stdout, sys.stderr and the root logger's handlers write through outlets.
    Yields the one of standard error.
    """
    before = [sys.stdout, sys.stderr]
    for stream in before:
        stream.flush()
    outlets = [Outlet(1), Outlet(2)]
    during: list[TextIO] = [io.TextIOWrapper(cast(BinaryIO, outlet), "utf-8", "backslashreplace", write_through=True)
                            for outlet in outlets]
    sys.stdout, sys.stderr = during
    _exchange(before, during)
    try:
        yield outlets[1]
    finally:
        # An outlet whose reader hangs stays in place, because the last messages must not wait either.
        after = [old if outlet.finish() else new for old, new, outlet in zip(before, during, outlets)]
        sys.stdout, sys.stderr = after
        _exchange(during, after)


def _exchange(old: list[TextIO], new: list[TextIO]) -> None:
    """Makes the root logger's handlers of the streams `old` write to `new`."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream in old:
            handler.setStream(new[old.index(handler.stream)])
