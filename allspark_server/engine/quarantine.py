"""Quarantine: requests that may have crashed their servers are computed alone."""

from __future__ import annotations

import time
from collections import deque

from ..scheduler import Sequence, State

#: a request that crashes its server so often when run alone is rejected
MAX_DEATHS = 2
#: time without a first token of another quarantined request before a request's last attempt, in seconds. Whoever kills
#: servers from outside often does so when something happens, which must not be blamed on the request.
CALM_SECONDS = 1.0


class Quarantine:
    """Sequences in the order of their arrival. Those that have crashed a server alone run only at calm times; the first
    of them runs before all others if nothing has happened yet.
    """

    def __init__(self) -> None:
        self._first: deque[Sequence] = deque()
        self._last: deque[Sequence] = deque()
        self._calm_at = 0.0

    def __bool__(self) -> bool:
        return bool(self._first or self._last)

    def add(self, sequence: Sequence) -> None:
        """Takes a blocked sequence."""
        (self._first if sequence.owner.request.deaths < MAX_DEATHS else self._last).append(sequence)

    @property
    def next(self) -> Sequence | None:
        """The sequence that is running, or else runs next; None if there is none, or it is too early."""
        for waiting in (self._last, self._first):
            while waiting and (waiting[0].state is State.ENDED or waiting[0].planned >= len(waiting[0].tokens)):
                waiting.popleft()
                self._calm_at = time.monotonic() + CALM_SECONDS
        begun = next((waiting[0] for waiting in (self._last, self._first) if waiting and waiting[0].slot >= 0), None)
        if begun is not None:
            return begun
        if self._last and time.monotonic() >= self._calm_at:
            return self._last[0]
        return self._first[0] if self._first else None
