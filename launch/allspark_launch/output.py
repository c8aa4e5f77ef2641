"""Output that never waits for its reader: a terminal that is paused, or a log collector that hangs, must not stop the
process that watches over a group.
"""
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

logger = logging.getLogger(__name__)

MOST_PENDING = 1 << 20      # bytes
CLOSE_SECONDS = 1.0         # for what is pending when the process ends


class Outlet(io.RawIOBase):
    """A raw file over descriptor `fd` whose writes return at once; a thread passes them on. What a slow reader leaves
    no room for is dropped, and the reader told how much.
    """

    def __init__(self, fd: int):
        self._fd = fd
        self._pending: collections.deque[bytes] = collections.deque()
        self._size = self._dropped = 0
        self._changed = threading.Condition()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name=f"output-{fd}", daemon=True)
        self._thread.start()

    def write(self, data) -> int:
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
        return True

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def fileno(self) -> int:
        return self._fd

    def finish(self) -> bool:
        """Ends the thread once everything is passed on. False if the reader does not take it within a second: then
        writes are still accepted, and lost.
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
            except BlockingIOError:         # the reader's end is one that we share, and somebody made it so
                time.sleep(0.05)
            except OSError:                 # the reader has gone away
                return


@contextlib.contextmanager
def unblocked() -> Iterator[Outlet]:
    """For the length of a with block, sys.stdout, sys.stderr and the root logger's handlers write through outlets;
    yields that of standard error.
    """
    before = [sys.stdout, sys.stderr]
    for stream in before:
        stream.flush()
    outlets = [Outlet(1), Outlet(2)]
    sys.stdout, sys.stderr = during = [io.TextIOWrapper(o, "utf-8", "backslashreplace", write_through=True)
                                       for o in outlets]
    _exchange(before, during)
    try:
        yield outlets[1]
    finally:
        # One whose reader is stuck stays in place: the messages of the process's end must not wait either.
        after = [old if outlet.finish() else new for old, new, outlet in zip(before, during, outlets)]
        sys.stdout, sys.stderr = after
        _exchange(during, after)


def _exchange(old, new) -> None:
    """Let the root logger's handlers of the streams `old` write to `new`."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream in old:
            handler.setStream(new[old.index(handler.stream)])
