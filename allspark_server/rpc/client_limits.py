"""How many requests clients may have at once, whatever model they are for."""

from __future__ import annotations

import threading
from collections import Counter

from allspark_client.errors import AllSparkError, AsStatus


class ClientLimits:
    """Places for requests that wait or run: of the server, and of each tenant; 0: no limit. Any thread."""

    def __init__(self, total: int = 0, of_tenant: int = 0):
        if total < 0 or of_tenant < 0:
            raise ValueError(f"limits of {total} and {of_tenant} requests: they must be at least 1 (0: no limit)")
        self._total, self._of_tenant = total, of_tenant
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()

    def enter(self, tenant: str) -> None:
        """Takes a place; AllSparkError if there is none."""
        with self._lock:
            if self._of_tenant and self._taken[tenant] >= self._of_tenant:
                raise _full(f"this client has {self._of_tenant} requests already, as many as it may have at once")
            if self._total and self._taken.total() >= self._total:
                raise _full(f"the server has {self._total} requests already, as many as it takes at once")
            self._taken[tenant] += 1

    def leave(self, tenant: str) -> None:
        """Gives a place back."""
        with self._lock:
            self._taken[tenant] -= 1
            if not self._taken[tenant]:
                del self._taken[tenant]


def _full(message: str) -> AllSparkError:
    return AllSparkError(AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR, message, retryable=True)
