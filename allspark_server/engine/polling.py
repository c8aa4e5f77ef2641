"""Waits for what the engine's thread can only look at."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
FIRST_POLL, LONGEST_POLL = 0.001, 0.05  # seconds between two looks


def poll(look: Callable[[], T | None]) -> T:
    """What `look()` gives at last, or raises; None: not yet."""
    pause = FIRST_POLL
    while (found := look()) is None:
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_POLL)
    return found
