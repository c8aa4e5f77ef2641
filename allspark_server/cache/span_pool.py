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
    def free(self) -> int:
        """Of these, the number for which no kept span is evicted."""
        return len(self._free)

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
        free = self._free
        spans = free[: -count - 1 : -1]
        del free[len(free) - len(spans) :]
        while len(spans) < count:
            self._evict(next(iter(self._unreferenced)))
            spans.append(free.pop())
        for span in spans:
            self._references[span] = 1
        return spans

    def acquire(self, spans: Iterable[int]) -> None:
        """Adds a reference to each span. The spans must be kept or referenced."""
        references, unreferenced = self._references, self._unreferenced
        for span in spans:
            if not references[span]:
                del unreferenced[span]
            references[span] += 1

    def release(self, spans: list[int], now: float) -> None:
        """Removes a reference from each span of a sequence. spans: in order of position.

        The last positions are released first, so that a chain of kept spans is evicted from its end.
        """
        references, keep, unreferenced = self._references, self._keep, self._unreferenced
        for span in reversed(spans):
            left = references[span] = references[span] - 1
            if not left:
                if span in keep:
                    unreferenced[span] = now
                else:
                    self._free.append(span)

    def keep(self, spans: Iterable[int]) -> None:
        """From now on, keeps the spans when no sequence references them."""
        self._keep.update(spans)

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
