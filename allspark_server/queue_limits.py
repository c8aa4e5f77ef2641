"""How much may wait for a model."""

from __future__ import annotations

import threading

from allspark_client.errors import AllSparkError, AsStatus

from .scheduler import Scheduler

# Waiting prompts may have so many times the tokens that the cache holds, and so many in any case: about 40 bytes each.
_QUEUED_CACHES, _QUEUED_TOKENS = 16, 1 << 20


class QueueLimits:
    """Room in a model's queue, reserved before the work on a request begins. Any thread."""

    def __init__(self, name: str, scheduler: Scheduler, max_queue: int):
        """`name`: the model's, for errors. `max_queue`: requests that may wait."""
        self._name, self._scheduler, self._max_queue = name, scheduler, max_queue
        #: of prompts that may wait
        self.max_tokens = max(_QUEUED_CACHES * scheduler.pool.num_spans * scheduler.limits.span_size, _QUEUED_TOKENS)
        self.incoming = 0  # requests with a place that the scheduler does not have yet
        self.incoming_tokens = 0  # and tokens
        self._lock = threading.Lock()

    def reserve(self, samples: int) -> None:
        """Takes places in the queue, or raises. Undone by `unreserve`."""
        with self._lock:
            waiting = self._scheduler.waiting
            free_slots = 0 if waiting else self._scheduler.limits.max_batch - self._scheduler.running
            if waiting + self.incoming + samples - free_slots > self._max_queue:
                raise AllSparkError(
                    AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR,
                    f"the queue of model {self._name!r} is full: {waiting + self.incoming} requests wait, "
                    f"max_queue={self._max_queue}",
                    retryable=True,
                )
            self.incoming += samples

    def unreserve(self, samples: int) -> None:
        """Gives places back."""
        with self._lock:
            self.incoming -= samples

    def reserve_tokens(self, tokens: int) -> None:
        """Takes room for so many tokens of prompts, or raises. Undone by `unreserve_tokens`."""
        with self._lock:
            waiting = self._scheduler.waiting_tokens + self.incoming_tokens
            if waiting and waiting + tokens > self.max_tokens:
                raise AllSparkError(
                    AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR,
                    f"the queue of model {self._name!r} is full: prompts of {waiting} tokens wait, and {tokens} more "
                    f"would exceed its limit of {self.max_tokens} tokens",
                    retryable=True,
                )
            self.incoming_tokens += tokens

    def unreserve_tokens(self, tokens: int) -> None:
        """Gives that room back."""
        with self._lock:
            self.incoming_tokens -= tokens
