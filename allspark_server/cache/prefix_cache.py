"""Finds spans that were already computed for the beginning of a prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .host_cache import HostCache
from .span_groups import SpanGroups
from .span_keys import SpanKeys, in_group, of_state
from .span_pool import SpanPool


class PrefixCache:
    """Full spans by key (see `SpanKeys`)."""

    def __init__(
        self,
        pool: SpanPool,
        keys: SpanKeys,
        ttl: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
        host_cache: HostCache | None = None,
    ):
        """ttl: seconds for which an unreferenced span is kept. host_cache: receives evicted spans."""
        self.keys = keys
        self.ttl = ttl
        self.host_cache = host_cache
        self._pool = pool
        self._clock = clock
        self._span_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        pool.set_evict_listener(self._forget)

    def __len__(self) -> int:
        return len(self._span_of)

    def __contains__(self, key: bytes) -> bool:
        return key in self._span_of

    def find(self, key: bytes) -> int | None:
        """The span with this key, or None. Takes no reference: call `SpanPool.acquire` next."""
        return self._span_of.get(key)

    def find_all(self, keys: Sequence[bytes], group: int = 0) -> list[int | None]:
        """The span of each key in a cache group, or None. keys: of the first group."""
        return list(map(self._span_of.get, keys if not group else [in_group(key, group) for key in keys]))

    def key_of(self, span: int) -> bytes | None:
        """The key of a span, or None if it has none."""
        return self._key_of.get(span)

    def match(self, keys: Sequence[bytes], groups: SpanGroups, restored: bool = False, known: int = 0) -> int:
        """The number of spans at the start of the chain that need not be computed.

        In each cache group, all of those spans that later rows attend to are in the cache. restored: or in the host
        cache. known: what it is at least.
        """
        self.expire()
        length, windowed = len(keys), groups.windowed
        for group in range(len(groups.windows) - len(windowed)):
            length = known + self._count_known(keys[known:length], group, restored)
        # The spans that a window sees before the end must be known. If one is not, the end moves before it.
        begin = length
        while windowed and length > 0:
            seen = min(groups.passed_spans(window, length * groups.size) for _, window in windowed)
            while begin > seen and all(self.known(in_group(keys[begin - 1], group), restored)
                                       for group, _ in windowed):
                begin -= 1
            if begin <= seen:
                break
            length = begin = begin - 1
        return length

    def _count_known(self, keys: Sequence[bytes], group: int, restored: bool) -> int:
        """How many keys of a chain the cache knows before the first one that it does not know."""
        found = self.find_all(keys, group)
        if None not in found:
            return len(found)
        count = found.index(None)
        if not restored or self.host_cache is None:
            return count
        rest = keys[count:] if not group else [in_group(key, group) for key in keys[count:]]
        known = [span is not None or held for span, held in zip(found[count:], self.host_cache.holds(rest))]
        return count + (known.index(False) if False in known else len(known))

    def match_state(self, keys: Sequence[bytes], length: int, groups: SpanGroups, restored: bool = False) -> int:
        """The number of spans, at most `length`, after which a checkpoint of the recurrent state is in the cache; 0 for
        none; `length` if the model has no state. restored: or in the host cache.
        """
        while groups.state_spans and length > 0 and not self.has_state(keys[length - 1], groups, restored):
            length -= 1
        return length

    def has_state(self, key: bytes, groups: SpanGroups, restored: bool = False) -> bool:
        """Whether a checkpoint of the state after the span with this key is in the cache. restored: or in the host
        cache.
        """
        return all(self.known(of_state(key, part), restored) for part in reversed(range(groups.state_spans)))

    def enter(self, keys: Sequence[bytes], spans: Sequence[int], written: bool = True) -> None:
        """Adds fully computed spans. A second span with the same key stays private to its sequence. written=False: the
        step that is being planned writes them; the caller tells the host cache afterwards, unless it has them.
        """
        if not self._span_of.keys().isdisjoint(keys):
            new = [(key, span) for key, span in zip(keys, spans) if key not in self._span_of]
            keys, spans = [key for key, _ in new], [span for _, span in new]
        self._span_of.update(zip(keys, spans))
        self._key_of.update(zip(spans, keys))
        self._pool.keep(spans)
        if self.host_cache is not None and written:
            for key, span in zip(keys, spans):
                self.host_cache.computed(key, span)

    def expire(self) -> None:
        """Frees the spans that no sequence has used for `ttl` seconds."""
        self._pool.evict_older_than(self._clock() - self.ttl)

    def clear(self) -> None:
        """Forgets all spans, as the cache lost its content; no sequence may reference one. The host cache stays."""
        self._pool.evict_older_than(float("inf"))
        if self.host_cache is not None:
            self.host_cache.cache_is_lost()

    def reset(self) -> None:
        """Forgets the spans that no sequence uses, in memory and in the host cache, so that prompts are computed."""
        host_cache, self.host_cache = self.host_cache, None     # what is evicted now is not saved
        self._pool.evict_older_than(float("inf"))
        self.host_cache = host_cache
        if host_cache is not None:
            host_cache.reset()

    def known(self, key: bytes, restored: bool) -> bool:
        """Whether the cache has the span with this key. restored: or the host cache."""
        return key in self._span_of or (restored and self.host_cache is not None and key in self.host_cache)

    def _forget(self, span: int) -> None:
        key = self._key_of.pop(span)
        del self._span_of[key]
        if self.host_cache is not None:
            self.host_cache.evicted(key, span)
