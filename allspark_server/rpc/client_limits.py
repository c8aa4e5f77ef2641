"""Limits of the requests that clients have at the same time, over all models. Each sample of a request counts."""

from __future__ import annotations

import threading
from collections import Counter

from allspark_client.errors import AllSparkError, AsStatus


class ClientLimits:
    """Counts requests that wait or run; a request for `n` samples counts as n. Any thread may call the methods.

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

    def enter(self, tenant: str, samples: int = 1) -> None:
        """Count a new request; raises AllSparkError if there are too many (`.retryable` if it may be taken later)."""
        with self._lock:
            own = self._taken[tenant]
            if self._of_tenant and own + samples > self._of_tenant:
                raise _full(f"this client has {own} requests already, and may have {self._of_tenant} at once", samples,
                            self._of_tenant)
            if self._total and (taken := self._taken.total()) + samples > self._total:
                raise _full(f"the server has {taken} requests already, and takes {self._total} at once", samples,
                            self._total)
            self._taken[tenant] += samples

    def leave(self, tenant: str, samples: int = 1) -> None:
        """Count a request's end."""
        with self._lock:
            self._taken[tenant] -= samples
            if not self._taken[tenant]:
                del self._taken[tenant]


def _full(message: str, samples: int, limit: int) -> AllSparkError:
    if samples > 1:
        message += f"; n={samples} counts as {samples} requests"
    return AllSparkError(AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR, message, retryable=samples <= limit)
