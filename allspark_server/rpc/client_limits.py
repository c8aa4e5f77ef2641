"""Limits of the requests that clients have at the same time, over all models."""

from __future__ import annotations

import threading
from collections import Counter

from allspark_client.errors import AllSparkError, AsStatus


class ClientLimits:
    """Counts requests that wait or run. Any thread may call the methods.

    Args:
        total: most requests of all tenants together; 0: no limit.
        of_tenant: most requests of one tenant; 0: no limit.
    """

    def __init__(self, total: int = 0, of_tenant: int = 0):
        if total < 0 or of_tenant < 0:
            raise ValueError(f"limits of {total} and {of_tenant} requests: they must be at least 1 (0: no limit)")
        self._total, self._of_tenant = total, of_tenant
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()

    def enter(self, tenant: str) -> None:
        """Count a new request; raises AllSparkError (`.retryable`) if there are too many."""
        with self._lock:
            if self._of_tenant and self._taken[tenant] >= self._of_tenant:
                raise _full(f"this client has {self._of_tenant} requests already, as many as it may have at once")
            if self._total and self._taken.total() >= self._total:
                raise _full(f"the server has {self._total} requests already, as many as it takes at once")
            self._taken[tenant] += 1

    def leave(self, tenant: str) -> None:
        """Count a request's end."""
        with self._lock:
            self._taken[tenant] -= 1
            if not self._taken[tenant]:
                del self._taken[tenant]


def _full(message: str) -> AllSparkError:
    return AllSparkError(AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR, message, retryable=True)
