"""Counters and histograms of a model. Counting a step costs no more than an array operation."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from allspark_client.types import AsEngineStat

if TYPE_CHECKING:
    from .served_model import ServedModel

_RATE_SECONDS = 10  # seconds over which throughput is averaged, at most
#: upper bounds, in seconds, of the histograms of first tokens and of gaps between tokens
FIRST_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
GAP_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Histogram:
    """Counts of values by upper bounds. One thread adds; readers may be a step behind."""

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
        """Pairs of an upper bound as text and the number of values up to it. The last bound is "+Inf"."""
        totals = self._counts.cumsum().tolist()
        return [(name, total) for name, total in zip([*map(str, self.bounds.tolist()), "+Inf"], totals)]


class Timings:
    """A model's times in seconds. `first`: from arrival to the first token; `between`: from token to token."""

    def __init__(self) -> None:
        self.first, self.between = Histogram(FIRST_BOUNDS), Histogram(GAP_BOUNDS)


class Throughput:
    """Rows and generated tokens of the last seconds, counted in whole seconds."""

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
        """Rows and generated tokens per second. Any thread."""
        recent = [entry for entry in list(self._seconds) if now - entry[0] <= _RATE_SECONDS]
        if not recent:
            return 0.0, 0.0
        span = max(now - recent[0][0], 1e-3)
        return sum(entry[1] for entry in recent) / span, sum(entry[2] for entry in recent) / span


def engine_stat(model: ServedModel) -> AsEngineStat:
    """Load and counters of a model. Any thread: they are read without a lock, so values may be a step apart."""
    scheduler, info, host_cache = model.scheduler, model.info, model.host_cache
    counters, pool, groups = scheduler.counters, scheduler.pool, scheduler.limits.groups
    rows, generated = model.throughput.rates(time.monotonic())
    hit, seen = counters.prefix_tokens, counters.prompt_tokens
    return AsEngineStat(
        model_name=model.name, total_span=pool.num_spans, used_span=pool.used, free_span=pool.available,
        total_token=groups.positions(pool.num_spans), free_token=groups.positions(pool.available),
        pendding_request=scheduler.waiting + model.queue.incoming, running_request=scheduler.running,
        total_prefill_token=seen, total_generated_token=counters.generated_tokens, generate_token_persec=generated,
        process_token_persec=rows, token_usage_percentage=100.0 * pool.used / pool.num_spans,
        prefix_cache_hit_token=hit, prefix_cache_miss_token=seen - hit,
        prefix_cache_hit_rate=hit / seen if seen else 0.0, prefix_cache_miss_rate=(seen - hit) / seen if seen else 0.0,
        preempted_request=counters.preemptions, total_host_span=info.host_spans,
        used_host_span=len(host_cache) if host_cache is not None else 0,
        prefix_cache_host_token=counters.restored_tokens, saved_host_span=counters.saved_spans,
        restored_host_span=counters.restored_spans
    )
