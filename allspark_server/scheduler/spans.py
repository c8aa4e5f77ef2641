"""The spans of sequences: from the prefix cache, from the host cache, and new ones."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from typing import Any

from ..cache import (
    NO_SPAN,
    Copies,
    HostCache,
    PrefixCache,
    SpanGroups,
    SpanPool,
    StateCheckpoints,
    StateCopies,
    in_group,
    of_state,
)
from .pending_spans import PendingSpans
from .sequence import Sequence, State

# Seconds that copies from the host cache may delay a step, with running sequences and without; and the number of
# copies that a step may have in any case.
_PAUSE, _IDLE_PAUSE, _FEWEST_COPIES = 0.01, 0.2, 16

# Short prompts may overtake a prompt that waits for spans if they use at most 1 / _OVERTAKING_PART of the cache.
_OVERTAKING_PART = 8

# Positions of a long prompt between two checkpoints of its recurrent state.
_CHECKPOINT_DISTANCE = 1024


class Taken(enum.Enum):
    """The result of a request for spans. YES: the sequence has them. SHORT: too few are free. PENDING: another sequence
    computes the next ones. RESTORING: copies from the host cache are under way, and more are needed.
    """

    YES = "yes"
    SHORT = "short"
    PENDING = "pending"
    RESTORING = "restoring"


class SequenceSpans:
    """Gives sequences their spans and takes them back; it does not deal with slots."""

    def __init__(
        self, groups: SpanGroups, pool: SpanPool, prefix_cache: PrefixCache | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.groups, self.pool, self.prefix_cache = groups, pool, prefix_cache
        self.host_cache: HostCache | None = prefix_cache.host_cache if prefix_cache is not None else None
        self._states = StateCheckpoints(groups, pool, prefix_cache, clock) if (
            prefix_cache is not None and groups.state_spans) else None
        self.pending = PendingSpans()
        self._short: tuple[Sequence, int, bytes | None] | None = None  # see `short`
        self._overtakers: list[Sequence] = []  # sequences that overtook `short`
        self._departures = 0
        self._size, self._clock = groups.size, clock
        self._copies_left = 0

    def needed(self, positions: int) -> int:
        """The greatest number of spans that a sequence of this many positions has."""
        return self.groups.needed(positions)

    @property
    def short(self) -> Sequence | None:
        """The waiting sequence that could not get its spans, if it still cannot. That can change only if a sequence has
        left, which frees spans, or if the prefix cache now has the next span of this sequence.
        """
        if self._short is None:
            return None
        sequence, departures, key = self._short
        if departures != self._departures or sequence.state is not State.WAITING or (
            key is not None and self.prefix_cache is not None and key in self.prefix_cache
        ):
            self._short = None
        return self._short[0] if self._short is not None else None

    def has_room_beside(self, sequence: Sequence, spare: int) -> bool:
        """Whether the sequence can have its spans with `spare` others left free. If another sequence waits for spans,
        the sequences that overtake it are limited, so that a stream of short ones cannot starve it.
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
        """Records that a sequence has got its spans, if another one still waits for spans."""
        if self.short is not None:
            self._overtakers.append(sequence)

    def begin_step(self, running: int) -> None:
        """Begins planning a step. `running`: the number of sequences that copies delay."""
        if self._states is not None:
            self._states.begin_step(running)
        if self.host_cache is not None:
            seconds, pause = self.host_cache.costs.expected_copy, _PAUSE if running else _IDLE_PAUSE
            self._copies_left = max(_FEWEST_COPIES, int(pause / seconds)) if seconds else _FEWEST_COPIES

    def take(self, sequence: Sequence, spare: int) -> Taken:
        """Gives a sequence the spans of its whole history, or the first ones in groups with a window, if `spare` others
        stay free.
        """
        length, hit, full, next_key, cache = len(sequence.tokens), 0, 0, None, self.prefix_cache
        keys: list[bytes] = []
        if cache is not None:
            if cache.keys.depends_on_history:
                root = cache.keys.root(sequence.salt, sequence.prompt_len, length)
                if root != sequence.root:
                    sequence.root, sequence.keys = root, []
            # At least one row must be computed to sample from.
            full = 0 if sequence.outputs_every_row else (length - 1) // self._size
            cache.keys.extend(sequence.keys, sequence.root, sequence.tokens, full, sequence.images)
            keys = sequence.keys[:full]
            known = cache.match(keys, self.groups)
            hit = cache.match_state(keys, known, self.groups)
            sequence.fork = self._states.position_of(known * self._size) if self._states and known > hit else 0
            producer, end = self.pending.find(keys, known)
            if producer is not None:
                self.pending.wait(sequence, producer, end)
                return Taken.PENDING
            next_key = keys[known] if known < full and keys[known] not in cache else None
        self._hold(sequence, hit)
        if sum(self._missing(sequence)) + spare > self.pool.available:
            return self._too_few(sequence, next_key)
        if cache is not None and self.host_cache is not None and hit < full:
            reach = cache.match_state(keys, cache.match(keys, self.groups, True, known), self.groups, True)
            wanted = reach > hit and (sequence.brought or self.host_cache.costs.worthwhile())
            if wanted and not self._restore(sequence, keys, reach):
                return Taken.RESTORING
        sequence.entered, sequence.admitted = len(sequence.spans[0]), length
        missing = self._missing(sequence)
        new = self.pool.allocate(sum(missing))
        if new is None:  # spans of the host cache need new spans as well
            return self._too_few(sequence, next_key)
        for table, count in zip(sequence.spans, missing):
            table += new[:count]
            del new[:count]
        sequence.planned = sequence.computed = sequence.checkpoint = sequence.entered * self._size
        self.pending.announce(sequence, sequence.entered, full)
        return Taken.YES

    def extend(self, sequence: Sequence, positions: int) -> bool:
        """Gives a running sequence the spans of this many positions, if enough are free."""
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
        """Releases the spans that sliding windows have passed, and allocates spans for the rest of a prompt as far as
        they are free. Returns whether the sequence's spans have changed.
        """
        changed = False
        for group, window in self.groups.windowed:
            table, begin = sequence.spans[group], sequence.passed_spans[group]
            end = self.groups.passed_spans(window, sequence.computed)
            if end <= begin:
                continue
            self.pool.release(table[begin:end], self._clock())
            table[begin:end] = [NO_SPAN] * (end - begin)
            sequence.passed_spans[group], changed = end, True
            missing = self.groups.end(window, end, sequence.admitted) - len(table)
            table += self.pool.allocate(max(0, min(missing, self.pool.available))) or []
        return changed

    def before_writes(self, sequence: Sequence, begin: int) -> None:
        """The planned step writes positions `begin` … `planned`-1: the host cache must save their spans' old content
        first.
        """
        if self.host_cache is not None:
            for table in sequence.spans:
                self.host_cache.before_writes(table[begin // self._size : self.groups.count_for(sequence.planned)])

    def enter(self, sequence: Sequence) -> list[Sequence] | None:
        """Enters the computed spans of a sequence into the prefix cache. Returns the sequences that waited for them;
        None if there are no new ones.
        """
        full = sequence.computed // self._size
        if self.prefix_cache is None or full <= sequence.entered:
            return None
        begin, sequence.entered = sequence.entered, full
        self.prefix_cache.keys.extend(sequence.keys, sequence.root, sequence.tokens, full, sequence.images)
        keys = sequence.keys[begin:full]
        for group, table in enumerate(sequence.spans):
            self.prefix_cache.enter([in_group(key, group) for key in keys] if group else keys, table[begin:full])
        return self.pending.arrived(sequence, begin, full) if sequence.announced > begin else []

    def release(self, sequence: Sequence) -> list[Sequence]:
        """Releases all spans of a sequence. Returns the sequences that waited for spans that it had announced."""
        self._departures += 1
        self._let_go(sequence)
        abandoned = self.pending.abandon(sequence) if sequence.announced else []
        sequence.lose_cache()
        return abandoned

    def take_copies(self) -> Copies | None:
        """The copies between cache and host cache that the planned step makes."""
        return self.host_cache.take_copies() if self.host_cache is not None else None

    @property
    def wants_copies(self) -> bool:
        """Whether a step without rows would have copies. It is worth while if no other step follows: the next request's
        first step would make them, and its first token would wait for them.
        """
        return (self.host_cache is not None and len(self.host_cache.copies) > 0) or (
            self._states is not None and self._states.wants_copies)

    def lacking(self, keys: list[bytes]) -> tuple[int, list[bytes]]:
        """How many positions at the beginning of a prompt both caches hold, and the keys of the spans that they lack to
        hold all of it. keys: the prompt's chain.
        """
        assert self.prefix_cache is not None
        cache, positions = self.prefix_cache, len(keys) * self._size
        held = cache.match_state(keys, cache.match(keys, self.groups, True), self.groups, True)
        begins = [self.groups.passed_spans(window, positions) for window in self.groups.windows]
        wanted = [in_group(key, group) for index, key in enumerate(keys) for group, begin in enumerate(begins)
                  if index >= begin]
        wanted += [of_state(keys[-1], part) for part in range(self.groups.state_spans)]
        return held * self._size, [key for key in wanted if not cache.known(key, True)]

    def save(self, keys: list[bytes]) -> None:
        """Plans copies of spans to the host cache that only the cache holds."""
        assert self.prefix_cache is not None and self.host_cache is not None
        for key in keys:
            self.host_cache.save(key, self.prefix_cache.find(key))

    def take_states(self) -> StateCopies | None:
        """The copies of recurrent states that the planned step makes."""
        return self._states.take() if self._states is not None else None

    def load_state(self, sequence: Sequence) -> None:
        """The planned step loads the state of a sequence that has just got its slot, if it begins with cached spans."""
        if self._states is not None and sequence.state_spans:
            self._states.load(sequence.slot, sequence.computed, sequence.state_spans)
            sequence.state_spans = []

    def note_rows(self, sequence: Sequence) -> None:
        """Rows of a prompt are planned: the state after them is kept if the prompt ends or is long."""
        if self._states is not None:
            position = self._states.position_of(sequence.planned)
            distance = position - sequence.checkpoint
            awaited = sequence.planned == len(sequence.tokens) or position in self._awaited(sequence)
            if distance >= _CHECKPOINT_DISTANCE or (distance > 0 and awaited):
                self._want_state(sequence, position, leaves=False)

    def rows_of_chunk(self, sequence: Sequence, count: int) -> int:
        """How many of the next `count` rows of a prompt its chunk may have: it ends where other sequences, which wait
        for the prefix that they share or will begin with it, need the state.
        """
        for position in self._awaited(sequence):
            if sequence.planned < position:
                count = min(count, position - sequence.planned)
        return count

    def _awaited(self, sequence: Sequence) -> list[int]:
        """The positions at which sequences that share its prefix need the state."""
        if self._states is None:
            return []
        return [sequence.fork] + [self._states.position_of(spans * self._size) for spans, *_ in sequence.followers]

    def note_departure(self, sequence: Sequence, least: int, most: int) -> None:
        """A sequence is about to leave its slot: its state is kept. `least`, `most`: the numbers of its positions that
        are computed when all planned steps are completed. A state beyond its tokens would be of no use.
        """
        if self._states is not None:
            position = self._states.position_of(least)
            if position == self._states.position_of(most) and position > sequence.checkpoint:
                self._want_state(sequence, position, leaves=True)

    def forget_states(self) -> None:
        """Called when slots and cache have lost their content, while nothing runs."""
        if self._states is not None:
            self._states.forget()

    def _want_state(self, sequence: Sequence, position: int, leaves: bool) -> None:
        assert self._states is not None and self.prefix_cache is not None
        self.prefix_cache.keys.extend(sequence.keys, sequence.root, sequence.tokens, position // self._size,
                                      sequence.images)
        self._states.want(sequence.slot, position, sequence.keys, leaves)
        sequence.checkpoint = position

    def _hold(self, sequence: Sequence, length: int) -> None:
        """Takes references to the first `length` spans of the sequence in the prefix cache, except those that sliding
        windows have passed. A table has None for a span that is missing.
        """
        positions = length * self._size
        sequence.passed_spans = [self.groups.passed_spans(window, positions) for window in self.groups.windows]
        sequence.spans = []
        for group, begin in enumerate(sequence.passed_spans):
            found: list[Any] = []
            if self.prefix_cache is not None:
                found = self.prefix_cache.find_all(sequence.keys[begin:length], group)
            self.pool.acquire(_present(found))
            sequence.spans.append([NO_SPAN] * begin + found)
        if self._states is not None and self.prefix_cache is not None and length:
            key = sequence.keys[length - 1]
            parts = range(self.groups.state_spans)
            sequence.state_spans = self.prefix_cache.find_all([of_state(key, part) for part in parts])
            self.pool.acquire(_present(sequence.state_spans))

    def _let_go(self, sequence: Sequence) -> None:
        """Releases all spans of the sequence."""
        self.pool.release(_present(sequence.state_spans), self._clock())
        sequence.state_spans = []
        for table, begin in zip(sequence.spans, sequence.passed_spans):
            self.pool.release(_present(table[begin:]), self._clock())
        sequence.spans, sequence.passed_spans = [], []

    def _missing(self, sequence: Sequence) -> list[int]:
        """How many spans each of its tables lacks for admission."""
        length = len(sequence.tokens)
        return [self.groups.end(window, begin, length) - len(table)
                for window, begin, table in zip(self.groups.windows, sequence.passed_spans, sequence.spans)]

    def _too_few(self, sequence: Sequence, next_key: bytes | None) -> Taken:
        self._let_go(sequence)
        self._short = (sequence, self._departures, next_key)
        return Taken.SHORT

    def _restore(self, sequence: Sequence, keys: list[bytes], length: int) -> bool:
        """Copies missing spans among the first `length` back from the host cache, up to the limit of a step. Returns
        False, and releases the sequence's spans, if some are still missing.
        """
        assert self.prefix_cache is not None and self.host_cache is not None
        self._let_go(sequence)
        self._hold(sequence, length)
        # index in the chain of spans, cache group; those of the state come last
        missing = [(index, group) for group, table in enumerate(sequence.spans)
                   for index, span in enumerate(table) if span is None]
        if len(sequence.spans) > 1:
            missing.sort()
        wanted = [in_group(keys[index], group) for index, group in missing]
        parts = [part for part, span in enumerate(sequence.state_spans) if span is None]
        wanted += [of_state(keys[length - 1], part) for part in parts]
        spans = self._copy_back(wanted)
        for (index, group), span in zip(missing, spans):
            sequence.spans[group][index] = span
        for part, span in zip(parts, spans[len(missing):]):
            sequence.state_spans[part] = span
        if len(spans) < len(wanted):
            self._let_go(sequence)
        sequence.restored += len({index for index, _ in missing[:len(spans)]}) * self._size
        if len(sequence.spans) == 0 and self._copies_left > 0:  # the host cache has lost some
            found = self.prefix_cache.match(keys, self.groups)
            self._hold(sequence, self.prefix_cache.match_state(keys, found, self.groups))
        return len(sequence.spans) > 0

    def _copy_back(self, keys: list[bytes]) -> list[int]:
        """Copies spans with these keys back from the host cache, up to the limit of a step. Returns the spans of the
        first ones, with a reference each: fewer if the limit is reached, too few spans are free, or the host cache has
        lost the next one.
        """
        assert self.prefix_cache is not None and self.host_cache is not None
        copied: list[int] = []
        while (left := min(len(keys) - len(copied), self._copies_left)) > 0:
            # Those for which none must be evicted, at once; otherwise one: what it evicts goes to the host cache first.
            spans = self.pool.allocate(min(left, max(1, self.pool.free)))
            if spans is None:
                break
            some = keys[len(copied) : len(copied) + len(spans)]
            count = self.host_cache.restore(some, spans)
            self._copies_left -= count
            self.prefix_cache.enter(some[:count], spans[:count], written=False)  # it is read after the copy
            copied += spans[:count]
            if count < len(spans):
                self.pool.release(spans[count:], self._clock())
                break
        return copied


def _present(spans: list[Any]) -> list[int]:
    """The spans without those that are missing."""
    return [span for span in spans if span is not None] if None in spans else spans
