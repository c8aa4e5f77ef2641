"""What the steps of a model cost: how much of them is counted, and how large they may be."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

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
    """What a step may cost. What a request outputs does not depend on it.

    With a target a step's time is kept under it. Without one, and unless the number of rows is fixed, a step with
    prompts may take a time that no reader notices. Where steps take longer anyhow, those that stream and those that
    wait for their first token share its time by their numbers: a few prompts make the time between others' tokens two
    and a half times as long, whatever their length; a crowd of them is computed at nearly full speed.

    The unit is a row at the beginning of its context; `price` is what each position before it adds. Steps of running
    sequences alone tell what a step takes in any case; the others, what a prompt's rows add to that. So the first
    prompt that comes after a while already gets what the target leaves, and not less step by step.
    """

    _MEMORY = 0.95  # of what was learned, how much stays with each step
    _MARGIN, _STRIDE = 0.9, 1.25  # of the target; how much the cost may grow from one step to the next
    _FIRST = 4  # times the fewest rows: a step's cost while nothing is known
    _UNNOTICED = 0.05  # seconds between tokens
    _PART = 1.5  # of what running sequences take alone, for prompts that are not more than these; less costs throughput

    def __init__(self, max_rows: int, min_rows: int, target_ms: float, fixed: bool = False):
        self._min, self._max, self._target = min(min_rows, max_rows), max_rows, target_ms / 1e3
        self._learns = self._target > 0 or not fixed
        self.price = 0.0
        self._rows = min(max_rows, self._FIRST * self._min)  # that hold the target
        self._base = np.zeros(3)  # of steps without a prompt: rows, positions before them, seconds
        self._row = 0.0  # seconds; 0: unknown
        self._sums = np.zeros(5)  # of rows^2, rows * context, context^2, rows * seconds, context * seconds

    def for_prompts(self, decoding: int, context: int, prompts: int) -> float:
        """What rows of prompts may cost in a step in which so many running sequences, with so many positions before
        their rows, get their next one. `prompts`: how many of these want rows, the waiting ones included.
        """
        if self._target > 0:
            return self._rows - decoding - self.price * context
        base = float(self._base[2])
        if not decoding or not base or not self._row:
            return math.inf
        return max(self._PART * base * max(1.0, prompts / decoding), self._UNNOTICED - base) / self._row

    def learn(self, rows: int, context: int, seconds: float, decoding: int = 0) -> None:
        """Takes notice of a step of so many rows, with so many positions before them in all, that took so long.
        `decoding`: of the rows, those of running sequences.
        """
        if not self._learns or rows < 1:
            return
        found = np.array([rows, context, seconds])
        if rows == decoding:
            known = self._base[2] > 0
            found[2] = min(seconds, 2 * self._base[2]) if known else seconds  # somebody else may have had the processor
            self._base = self._MEMORY * self._base + (1 - self._MEMORY) * found if known else found
        else:
            self._learn_prompt(*np.maximum(found - self._base * (decoding > 0), (1, 0, 0)).tolist())
        if self._row and self._target > 0:
            base_rows, base_context, base = self._base.tolist() if decoding else (0.0, 0.0, 0.0)
            left = (self._MARGIN * self._target - base) / self._row
            wanted = left + base_rows + self.price * base_context
            limit = max(self._rows, self._STRIDE * (rows + self.price * context))
            self._rows = max(self._min, min(int(wanted), int(limit), self._max))

    def _learn_prompt(self, rows: float, context: float, seconds: float) -> None:
        """Least squares of seconds = a * rows + b * context."""
        if self._row:
            seconds = min(seconds, 1.5 * self._row * (rows + self.price * context))
        terms = (rows * rows, rows * context, context * context, rows * seconds, context * seconds)
        self._sums = self._MEMORY * self._sums + terms
        rr, rc, cc, rs, cs = self._sums.tolist()
        determinant = rr * cc - rc * rc
        row = (cc * rs - rc * cs) / determinant if determinant > 1e-6 * rr * cc else 0.0
        if row > 0:
            self._row, self.price = row, max(0.0, (rr * cs - rc * rs) / determinant / row)
        else:  # with the price that is known
            self._row = seconds / (rows + self.price * context)
