"""A progress bar on the terminal."""
from __future__ import annotations

import sys


class Progress:
    """A progress bar on standard error, if that is a terminal."""

    def __init__(self, total: int):
        self._total, self._done, self._tty = max(1, total), 0, sys.stderr.isatty()

    def show(self, label: str) -> None:
        """Draws the bar with a label."""
        if self._tty:
            bar = "#" * (30 * self._done // self._total)
            sys.stderr.write(f"\r\033[K[{bar:<30}] {self._done}/{self._total} {label[:40]}")
            sys.stderr.flush()

    def advance(self, steps: int = 1) -> None:
        """Counts steps that are done."""
        self._done = min(self._total, self._done + steps)

    def close(self) -> None:
        """Removes the bar."""
        if self._tty:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
