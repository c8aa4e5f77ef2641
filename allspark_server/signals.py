"""Signals that a process acts on at once, whichever of its threads the kernel gives them to."""
from __future__ import annotations

import os
import select
import signal


class Signals:
    """Receives signals; made in the main thread, before the code that waits for them.

    Python runs a handler only when the main thread executes Python code. If another thread gets the signal while the
    main thread sleeps in a lock, nothing wakes it. But the interpreter writes each signal's number to a descriptor at
    once, in whichever thread (signal.set_wakeup_fd). `wait` reads that descriptor. Child processes have the default
    actions again, as soon as they run a program.
    """

    def __init__(self, *numbers: signal.Signals):
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, lambda *_: None) for number in numbers}

    def fileno(self) -> int:
        """A descriptor that is readable when `read` returns signals."""
        return self._read

    def read(self) -> list[signal.Signals]:
        """The signals since the last call; does not wait."""
        try:
            return [signal.Signals(number) for number in os.read(self._read, 4096)]
        except BlockingIOError:
            return []

    def wait(self, timeout: float | None = None) -> list[signal.Signals]:
        """Waits until there are signals, at most `timeout` seconds (None: any time), and returns them."""
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        poll.poll(None if timeout is None else max(0.0, 1e3 * timeout))
        return self.read()

    def close(self) -> None:
        """Restores the actions that the signals had before."""
        for number, action in self._before.items():
            signal.signal(number, action)
        signal.set_wakeup_fd(-1)
        os.close(self._read)
        os.close(self._write)
