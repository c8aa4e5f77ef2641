"""Checkpoints of recurrent states: copies of a slot's state to spans of the cache, and back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .prefix_cache import PrefixCache
from .span_groups import STATE_STEP, SpanGroups
from .span_keys import of_state
from .span_pool import SpanPool


@dataclass
class StateCopies:
    """The copies of one step, made after those of the host cache and before it computes anything: (slot, position of
    the state, spans).
    """

    saved: list[tuple[int, int, list[int]]] = field(default_factory=list)
    loaded: list[tuple[int, int, list[int]]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.saved) + len(self.loaded)

    def words(self) -> list[int]:
        """The words of the plan's section STATES."""
        both = [*self.saved, *self.loaded]
        words = [len(self.saved), len(both[0][2])]
        for slot, position, spans in both:
            words += (slot, position, *spans)
        return words


class StateCheckpoints:
    """The checkpoints of one model with a recurrent state.

    A checkpoint lies in `groups.state_spans` spans of the cache, under keys derived from that of the span before it. So
    it is found, evicted by use, and saved to the host cache as spans are. It is wanted after a step, and copied by the
    next one before that computes anything: until then, the slot's state does not change.
    """

    def __init__(self, groups: SpanGroups, pool: SpanPool, prefix_cache: PrefixCache,
                 clock: Callable[[], float] = time.monotonic):
        self.groups, self._pool, self._cache, self._clock = groups, pool, prefix_cache, clock
        self._wanted: list[tuple[int, int, bytes]] = []  # slot, position, key of the span before the position
        self._copies = StateCopies()
        self._planning, self._spare = False, 0
        self._held: list[list[int]] = []  # spans of the copies, referenced until the step is planned
        self._unknown: list[tuple[bytes, int]] = []  # spans that the host cache does not know yet

    def position_of(self, positions: int) -> int:
        """The position of the last checkpoint that can be taken after so many positions are computed; 0 for none."""
        position = positions // STATE_STEP * STATE_STEP
        return position if position % self.groups.size == 0 else 0

    def want(self, slot: int, position: int, keys: Sequence[bytes], leaves: bool) -> None:
        """The next step shall save the state of a slot, which is at this position (see `position_of`). keys: of the
        sequence's spans, at least up to the position. leaves: the sequence leaves the slot; the step that is being
        planned, if any, frees it and must save the state.
        """
        wanted = slot, position, keys[position // self.groups.size - 1]
        if leaves and self._planning:
            self._plan(*wanted)
        else:
            self._wanted.append(wanted)

    @property
    def wants_copies(self) -> bool:
        """Whether the next step saves a state, or the host cache has not heard of one that was saved."""
        return bool(self._wanted) or (self._cache.host_cache is not None and bool(self._unknown))

    def begin_step(self, spare: int) -> None:
        """Begins planning a step: plans the copies that are wanted, as far as `spare` spans stay free."""
        if self._cache.host_cache is not None:
            for key, span in self._unknown:
                if self._cache.find(key) == span:
                    self._cache.host_cache.computed(key, span)
        self._unknown = []
        self._planning, self._spare = True, spare
        wanted, self._wanted = self._wanted, []
        for each in wanted:
            self._plan(*each)

    def _plan(self, slot: int, position: int, key: bytes) -> None:
        needed = self.groups.state_spans
        if self._cache.has_state(key, self.groups) or self._pool.available < needed + self._spare:
            return
        spans = self._pool.allocate(needed) or []
        if self._cache.host_cache is not None:
            self._cache.host_cache.before_writes(spans)
        self._cache.enter([of_state(key, part) for part in range(needed)], spans, written=False)
        self._copies.saved.append((slot, position, spans))
        self._held.append(spans)

    def load(self, slot: int, position: int, spans: list[int]) -> None:
        """The planned step shall load a slot's state from these spans. They are referenced; the reference is given up
        when the step is planned.
        """
        self._copies.loaded.append((slot, position, spans))
        self._held.append(spans)

    def take(self) -> StateCopies | None:
        """The copies of the planned step, or None. Ends its planning."""
        self._planning = False
        if not self._copies:
            return None
        copies, self._copies = self._copies, StateCopies()
        for _, _, spans in copies.saved:
            self._unknown += [(key, span) for span in spans if (key := self._cache.key_of(span)) is not None]
        self._release()
        return copies

    def forget(self) -> None:
        """Called when slots and cache have lost their content, while nothing runs."""
        self._release()
        self._wanted, self._copies, self._unknown = [], StateCopies(), []

    def _release(self) -> None:
        for spans in self._held:
            self._pool.release(spans, self._clock())
        self._held = []
