"""Which spans a sequence gets: those of the prefix cache, of its second tier, and new ones."""

from __future__ import annotations

import enum
import time
from typing import Callable, Optional

from ..cache import Copies, HostTier, PrefixCache, SpanPool
from .coming import ComingSpans
from .sequence import Sequence, State

# How long copies from the second tier may hold up a step, in seconds, beside running sequences and without any; and
# how many there are while nobody knows how long they take.
_PAUSE, _IDLE_PAUSE, _FIRST_COPIES = 0.01, 0.2, 16


class Taken(enum.Enum):
    """What came of the wish for spans: there they are; too few are free; somebody computes what comes next; some of
    the second tier's are on their way, with more to come."""

    YES = "yes"
    SHORT = "short"
    COMING = "coming"
    RESTORING = "restoring"


class SequenceSpans:
    """Gives sequences their spans and takes them back. What is known of slots is not its business."""

    def __init__(
        self,
        span_size: int,
        pool: SpanPool,
        prefix_cache: Optional[PrefixCache] = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.pool, self.prefix_cache = pool, prefix_cache
        self.tier: Optional[HostTier] = prefix_cache.tier if prefix_cache is not None else None
        self.coming = ComingSpans()
        self._short: Optional[tuple[Sequence, int, Optional[bytes]]] = None  # see `short`
        self._departures = 0
        self._size, self._clock = span_size, clock
        self._copies_left = 0

    def count_for(self, positions: int) -> int:
        """Spans that hold so many positions."""
        return -(-positions // self._size)

    @property
    def short(self) -> Optional[Sequence]:
        """The waiting sequence for which there were too few spans, if nothing has changed that: only a departure makes
        spans available, and the prefix that was found can only have grown if the key that came next is known now."""
        if self._short is None:
            return None
        sequence, departures, key = self._short
        if departures != self._departures or sequence.state is not State.WAITING or (
            key is not None and key in self.prefix_cache
        ):
            self._short = None
        return self._short[0] if self._short is not None else None

    def begin_step(self, idle: bool) -> None:
        """Another step is planned; `idle`: nobody runs who would wait for its copies."""
        if self.tier is not None:
            seconds, pause = self.tier.costs.copy, _IDLE_PAUSE if idle else _PAUSE
            self._copies_left = max(_FIRST_COPIES, int(pause / seconds)) if seconds else _FIRST_COPIES

    def take(self, sequence: Sequence, spare: int) -> Taken:
        """Gives a sequence the spans of its whole history, if so many others stay free."""
        length, shared, next_key = len(sequence.tokens), [], None
        full = 0
        if self.prefix_cache is not None:
            if self.prefix_cache.keys.depends_on_history:
                root = self.prefix_cache.keys.root(sequence.salt, sequence.prompt_len, length)
                if root != sequence.root:
                    sequence.root, sequence.keys = root, []
            # At least one row must be computed, or there would be nothing to sample from.
            full = 0 if sequence.probes_every_row else (length - 1) // self._size
            keys = sequence.keys
            self.prefix_cache.keys.extend(keys, sequence.root, sequence.tokens, full)
            shared = self.prefix_cache.match(keys[:full])
            producer, end = self.coming.find(keys[:full], len(shared))
            if producer is not None:
                self.coming.wait(sequence, producer, end)
                return Taken.COMING
            next_key = keys[len(shared)] if len(shared) < full else None
            self.pool.acquire(shared)
        if self.count_for(length) - len(shared) + spare > self.pool.available:
            self.pool.release(shared, self._clock())
            self._short = (sequence, self._departures, next_key)
            return Taken.SHORT
        if self.tier is not None and len(shared) < full:
            wanted = self.tier.count(sequence.keys[len(shared) : full])
            if wanted and self.tier.costs.worthwhile():
                restored = self._restore(sequence.keys[len(shared) : len(shared) + wanted])
                sequence.restored += len(restored) * self._size
                shared += restored
                if len(restored) < wanted and self._copies_left <= 0:
                    self.pool.release(shared, self._clock())
                    return Taken.RESTORING
        sequence.spans = shared + self.pool.allocate(self.count_for(length) - len(shared))
        sequence.entered = len(shared)
        sequence.planned = sequence.computed = len(shared) * self._size
        self.coming.announce(sequence, len(shared), full)
        return Taken.YES

    def extend(self, sequence: Sequence, positions: int) -> bool:
        """Gives a running sequence the spans of so many positions, if there are enough."""
        missing = self.count_for(positions) - len(sequence.spans)
        if missing > 0:
            spans = self.pool.allocate(missing)
            if spans is None:
                return False
            if self.tier is not None:
                self.tier.before_writes(spans)
            sequence.spans += spans
        return True

    def before_writes(self, sequence: Sequence, begin: int) -> None:
        """The step that is planned computes the positions of a history from `begin` to what is planned now."""
        if self.tier is not None:
            self.tier.before_writes(sequence.spans[begin // self._size : self.count_for(sequence.planned)])

    def enter(self, sequence: Sequence) -> Optional[list[Sequence]]:
        """Makes what has been computed of a sequence findable. Returns who has waited for that; None if there is
        nothing new."""
        full = sequence.computed // self._size
        if self.prefix_cache is None or full <= sequence.entered:
            return None
        begin, sequence.entered = sequence.entered, full
        self.prefix_cache.keys.extend(sequence.keys, sequence.root, sequence.tokens, full)
        for index in range(begin, full):
            self.prefix_cache.enter(sequence.keys[index], sequence.spans[index])
        return self.coming.arrived(sequence, begin, full) if sequence.announced > begin else []

    def release(self, sequence: Sequence) -> list[Sequence]:
        """Takes all spans of a sequence back. Returns who has waited for what it would have computed."""
        self._departures += 1
        self.pool.release(sequence.spans, self._clock())
        abandoned = self.coming.abandon(sequence) if sequence.announced else []
        sequence.lose_cache()
        return abandoned

    def take_copies(self) -> Optional[Copies]:
        """What the step that is planned copies between the tiers."""
        return self.tier.take_copies() if self.tier is not None else None

    def _restore(self, keys: list[bytes]) -> list[int]:
        """Brings spans of the second tier back, as many as a step may; returns them, with a reference each."""
        spans = []
        for key in keys[: max(self._copies_left, 0)]:
            (span,) = self.pool.allocate(1)
            if not self.tier.restore(key, span):
                self.pool.release([span], self._clock())
                break
            self.prefix_cache.enter(key, span)  # whoever reads it does so after the copy
            spans.append(span)
        self._copies_left -= len(spans)
        return spans
