"""Quarantine: requests that may have crashed their servers are computed alone."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

from ..scheduler import Sequence, State

#: a request that crashes this many servers when run alone is rejected
MAX_DEATHS = 2
#: seconds without progress of other quarantined requests before a request gets its last attempt. A server killed from
#: outside is often killed at an event such as another request's first token, and that must not count against it.
CALM_SECONDS = 1.0
#: after this many seconds, others do not begin before the last attempt has
_LONGEST_WAIT = 5.0
#: quarantined sequences of one tenant whose claim to have lost a server is not proven; further ones run as others do
MAX_UNPROVEN = 8


class Quarantine:
    """Quarantined sequences: tenants take turns, and within a tenant sequences run in the order of their arrival. A
    sequence on its last attempt runs only if none has made progress for CALM_SECONDS; it then runs before the others.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Sequence]] = {}  # by tenant
        self._last_attempts: dict[str, deque[Sequence]] = {}
        self._calm_at = 0.0
        self._overdue_at = 0.0  # for the last attempts that wait

    def __bool__(self) -> bool:
        return bool(self._waiting or self._last_attempts)

    def has_room(self, tenant: str) -> bool:
        """Whether a sequence may be added whose claim is not proven."""
        return sum(len(lines.get(tenant, ())) for lines in (self._waiting, self._last_attempts)) < MAX_UNPROVEN

    def add(self, sequence: Sequence) -> None:
        """Takes a blocked sequence."""
        lines = self._waiting
        if sequence.owner.request.deaths >= MAX_DEATHS:
            lines = self._last_attempts
            if not lines:
                self._overdue_at = time.monotonic() + _LONGEST_WAIT
        lines.setdefault(sequence.tenant, deque()).append(sequence)

    def forget_done(self) -> None:
        """Forgets sequences that have ended or are about to sample. Call this after each step that is planned."""
        for lines in (self._last_attempts, self._waiting):
            for _ in self._heads(lines):
                pass

    @property
    def next(self) -> Sequence | None:
        """The sequence that is running, otherwise the one to run next; None if none may run now."""
        last_attempts, waiting = list(self._heads(self._last_attempts)), list(self._heads(self._waiting))
        begun = next((sequence for sequence in last_attempts + waiting if sequence.slot >= 0), None)
        if begun is not None:
            return begun
        now = time.monotonic()
        if last_attempts and now >= self._calm_at:
            self._overdue_at = now + _LONGEST_WAIT
            return min(last_attempts, key=_time_of)
        if not waiting or (last_attempts and now >= self._overdue_at):
            return None
        return min(waiting, key=_time_of)

    def _heads(self, lines: dict[str, deque[Sequence]]) -> Iterator[Sequence]:
        """The first sequence of each tenant; forgets those that have ended or are about to sample."""
        for tenant, line in list(lines.items()):
            while line and (line[0].state is State.ENDED or line[0].planned >= len(line[0].tokens)):
                line.popleft()
                self._calm_at = time.monotonic() + CALM_SECONDS
            if line:
                yield line[0]
            else:
                del lines[tenant]


def _time_of(sequence: Sequence) -> float:
    return sequence.account.time
