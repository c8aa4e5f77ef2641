"""Quarantine: requests that may have crashed their servers are computed alone."""

from __future__ import annotations

import time
from collections import deque

from ..scheduler import Sequence, State

#: a request that crashes this many servers when run alone is rejected
MAX_DEATHS = 2
#: seconds without progress of other quarantined requests before a request gets its last attempt. A server killed from
#: outside is often killed at an event such as another request's first token, and that must not count against it.
CALM_SECONDS = 1.0


class Quarantine:
    """Quarantined sequences in the order of their arrival. A sequence on its last attempt runs only if none has made
    progress for CALM_SECONDS; it then runs before the others.
    """

    def __init__(self) -> None:
        self._waiting: deque[Sequence] = deque()
        self._last_attempts: deque[Sequence] = deque()
        self._calm_at = 0.0

    def __bool__(self) -> bool:
        return bool(self._waiting or self._last_attempts)

    def add(self, sequence: Sequence) -> None:
        """Takes a blocked sequence."""
        (self._waiting if sequence.owner.request.deaths < MAX_DEATHS else self._last_attempts).append(sequence)

    @property
    def next(self) -> Sequence | None:
        """The sequence that is running, otherwise the one to run next; None if none may run now."""
        for waiting in (self._last_attempts, self._waiting):
            while waiting and (waiting[0].state is State.ENDED or waiting[0].planned >= len(waiting[0].tokens)):
                waiting.popleft()
                self._calm_at = time.monotonic() + CALM_SECONDS
        heads = [waiting[0] for waiting in (self._last_attempts, self._waiting) if waiting]
        begun = next((sequence for sequence in heads if sequence.slot >= 0), None)
        if begun is not None:
            return begun
        if self._last_attempts and time.monotonic() >= self._calm_at:
            return self._last_attempts[0]
        return self._waiting[0] if self._waiting else None
