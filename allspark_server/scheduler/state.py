"""The waiting and running sequences of a model, their slots and their spans."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from ..cache import PrefixCache, SpanPool
from ..runtime.plan import Flag
from .prediction import PredictedLengths
from .sequence import Sequence, State
from .slots import SlotTable
from .spans import SequenceSpans
from .speculation import DraftLengths
from .step import Counters, Limits
from .step_builder import NO_SLOTS
from .tenants import Account, Tenants
from .waiting_queue import WaitingQueue

# The seconds of waiting that one level of priority is worth, and the number of levels above and below 0. A sequence
# that has waited longer than the highest level is worth is therefore ahead of all that arrive later.
PRIORITY_SECONDS, PRIORITY_LEVELS = 30.0, 10


class SchedulerState:
    """Sequences enter and leave the queue and the slots here; `Scheduler` decides when."""

    def __init__(
        self, limits: Limits, pool: SpanPool, prefix_cache: PrefixCache | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.limits = limits
        self.pool = pool
        self.prefix_cache = prefix_cache
        self.counters = Counters()
        self._clock = clock
        self._arrivals = 0
        self.tenants = Tenants(limits.max_batch)
        self.queue = WaitingQueue(self.tenants)
        self._spans = SequenceSpans(limits.groups, pool, prefix_cache, clock)
        self._restoring: list[Sequence] = []  # sequences that wait for spans of the host cache
        self.active: list[Sequence] = []  # sorted by `order`
        self._prompts: list[Sequence] = []  # sequences of `active` in prefill, sorted by `order`
        self._decoding: list[Sequence] | None = []  # sequences of `active` in decode; None: out of date
        self._decoding_slots = NO_SLOTS
        self.alone: Sequence | None = None  # a sequence of `_prompts` that has steps of its own
        self._windowed = any(limits.windows)
        track_full_spans = prefix_cache is not None or self._windowed
        self._slots = SlotTable(limits.max_batch, limits.span_size, track_full_spans, limits.recompute_beyond)
        lengths = limits.max_batch, limits.max_drafts, limits.first_drafts, limits.draft_kind != Flag.LOOKUP
        self._drafts = DraftLengths(*lengths) if limits.draft_kind else None
        self._predicted = PredictedLengths(limits.max_batch)
        self._free_slots = list(range(limits.max_batch - 1, -1, -1))
        self._slots_to_free: list[int] = []  # the next plan tells the ranks
        self._oversized: list[Sequence] = []
        self._mask_rows = 0  # the first mask row of the last step

    @property
    def waiting(self) -> int:
        """Sequences in the queue, blocked ones included."""
        return self.queue.waiting + self.queue.blocked

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the sequences in the queue in this process."""
        return self.queue.bytes

    @property
    def blocked(self) -> int:
        """Sequences in the queue that wait for something other than a slot and spans."""
        return self.queue.blocked

    @property
    def running(self) -> int:
        """Sequences with a slot."""
        return len(self.active)

    @property
    def has_work(self) -> bool:
        """Whether there is anything to plan: sequences, or copies that the last ones have left."""
        return bool(self.active or self._restoring) or self.queue.waiting > 0 or self._spans.wants_copies

    def add(self, sequence: Sequence) -> None:
        """Puts a new sequence into the queue."""
        level = max(-PRIORITY_LEVELS, min(sequence.priority, PRIORITY_LEVELS))
        sequence.order = (self._clock() - PRIORITY_SECONDS * level, self._arrivals)
        self._arrivals += 1
        if self.prefix_cache is not None and not sequence.root:
            sequence.root = self.prefix_cache.keys.root(sequence.salt, sequence.prompt_len, len(sequence.tokens))
        self.queue.add(sequence)

    def block(self, sequence: Sequence, reason: str) -> None:
        """Blocks a sequence until `unblock`, unless it has ended. It keeps its place in the order."""
        if sequence.state in (State.ENDED, State.BLOCKED):
            return
        sequence.blocked_on = reason
        if sequence.state is State.RUNNING:
            self._leave(sequence, State.WAITING)
        else:
            self.queue.block(sequence)

    def unblock(self, sequence: Sequence) -> None:
        """Returns a blocked sequence to the queue. Does nothing if it is not blocked."""
        sequence.blocked_on, sequence.awaited = "", None
        if sequence.state is State.BLOCKED:
            self.queue.unblock(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence in any state; its spans and its slot are free at once."""
        if sequence.state is State.RUNNING:
            self._leave(sequence, State.ENDED)
        elif sequence.state is not State.ENDED:
            self.queue.remove(sequence, State.ENDED)

    def take_oversized(self) -> list[Sequence]:
        """Removes and returns sequences that ended because the whole cache cannot hold one more of their tokens."""
        oversized, self._oversized = self._oversized, []
        return oversized

    def lacking_spans(self, keys: list[bytes]) -> tuple[int, list[bytes]]:
        """See SequenceSpans.lacking."""
        return self._spans.lacking(keys)

    def save_spans(self, keys: list[bytes]) -> None:
        """See SequenceSpans.save."""
        self._spans.save(keys)

    def lose_cache(self) -> None:
        """Forgets what the cache held, as it lost its content; no sequence may be running. The host cache stays."""
        self._spans.forget_states()
        if self.prefix_cache is not None:
            self.prefix_cache.clear()

    def _advance(self, sequence: Sequence) -> None:
        """Processes newly computed positions: full spans enter the prefix cache, and spans that windows have passed
        become free.
        """
        ready = self._spans.enter(sequence)
        if self._windowed and self._spans.slide(sequence):
            self._slots.note_spans(sequence)
        if ready is not None or self._windowed:
            self._slots.note_computed(sequence)
        for follower in ready or ():
            self.unblock(follower)

    def _extend(self, sequence: Sequence, positions: int) -> bool:
        """Gives the sequence the spans of `positions`, if enough are free."""
        if not self._spans.extend(sequence, positions):
            return False
        self._slots.note_spans(sequence)
        return True

    def _has_room(self, sequence: Sequence, positions: int) -> bool:
        """Gives the sequence the spans of `positions`, preempting others if necessary. Returns False if the sequence
        itself was preempted or ended, or must wait for the results of its running steps.
        """
        while not self._extend(sequence, positions):
            victim = self._last_of_the_largest()
            if victim is sequence and len(self.active) == 1:
                if self._slots.pending[sequence.slot] == 0:
                    self._leave(sequence, State.ENDED)
                    self._oversized.append(sequence)
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _last_of_the_largest(self) -> Sequence:
        """The last running sequence of the tenant with the most spans. The first of all sequences is returned only if
        no other is running.
        """
        if len(self.tenants) == 1 or len(self.active) == 1:
            return self.active[-1]
        held: Counter = Counter()
        for sequence in self.active[1:]:
            held[sequence.account] += sequence.held_spans
        return self._last_of(max(held, key=held.__getitem__))

    def _last_of(self, account: Account) -> Sequence:
        return next(sequence for sequence in reversed(self.active) if sequence.account is account)

    def _preempt(self, victim: Sequence) -> None:
        self._leave(victim, State.WAITING)
        victim.preemptions += 1
        self.counters.preemptions += 1

    def _share_slots(self) -> None:
        """Call this if all slots are taken. The tenant with the most slots gives one to the tenant whose turn it is, if
        the latter has fewer than its share. The preempted sequence's spans stay in the prefix cache.
        """
        claimant = self.queue.first()
        if claimant is None or claimant.in_flight or self.prefix_cache is None:
            return
        share = max(1, self.limits.max_batch // len(self.tenants))
        busiest = self.tenants.busiest()
        needed = self._spans.needed(len(claimant.tokens)) + len(self.active)
        if claimant.account.running < share < busiest.running and needed <= self.pool.available:
            self._preempt(self._last_of(busiest))

    def _leave(self, sequence: Sequence, state: State) -> None:
        """Takes a running sequence's slot and spans, and puts it back into the queue unless `state` is ENDED."""
        table, slot = self._slots, sequence.slot
        table.settle(sequence)
        if sequence in self._prompts:
            self._spans.note_departure(sequence, sequence.planned, sequence.planned)
        else:
            self._spans.note_departure(sequence, int(table.certain[slot]), int(table.longest[slot]) - 1)
        sequence.in_flight = int(table.pending[slot])
        table.epoch[slot] += 1
        self.active.remove(sequence)
        if sequence in self._prompts:
            self._prompts.remove(sequence)
        self._decoding = None
        self._slots_to_free.append(slot)
        self._free_slots.append(slot)
        abandoned = self._spans.release(sequence)
        sequence.state = state
        if state is State.WAITING:
            self.queue.add(sequence)
        self.tenants.leave_slot(sequence.account)
        for follower in abandoned:
            self.unblock(follower)
