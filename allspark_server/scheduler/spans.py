"""Which spans a sequence gets: those of the prefix cache, of the host cache, and new ones."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable

from ..cache import NO_SPAN, Copies, HostCache, PrefixCache, SpanGroups, SpanPool, in_group
from .pending_spans import PendingSpans
from .sequence import Sequence, State

# How long copies from the host cache may hold up a step, in seconds, beside running sequences and without any; and
# how many there are while nobody knows how long they take.
_PAUSE, _IDLE_PAUSE, _FIRST_COPIES = 0.01, 0.2, 16

# Short prompts may go before one that waits for spans as long as they take at most this part of the cache.
_OVERTAKING_PART = 8


class Taken(enum.Enum):
    """What came of the wish for spans: there they are; too few are free; somebody computes what comes next; some of
    the host cache's are on their way, with more to come.
    """

    YES = "yes"
    SHORT = "short"
    PENDING = "pending"
    RESTORING = "restoring"


class SequenceSpans:
    """Gives sequences their spans and takes them back. What is known of slots is not its business."""

    def __init__(
        self,
        groups: SpanGroups,
        pool: SpanPool,
        prefix_cache: PrefixCache | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.groups, self.pool, self.prefix_cache = groups, pool, prefix_cache
        self.host_cache: HostCache | None = prefix_cache.host_cache if prefix_cache is not None else None
        self.pending = PendingSpans()
        self._short: tuple[Sequence, int, bytes | None] | None = None  # see `short`
        self._overtakers: list[Sequence] = []  # those that went before that one
        self._departures = 0
        self._size, self._clock = groups.size, clock
        self._copies_left = 0

    def needed(self, positions: int) -> int:
        """Spans that a sequence with so many positions has at most."""
        return self.groups.needed(positions)

    @property
    def short(self) -> Sequence | None:
        """The waiting sequence for which there were too few spans, if nothing has changed that: only a departure makes
        spans available, and the prefix that was found can only have grown if the key that came next is known now.
        """
        if self._short is None:
            return None
        sequence, departures, key = self._short
        if departures != self._departures or sequence.state is not State.WAITING or (
            key is not None and key in self.prefix_cache
        ):
            self._short = None
        return self._short[0] if self._short is not None else None

    def has_room_beside(self, sequence: Sequence, spare: int) -> bool:
        """Whether there are spans for it if so many others stay free, also beside a sequence that waits for its own:
        that one must get them though short ones come again and again.
        """
        if self.needed(len(sequence.tokens)) + spare > self.pool.available:
            return False
        first = self.short
        if first is None:
            return True
        self._overtakers = [one for one in self._overtakers if one.state is State.RUNNING]
        taken = sum(self.needed(one.stop.max_length) + 1 for one in [*self._overtakers, sequence])
        total = self.pool.num_spans
        return taken <= min(total // _OVERTAKING_PART, total - self.needed(len(first.tokens)))

    def note_overtaking(self, sequence: Sequence) -> None:
        """The sequence has got its spans, perhaps before one that waits for its own."""
        if self.short is not None:
            self._overtakers.append(sequence)

    def begin_step(self, idle: bool) -> None:
        """Another step is planned; `idle`: nobody runs who would wait for its copies."""
        if self.host_cache is not None:
            seconds, pause = self.host_cache.costs.copy, _IDLE_PAUSE if idle else _PAUSE
            self._copies_left = max(_FIRST_COPIES, int(pause / seconds)) if seconds else _FIRST_COPIES

    def take(self, sequence: Sequence, spare: int) -> Taken:
        """Gives a sequence the spans of its whole history, of groups with a window those to begin with, if so many
        others stay free.
        """
        length, hit, full, next_key = len(sequence.tokens), 0, 0, None
        if self.prefix_cache is not None:
            if self.prefix_cache.keys.depends_on_history:
                root = self.prefix_cache.keys.root(sequence.salt, sequence.prompt_len, length)
                if root != sequence.root:
                    sequence.root, sequence.keys = root, []
            # At least one row must be computed, or there would be nothing to sample from.
            full = 0 if sequence.outputs_every_row else (length - 1) // self._size
            self.prefix_cache.keys.extend(sequence.keys, sequence.root, sequence.tokens, full)
            keys = sequence.keys[:full]
            hit = self.prefix_cache.match(keys, self.groups)
            producer, end = self.pending.find(keys, hit)
            if producer is not None:
                self.pending.wait(sequence, producer, end)
                return Taken.PENDING
            next_key = keys[hit] if hit < full and keys[hit] not in self.prefix_cache else None
        self._hold(sequence, hit)
        if sum(self._missing(sequence)) + spare > self.pool.available:
            return self._too_few(sequence, next_key)
        if self.host_cache is not None and hit < full:
            reach = self.prefix_cache.match(keys, self.groups, restored=True)
            if reach > hit and self.host_cache.costs.worthwhile() and not self._restore(sequence, keys, reach):
                return Taken.RESTORING
        sequence.entered, sequence.admitted = len(sequence.spans[0]), length
        missing = self._missing(sequence)
        new = self.pool.allocate(sum(missing))
        if new is None:  # what came back is not what running sequences have anyway
            return self._too_few(sequence, next_key)
        for table, count in zip(sequence.spans, missing):
            table += new[:count]
            del new[:count]
        sequence.planned = sequence.computed = sequence.entered * self._size
        self.pending.announce(sequence, sequence.entered, full)
        return Taken.YES

    def extend(self, sequence: Sequence, positions: int) -> bool:
        """Gives a running sequence the spans of so many positions, if there are enough."""
        count = -(-positions // self._size)
        short = [table for table in sequence.spans if len(table) < count]
        if short:
            spans = self.pool.allocate(sum([count - len(table) for table in short]))
            if spans is None:
                return False
            if self.host_cache is not None:
                self.host_cache.before_writes(spans)
            for table in short:
                left = len(spans) - count + len(table)
                table += spans[left:]
                del spans[left:]
        return True

    def slide(self, sequence: Sequence) -> bool:
        """Gives back the spans that windows have left behind, and takes others for what follows of a prompt: as many,
        unless somebody else has those, too. Returns whether the sequence's spans have changed.
        """
        changed = False
        for group, window in self.groups.windowed:
            table, begin = sequence.spans[group], sequence.behind[group]
            end = self.groups.behind(window, sequence.computed)
            if end <= begin:
                continue
            self.pool.release(table[begin:end], self._clock())
            table[begin:end] = [NO_SPAN] * (end - begin)
            sequence.behind[group], changed = end, True
            missing = self.groups.end(window, end, sequence.admitted) - len(table)
            table += self.pool.allocate(max(0, min(missing, self.pool.available)))
        return changed

    def before_writes(self, sequence: Sequence, begin: int) -> None:
        """The step that is planned computes the positions of a history from `begin` to what is planned now."""
        if self.host_cache is not None:
            for table in sequence.spans:
                self.host_cache.before_writes(table[begin // self._size : self.groups.count_for(sequence.planned)])

    def enter(self, sequence: Sequence) -> list[Sequence] | None:
        """Makes what has been computed of a sequence findable. Returns who has waited for that; None if there is
        nothing new.
        """
        full = sequence.computed // self._size
        if self.prefix_cache is None or full <= sequence.entered:
            return None
        begin, sequence.entered = sequence.entered, full
        self.prefix_cache.keys.extend(sequence.keys, sequence.root, sequence.tokens, full)
        for group, table in enumerate(sequence.spans):
            for index in range(begin, full):
                self.prefix_cache.enter(in_group(sequence.keys[index], group), table[index])
        return self.pending.arrived(sequence, begin, full) if sequence.announced > begin else []

    def release(self, sequence: Sequence) -> list[Sequence]:
        """Takes all spans of a sequence back. Returns who has waited for what it would have computed."""
        self._departures += 1
        self._let_go(sequence)
        abandoned = self.pending.abandon(sequence) if sequence.announced else []
        sequence.lose_cache()
        return abandoned

    def take_copies(self) -> Copies | None:
        """What the step that is planned copies between the caches."""
        return self.host_cache.take_copies() if self.host_cache is not None else None

    def _hold(self, sequence: Sequence, length: int) -> None:
        """Makes so many spans of the prefix cache, as far as windows see them from there on, the sequence's first ones;
        None in a table for one that is not there.
        """
        sequence.behind = [self.groups.behind(window, length * self._size) for window in self.groups.windows]
        sequence.spans = []
        for group, begin in enumerate(sequence.behind):
            found = [self.prefix_cache.find(in_group(key, group)) for key in sequence.keys[begin:length]]
            self.pool.acquire(span for span in found if span is not None)
            sequence.spans.append([NO_SPAN] * begin + found)

    def _let_go(self, sequence: Sequence) -> None:
        """Takes the references of all its spans back."""
        for table, begin in zip(sequence.spans, sequence.behind):
            self.pool.release([span for span in table[begin:] if span is not None], self._clock())
        sequence.spans, sequence.behind = [], []

    def _missing(self, sequence: Sequence) -> list[int]:
        """How many spans its tables lack to begin with."""
        length = len(sequence.tokens)
        return [self.groups.end(window, begin, length) - len(table)
                for window, begin, table in zip(self.groups.windows, sequence.behind, sequence.spans)]

    def _too_few(self, sequence: Sequence, next_key: bytes | None) -> Taken:
        self._let_go(sequence)
        self._short = (sequence, self._departures, next_key)
        return Taken.SHORT

    def _restore(self, sequence: Sequence, keys: list[bytes], length: int) -> bool:
        """Brings back what the host cache has of so many spans that are to be the sequence's first ones, as many as a
        step may. False: there are more, and the sequence has none of them yet.
        """
        self._let_go(sequence)
        self._hold(sequence, length)
        wanted = [(index, group) for group, table in enumerate(sequence.spans)
                  for index, span in enumerate(table) if span is None]
        brought = set()
        for index, group in sorted(wanted):
            key, spans = in_group(keys[index], group), self.pool.allocate(1) if self._copies_left > 0 else None
            if spans is None or not self.host_cache.restore(key, spans[0]):
                self.pool.release(spans or [], self._clock())
                self._let_go(sequence)
                break
            self._copies_left -= 1
            self.prefix_cache.enter(key, spans[0])  # whoever reads it does so after the copy
            sequence.spans[group][index] = spans[0]
            brought.add(index)
        sequence.restored += len(brought) * self._size
        if len(sequence.spans) == 0 and self._copies_left > 0:  # some cannot come back
            self._hold(sequence, self.prefix_cache.match(keys, self.groups))
        return len(sequence.spans) > 0
