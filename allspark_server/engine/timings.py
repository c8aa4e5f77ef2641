"""How long tokens take, as histograms that cost a step no more than an array operation."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

#: s; upper bounds of the histograms of first tokens and of gaps between tokens
FIRST_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
GAP_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Histogram:
    """Counts of values by bounds. One thread adds; readers may be a step behind."""

    def __init__(self, bounds: Iterable[float]):
        self.bounds = np.array(list(bounds))
        self._counts = np.zeros(len(self.bounds) + 1, np.int64)
        self.sum = 0.0

    def add(self, values: list[float]) -> None:
        """Counts values."""
        if values:
            at = np.searchsorted(self.bounds, values)
            self._counts += np.bincount(at, minlength=len(self._counts))
            self.sum += sum(values)

    def buckets(self) -> list[tuple[str, int]]:
        """Upper bounds as text, and how many values are at most so large; the last is "+Inf"."""
        totals = self._counts.cumsum().tolist()
        return [(name, total) for name, total in zip([*map(str, self.bounds.tolist()), "+Inf"], totals)]


class Timings:
    """A model's. `first`: s from a request's arrival to its first token; `between`: s from a token to the next."""

    def __init__(self) -> None:
        self.first, self.between = Histogram(FIRST_BOUNDS), Histogram(GAP_BOUNDS)
