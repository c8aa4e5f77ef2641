"""Admission: limits of the requests that wait for a model."""

from __future__ import annotations

import threading

from allspark_client.errors import AllSparkError, AsStatus
from allspark_client.request import RequestSpec

from ..scheduler import TOKEN_BYTES, Scheduler

#: approximate bytes of a waiting sample in this process, its tokens not counted
SEQUENCE_BYTES = 4096
# By default, waiting prompts may hold this multiple of the cache's tokens, and in any case this number of tokens.
_QUEUED_CACHES, _QUEUED_TOKENS = 16, 1 << 20
# A full queue still accepts 1 / _RESERVED_PART more, from tenants with less than that waiting.
_RESERVED_PART = 8


def estimated_size(spec: RequestSpec) -> int:
    """Approximate bytes that a request takes in this process until it is prepared."""
    words = sum(map(len, (*spec.config.stop_words_ids, *spec.config.bad_words_ids))) + len(spec.config.logit_bias)
    generated = len(spec.generated) + sum(map(len, spec.samples))
    size = spec.config.n * SEQUENCE_BYTES + TOKEN_BYTES * (words + generated)
    size += sum(image.size for image in spec.images)
    if spec.input_ids is not None:
        return size + TOKEN_BYTES * len(spec.input_ids)
    return size + len(str(spec.text or spec.messages))


class QueueLimits:
    """Room in a model's queue, reserved before the work on a request begins. Any thread.

    So that a tenant that fills the queue does not shut out others, a further eighth is reserved for tenants that have
    less than that waiting.
    """

    def __init__(self, name: str, scheduler: Scheduler, max_queue: int, max_bytes: int = 0):
        """`name`: the model's, for errors. `max_queue`: requests that may wait. `max_bytes`: bytes that they may take
        in this process; 0: chosen.
        """
        self._name, self._scheduler, self._max_queue = name, scheduler, max_queue
        tokens = max(_QUEUED_CACHES * scheduler.limits.groups.positions(scheduler.pool.num_spans), _QUEUED_TOKENS)
        self.max_bytes = max_bytes or tokens * TOKEN_BYTES + max_queue * SEQUENCE_BYTES
        self.incoming = self.incoming_bytes = 0  # reserved, and not yet in the scheduler's queue
        self._of: dict[str, list[int]] = {}  # the samples and bytes of `incoming` by tenant
        self._lock = threading.Lock()

    def reserve(self, tenant: str, samples: int, size: int) -> None:
        """Reserves places for `samples` sequences and `size` bytes, or raises. `unreserve` undoes it."""
        with self._lock:
            scheduler, queue = self._scheduler, self._scheduler.queue
            waiting = queue.waiting + queue.blocked
            free_slots = 0 if waiting else scheduler.limits.max_batch - len(scheduler.active)
            account = scheduler.tenants.accounts.get(tenant)
            own = (account.queued if account is not None else 0) + self._of.get(tenant, (0, 0))[0] + samples
            if self._is_full(waiting + self.incoming + samples - free_slots, own, self._max_queue):
                raise self._full(f"{waiting + self.incoming} requests wait, max_queue={self._max_queue}")
            self._check_bytes(tenant, size)
            self._add(tenant, samples, size)

    def resize(self, tenant: str, old: int, new: int) -> None:
        """Changes a reservation from `old` to `new` bytes. If that is too much, raises and leaves it unchanged."""
        with self._lock:
            if new > old:
                self._check_bytes(tenant, new - old)
            self._add(tenant, 0, new - old)

    def unreserve(self, tenant: str, samples: int, size: int) -> None:
        """Gives up a reservation."""
        with self._lock:
            self._add(tenant, -samples, -size)

    def _check_bytes(self, tenant: str, size: int) -> None:
        held = self._scheduler.queue.bytes + self.incoming_bytes
        account = self._scheduler.tenants.accounts.get(tenant)
        own = (account.queued_bytes if account is not None else 0) + self._of.get(tenant, (0, 0))[1] + size
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
