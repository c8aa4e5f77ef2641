"""The pool of spans: free, referenced by sequences, or kept unreferenced because they hold a known prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class SpanPool:
    """Hands out the spans 0 … num_spans-1 of one model's cache.

    A span is in one of three states: on the free list; referenced by one or more sequences; or unreferenced but *kept*,
    because it holds a prefix that a later request may use. If the free list is empty, kept spans are evicted, the least
    recently used first.
    """

    def __init__(self, num_spans: int):
        if num_spans < 1:
            raise ValueError(f"num_spans is {num_spans}; a cache needs at least 1 span")
        self.num_spans = num_spans
        self._free = list(range(num_spans - 1, -1, -1))  # a stack: first low numbers, then recently freed spans
        self._references = [0] * num_spans
        self._keep: set[int] = set()
        self._unreferenced: OrderedDict[int, float] = OrderedDict()  # kept span → when it was last used, oldest first
        self._on_evict: Callable[[int], None] | None = None

    def set_evict_listener(self, listener: Callable[[int], None]) -> None:
        """Sets `listener(span)`, which is called when a kept span is evicted and its prefix must be forgotten."""
        self._on_evict = listener

    @property
    def available(self) -> int:
        """The number of spans that `allocate` can return now."""
        return len(self._free) + len(self._unreferenced)

    @property
    def used(self) -> int:
        """The number of spans that sequences reference."""
        return self.num_spans - self.available

    @property
    def kept(self) -> int:
        """The number of unreferenced spans that are kept for their prefix."""
        return len(self._unreferenced)

    def allocate(self, count: int) -> list[int] | None:
        """`count` spans with one reference each; None, without a change, if fewer are available."""
        if count > self.available:
            return None
        spans = []
        for _ in range(count):
            if not self._free:
                self._evict(next(iter(self._unreferenced)))
            span = self._free.pop()
            self._references[span] = 1
            spans.append(span)
        return spans

    def acquire(self, spans: Iterable[int]) -> None:
        """Adds a reference to each span. The spans must be kept or referenced."""
        for span in spans:
            if self._references[span] == 0:
                del self._unreferenced[span]
            self._references[span] += 1

    def release(self, spans: list[int], now: float) -> None:
        """Removes a reference from each span of a sequence. spans: in order of position.

        The last positions are released first, so that a chain of kept spans is evicted from its end.
        """
        for span in reversed(spans):
            self._references[span] -= 1
            if self._references[span] == 0:
                if span in self._keep:
                    self._unreferenced[span] = now
                else:
                    self._free.append(span)

    def keep(self, span: int) -> None:
        """From now on, keeps the span when no sequence references it."""
        self._keep.add(span)

    def evict_older_than(self, time: float) -> int:
        """Frees the kept spans last used before `time`; returns how many."""
        count = 0
        while self._unreferenced:
            span, used = next(iter(self._unreferenced.items()))
            if used >= time:
                break
            self._evict(span)
            count += 1
        return count

    def _evict(self, span: int) -> None:
        del self._unreferenced[span]
        self._keep.discard(span)
        self._free.append(span)
        if self._on_evict is not None:
            self._on_evict(span)
