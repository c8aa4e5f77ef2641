"""Where steps of a vision tower are cut: into parts that take about as long, by what each op costs and by measured
rates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..runtime.plan import OP_POSITIONS
from ..runtime.tower import KINDS, OpCost

#: seconds that a part of a step takes at most, about
PART_SECONDS = 0.05
_LEAST = OP_POSITIONS // 2048   # positions that a part has, so that steps end
_SLIVER = 0.1   # of a part: the beginning or the end of an op that is not worth a part


class Pace:
    """What ops of a tower cost, and how many operations a second each kind of them reaches. `rate`: what is assumed of
    them before the first image.
    """

    def __init__(self, costs: Sequence[OpCost], rate: float = 2e10):
        self._costs = np.array([(cost.row, cost.output, cost.pair) for cost in costs]).reshape(-1, 3)
        self._kinds = np.array([KINDS.index(cost.kind) for cost in costs], np.intp)
        self._rates = np.full(len(KINDS), rate)

    @property
    def end(self) -> int:
        """The position where the last part ends."""
        return len(self._costs) * OP_POSITIONS

    def work(self, patches: Sequence[int], merge: int) -> np.ndarray:
        """The operations of each op for images of so many patches, of which `merge` make an output."""
        rows = sum(patches)
        return self._costs @ np.array([rows, rows // merge, sum(float(count) ** 2 for count in patches)])

    def seconds(self, work: np.ndarray) -> float:
        """About how long a step with this work takes."""
        return float((work / self._rates[self._kinds]).sum())

    def cut(self, work: np.ndarray, begin: int) -> int:
        """Where a part that begins at a position ends."""
        seconds = work / self._rates[self._kinds]
        ends, op = np.cumsum(seconds), begin // OP_POSITIONS
        at = ends[op] - seconds[op] * (1 - begin % OP_POSITIONS / OP_POSITIONS) + PART_SECONDS
        if at >= ends[-1]:
            return self.end
        op = int(np.searchsorted(ends, at, "right"))
        left = ends[op] - at
        end = op * OP_POSITIONS + int((1 - left / seconds[op]) * OP_POSITIONS)
        if seconds[op] - left < _SLIVER * PART_SECONDS and op * OP_POSITIONS > begin:
            end = op * OP_POSITIONS
        elif left < _SLIVER * PART_SECONDS:
            end = (op + 1) * OP_POSITIONS
        return min(max(end, begin + _LEAST), self.end)

    def of_part(self, work: np.ndarray, begin: int, end: int) -> np.ndarray:
        """The work of a part from one position to another."""
        first = np.arange(len(work)) * OP_POSITIONS
        return work * (np.clip(end - first, 0, OP_POSITIONS) - np.clip(begin - first, 0, OP_POSITIONS)) / OP_POSITIONS

    def learn(self, work: np.ndarray, seconds: float) -> None:
        """Takes how long a part took. If one kind of op makes the most of it, that kind's rate changes, else all."""
        kinds = np.bincount(self._kinds, work, len(KINDS))
        expected = kinds / self._rates
        total = float(expected.sum())
        if not total:
            return
        main = int(expected.argmax())
        if expected[main] > 0.7 * total:
            own = max(seconds - (total - expected[main]), 0.1 * seconds, 1e-6)
            self._rates[main] = 0.5 * self._rates[main] + 0.5 * kinds[main] / own
        else:
            self._rates *= 0.5 + 0.5 * min(max(total / max(seconds, 1e-6), 0.1), 10)
