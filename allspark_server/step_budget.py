"""What the steps of a model cost: how much of them is counted, and how large they may be."""

from __future__ import annotations

from collections import deque

_RATE_SECONDS = 10  # throughput is over at most so many past seconds


class Throughput:
    """Rows and generated tokens of the last seconds, counted by whole seconds."""

    def __init__(self) -> None:
        self._seconds: deque[list[float]] = deque(maxlen=_RATE_SECONDS + 1)  # [second, rows, generated]

    def add(self, now: float, rows: int, generated: int) -> None:
        """Counts a step that ended at `now`, in seconds of the monotonic clock."""
        second = int(now)
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append([second, 0, 0])
        self._seconds[-1][1] += rows
        self._seconds[-1][2] += generated

    def rates(self, now: float) -> tuple[float, float]:
        """Rows and generated tokens per second. May be called by any thread."""
        recent = [entry for entry in list(self._seconds) if now - entry[0] <= _RATE_SECONDS]
        if not recent:
            return 0.0, 0.0
        span = max(now - recent[0][0], 1e-3)
        return sum(entry[1] for entry in recent) / span, sum(entry[2] for entry in recent) / span


class StepBudget:
    """What a step may cost, chosen to keep its time under a target: less after a step that was too slow, more again
    while steps that used the whole budget are fast. What a request outputs does not depend on it.

    The unit is a row at the beginning of its context; `price` is what each position before it adds, as learned from the
    times of steps.
    """

    _MEMORY = 0.95  # of what was learned, how much stays with each step

    def __init__(self, max_rows: int, min_rows: int, target_ms: float):
        self.rows, self.price = max_rows, 0.0
        self._min, self._target = min(min_rows, max_rows), target_ms / 1e3
        self._sums = [0.0] * 5  # of rows², rows · context, context², rows · seconds, context · seconds

    @property
    def adaptive(self) -> bool:
        """Whether there is a target."""
        return self._target > 0

    def learn(self, rows: int, context: int, seconds: float) -> None:
        """Takes notice of a step of so many rows, with so many positions before them in all, that took so long."""
        if not self.adaptive:
            return
        terms = (rows * rows, rows * context, context * context, rows * seconds, context * seconds)
        self._sums = [self._MEMORY * old + new for old, new in zip(self._sums, terms)]
        rr, rc, cc, rs, cs = self._sums
        determinant = rr * cc - rc * rc  # least squares of seconds = a · rows + b · context
        if determinant > 1e-6 * rr * cc:
            row, position = (cc * rs - rc * cs) / determinant, (rr * cs - rc * rs) / determinant
            if row > 0:
                self.price = max(0.0, position / row)
        cost = rows + self.price * context
        if seconds > self._target and cost > self._min:
            self.rows = max(self._min, min(self.rows, int(cost * max(0.5, self._target / seconds))))
        elif seconds < 0.8 * self._target and cost >= 0.9 * self.rows:
            self.rows += max(1, self.rows // 8)
