"""How much each tenant may send, and how much of the server's time what is refused may take."""

from __future__ import annotations

import time

#: bytes that a second of work on refused requests counts for: to refuse a request must not be cheaper for the tenant
#: than for the server
SECOND_BYTES = 64 << 20
_LONGEST_DEBT = 30.0        # seconds that a tenant may have to wait
_REMEMBERED = 1024          # tenants whose allowance is kept even if it is full


class Allowances:
    """How many bytes each tenant may send: `burst` at once, `rate` per second in the long run. Used on one event loop.

    Messages are copied and decoded under the interpreter lock, which the threads of all other clients need, too.
    """

    def __init__(self, burst: int, rate: int) -> None:
        self.burst, self.rate = burst, rate
        #: of each tenant: the bytes left, below 0 if it has sent too much, at a time on the monotonic clock
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, tenant: str, size: float) -> float:
        """Count a message of `size` bytes; returns the seconds until the tenant has paid for it."""
        left = max(self._now(tenant) - size, -_LONGEST_DEBT * self.rate)
        if len(self._left) > _REMEMBERED:
            self._left = {name: entry for name, entry in self._left.items() if self._now(name) < self.burst}
        self._left[tenant] = left, time.monotonic()
        return max(0.0, -left / self.rate)

    def charge(self, tenant: str, seconds: float) -> float:
        """Count `seconds` of work on a request that was refused; returns as `take`."""
        return self.take(tenant, seconds * SECOND_BYTES)

    def debt(self, tenant: str) -> float:
        """The seconds until the tenant has paid for what it has sent."""
        return max(0.0, -self._now(tenant) / self.rate)

    def _now(self, tenant: str) -> float:
        left, at = self._left.get(tenant, (self.burst, 0.0))
        return min(float(self.burst), left + self.rate * (time.monotonic() - at))
