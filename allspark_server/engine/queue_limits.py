"""How much may wait for a model."""

from __future__ import annotations

import threading

from allspark_client.errors import AllSparkError, AsStatus

from ..scheduler import TOKEN_BYTES, Scheduler

#: what a waiting request takes in this process beside its tokens, about, for each sample
SEQUENCE_BYTES = 4096
# Unless told otherwise, waiting prompts may have so many times the tokens that the cache holds, and so many anyway.
_QUEUED_CACHES, _QUEUED_TOKENS = 16, 1 << 20
# A queue that is full takes this part of it more, from tenants that have less than that waiting.
_RESERVED_PART = 8


class QueueLimits:
    """Room in a model's queue, reserved before the work on a request begins. Any thread.

    A tenant that fills the queue does not shut out the others: an eighth more is kept for those that have less than
    that waiting.
    """

    def __init__(self, name: str, scheduler: Scheduler, max_queue: int, max_bytes: int = 0):
        """`name`: the model's, for errors. `max_queue`: requests that may wait; `max_bytes`: that they may take in this
        process, 0: chosen.
        """
        self._name, self._scheduler, self._max_queue = name, scheduler, max_queue
        tokens = max(_QUEUED_CACHES * scheduler.limits.groups.positions(scheduler.pool.num_spans), _QUEUED_TOKENS)
        self.max_bytes = max_bytes or tokens * TOKEN_BYTES + max_queue * SEQUENCE_BYTES
        self.incoming = self.incoming_bytes = 0  # requests with a place that the scheduler does not have yet
        self._of: dict[str, list[int]] = {}  # of these, each tenant's requests and bytes
        self._lock = threading.Lock()

    def reserve(self, tenant: str, samples: int, size: int) -> None:
        """Takes places in the queue, and room for so many bytes, or raises. Undone by `unreserve`."""
        with self._lock:
            scheduler = self._scheduler
            waiting = scheduler.waiting
            free_slots = 0 if waiting else scheduler.limits.max_batch - scheduler.running
            own = scheduler.waiting_of(tenant)[0] + self._of.get(tenant, (0, 0))[0] + samples
            if self._is_full(waiting + self.incoming + samples - free_slots, own, self._max_queue):
                raise self._full(f"{waiting + self.incoming} requests wait, max_queue={self._max_queue}")
            self._check_bytes(tenant, size)
            self._add(tenant, samples, size)

    def resize(self, tenant: str, old: int, new: int) -> None:
        """What has room for `old` bytes needs `new` ones: changes that, or raises and leaves it."""
        with self._lock:
            if new > old:
                self._check_bytes(tenant, new - old)
            self._add(tenant, 0, new - old)

    def unreserve(self, tenant: str, samples: int, size: int) -> None:
        """Gives places and room back."""
        with self._lock:
            self._add(tenant, -samples, -size)

    def _check_bytes(self, tenant: str, size: int) -> None:
        held = self._scheduler.waiting_bytes + self.incoming_bytes
        own = self._scheduler.waiting_of(tenant)[1] + self._of.get(tenant, (0, 0))[1] + size
        if held and self._is_full(held + size, own, self.max_bytes):
            raise self._full(f"what waits takes {held} bytes, and {size} more would exceed "
                             f"max_queue_memory={self.max_bytes}")

    def _add(self, tenant: str, samples: int, size: int) -> None:
        self.incoming += samples
        self.incoming_bytes += size
        mine = self._of.setdefault(tenant, [0, 0])
        mine[0] += samples
        mine[1] += size
        if mine == [0, 0]:
            del self._of[tenant]

    @staticmethod
    def _is_full(total: int, own: int, limit: int) -> bool:
        reserved = limit // _RESERVED_PART
        return total > limit and (own > reserved or total > limit + reserved)

    def _full(self, why: str) -> AllSparkError:
        return AllSparkError(
            AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR, f"the queue of model {self._name!r} is full: {why}", retryable=True
        )
