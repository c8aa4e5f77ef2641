"""Sequences of requests that may be what ended their servers, and whose turn it is to be computed alone."""

from __future__ import annotations

import time
from collections import deque

from ..scheduler import Sequence, State
from .prepare import MOST_DEATHS

#: s without a first token of another one before one is tried for the last time. Whoever kills servers from outside often
#: does so when something happens: that must not be taken for the request's doing.
CALM_SECONDS = 1.0


class Suspects:
    """In the order in which they came; those that ended a server alone at calm times only: the first of them before all
    others, while nothing has happened yet.
    """

    def __init__(self) -> None:
        self._first: deque[Sequence] = deque()
        self._last: deque[Sequence] = deque()
        self._calm_at = 0.0

    def __bool__(self) -> bool:
        return bool(self._first or self._last)

    def add(self, sequence: Sequence) -> None:
        """One more; it is blocked."""
        (self._first if sequence.owner.request.deaths < MOST_DEATHS else self._last).append(sequence)

    @property
    def next(self) -> Sequence | None:
        """The one that is being computed, or else is to be; None: there is none, or it is too early."""
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
