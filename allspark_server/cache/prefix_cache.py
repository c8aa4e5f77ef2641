"""Finds spans already computed for the beginning of a prompt."""

from __future__ import annotations

import time
from typing import Callable, Optional, Sequence

from .host_tier import HostTier
from .span_keys import SpanKeys
from .span_pool import SpanPool


class PrefixCache:
    """Full spans by their keys (see `SpanKeys`)."""

    def __init__(
        self,
        pool: SpanPool,
        keys: SpanKeys,
        ttl: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
        tier: Optional[HostTier] = None,
    ):
        """`ttl`: seconds an unreferenced span is kept. `tier`: where those go then that are given away."""
        self.keys = keys
        self.ttl = ttl
        self.tier = tier
        self._pool = pool
        self._clock = clock
        self._span_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        pool.set_evict_listener(self._forget)

    def __len__(self) -> int:
        return len(self._span_of)

    def __contains__(self, key: bytes) -> bool:
        return key in self._span_of

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The spans of the longest known beginning of the chain. Takes no reference: call `SpanPool.acquire` next."""
        self.expire()
        spans = []
        for key in keys:
            span = self._span_of.get(key)
            if span is None:
                break
            spans.append(span)
        return spans

    def enter(self, key: bytes, span: int) -> None:
        """Makes a fully computed span findable. A second span with the same content stays private to its sequence."""
        if key not in self._span_of:
            self._span_of[key] = span
            self._key_of[span] = key
            self._pool.keep(span)
            if self.tier is not None:
                self.tier.computed(key, span)

    def expire(self) -> None:
        """Frees the spans that nobody has used for `ttl` seconds."""
        self._pool.evict_older_than(self._clock() - self.ttl)

    def _forget(self, span: int) -> None:
        key = self._key_of.pop(span)
        del self._span_of[key]
        if self.tier is not None:
            self.tier.evicted(key, span)
