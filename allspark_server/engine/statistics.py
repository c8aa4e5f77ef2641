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
#: those of times of requests, in seconds, and of their tokens
WHOLE_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKEN_BOUNDS = (1.0, 10.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5)
#: vLLM's words for why a request has ended
_ENDED = {"stop": "stop", "length": "length", "interrupted": "abort", "error": "error"}


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
    """Histograms of a model. Of tokens, in seconds: `first`, from arrival to the first token; `between`, from token to
    token. Of requests that have ended, in seconds: `whole`; `queue`, until the first step; `prefill`, from there to the
    first token; `decode`, from there to the last; `inference`, both; `per_token`, the mean of decode. And their tokens.
    `ended`: their number by vLLM's reasons.
    """

    def __init__(self) -> None:
        self.first, self.between, self.per_token = Histogram(FIRST_BOUNDS), Histogram(GAP_BOUNDS), Histogram(GAP_BOUNDS)
        self.whole, self.queue, self.prefill, self.decode, self.inference = (
            Histogram(WHOLE_BOUNDS) for _ in range(5))
        self.prompt_tokens, self.generated_tokens = Histogram(TOKEN_BOUNDS), Histogram(TOKEN_BOUNDS)
        self.ended = dict.fromkeys(dict.fromkeys(_ENDED.values()), 0)

    def add_request(self, stat: dict[str, float], reason: str) -> None:
        """Counts a request that has ended. `stat`: values of RequestStatInfo, ms; `reason`: why, in the API's words."""
        self.ended[_ENDED.get(reason, "stop")] += 1
        self.whole.add([stat["finish_time"] / 1e3])
        self.prompt_tokens.add([stat["context_token_length"]])
        self.generated_tokens.add([stat["generated_token_length"]])
        if "time_in_queue" not in stat:
            return
        self.queue.add([stat["time_in_queue"] / 1e3])
        if "first_token_time" not in stat:
            return
        prefill = max(0.0, stat["time_to_first_token"] - stat["time_in_queue"]) / 1e3
        decode = stat["last_token_time"] - stat["first_token_time"]
        self.prefill.add([prefill])
        self.decode.add([decode])
        self.inference.add([prefill + decode])
        if stat["generated_token_length"] > 1:
            self.per_token.add([decode / (stat["generated_token_length"] - 1)])


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
