"""Continuous batching with chunked prefill over a span cache."""

from __future__ import annotations

import bisect
import heapq
import time
from dataclasses import dataclass, field
from typing import Callable, Optional

from ..cache import PrefixCache, SpanPool
from ..runtime.plan import DRAW, NewSlot, StepPlan, WorkItem
from .sequence import FinishReason, Sequence, State


# A level of priority is worth so many seconds of waiting, and there are so many levels up and down: whoever has waited
# longer than the highest is worth goes before all that come later.
PRIORITY_SECONDS, PRIORITY_LEVELS = 30.0, 10
# A prompt is short beside another if what is left of it is at most this part of what is left of the other.
SHORT_PART = 4


@dataclass(frozen=True)
class Limits:
    """What one step may hold. `max_chunk`: rows of one prompt in one step."""

    max_batch: int
    max_step_tokens: int
    max_chunk: int
    span_size: int


@dataclass
class Step:
    """A planned step: what the executors get, and which sequence each work item is for, in the same order."""

    plan: StepPlan
    sequences: list[Sequence] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # the position of each item's first row
    admitted: list[Sequence] = field(default_factory=list)  # of `sequences`, those that have just got their slots


@dataclass
class Outcome:
    """What a step did for one sequence that sampled; `index` is its row in the step's results."""

    sequence: Sequence
    token: int
    index: int
    finished: Optional[FinishReason]


@dataclass
class Counters:
    """Totals since the model was started."""

    prompt_tokens: int = 0
    prefix_tokens: int = 0  # of the prompt tokens, those found in the prefix cache
    generated_tokens: int = 0
    computed_rows: int = 0
    preemptions: int = 0
    steps: int = 0


class Scheduler:
    """Waiting and running sequences of one model.

    Order is by arrival, made earlier or later by the priority, everywhere: who is admitted first, whose rows come first
    in a step, and, last to first, who gives up its spans when the cache is full. So the first sequence always advances,
    and nobody starves. Only short prompts do not wait until a long one is computed: they get up to half of its rows.

    A sequence gets the spans of its whole history when it is admitted (so a prompt once begun never gets stuck half
    way), and one more whenever its output has filled the last.
    """

    def __init__(
        self,
        limits: Limits,
        pool: SpanPool,
        prefix_cache: Optional[PrefixCache] = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.limits = limits
        self.pool = pool
        self.prefix_cache = prefix_cache
        self.counters = Counters()
        self._clock = clock
        self._arrivals = 0
        self._entries = 0
        # Two heaps of the same sequences, by rank and by length: (…, entry, sequence). Those that do not wait any more are
        # dropped when met.
        self._waiting: list[tuple[tuple[float, int], int, Sequence]] = []
        self._by_length: list[tuple[int, int, Sequence]] = []
        self._waiting_count = 0
        self._waiting_tokens = 0
        self._departures = 0  # of running sequences
        self._blocked: Optional[tuple[Sequence, int, Optional[bytes]]] = None  # see _still_blocked
        self._running: list[Sequence] = []  # by rank
        self._free_slots = list(range(limits.max_batch - 1, -1, -1))
        self._slots_to_free: list[int] = []  # the executors are told with the next plan
        self._unfit: list[Sequence] = []

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        return self._waiting_count

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the sequences in the queue."""
        return self._waiting_tokens

    @property
    def running(self) -> int:
        """Sequences with a slot."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether there is any sequence to plan for."""
        return bool(self._running) or self._waiting_count > 0

    def spans_for(self, positions: int) -> int:
        """Spans that hold so many positions."""
        return -(-positions // self.limits.span_size)

    def add(self, sequence: Sequence) -> None:
        """Puts a new sequence into the queue."""
        level = max(-PRIORITY_LEVELS, min(sequence.priority, PRIORITY_LEVELS))
        sequence.rank = (self._clock() - PRIORITY_SECONDS * level, self._arrivals)
        self._arrivals += 1
        if self.prefix_cache is not None:
            sequence.root = self.prefix_cache.root(sequence.salt, sequence.prompt_len)
        self._enqueue(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence, whatever its state; its spans and its slot are free at once."""
        if sequence.state is State.WAITING:
            self._leave_queue(sequence, State.ENDED)
        elif sequence.state is State.RUNNING:
            self._leave(sequence, State.ENDED)

    def plan(self, max_cost: Optional[float] = None, price: float = 0.0) -> Optional[Step]:
        """The next step, or None if nothing can be computed. Call `take_unfit` after it.

        `max_cost`: a budget beside the limits' `max_step_tokens`, where a row costs 1 and `price` for each position
        before it. Running sequences always get their next row, and prompts those that the batch leaves.
        """
        limits = self.limits
        budget = limits.max_step_tokens
        cost = 0.0
        preemptions = self.counters.preemptions
        step = Step(StepPlan())

        # Single rows first: nobody who is already streaming waits for somebody's long prompt.
        for sequence in list(self._running):
            if budget == 0:
                break
            if sequence.state is State.RUNNING and len(sequence.tokens) - sequence.computed == 1:
                if self._has_room(sequence):
                    self._schedule(step, sequence, 1)
                    budget -= 1
                    cost += 1 + price * sequence.computed
        may_admit = self.counters.preemptions == preemptions
        prompts = [s for s in self._running if len(s.tokens) - s.computed > 1]
        if max_cost is not None:
            first = prompts[0].computed if prompts else 0
            rows = int((max_cost - cost) / (1 + price * first))
            budget = min(budget, max(rows, limits.max_batch - len(step.sequences), 0))
        if prompts and len(prompts[0].tokens) - prompts[0].computed > budget > 1:
            budget -= self._share_with_short(step, prompts, budget // 2, may_admit)
        for sequence in prompts:
            if budget == 0:
                break
            count = min(len(sequence.tokens) - sequence.computed, limits.max_chunk, budget)
            self._schedule(step, sequence, count)
            budget -= count
        if self._waiting_count and may_admit:
            self._admit(step, budget)
        if not step.sequences:
            return None
        step.plan.free, self._slots_to_free = self._slots_to_free, []
        return step

    def complete(self, step: Step, tokens: list[int]) -> list[Outcome]:
        """Takes the tokens that the step sampled, in the order of its sampling work items."""
        outcomes: list[Outcome] = []
        counters = self.counters
        for item, sequence in zip(step.plan.work, step.sequences):
            sequence.computed += item.rows
            counters.computed_rows += item.rows
            if self.prefix_cache is not None and sequence.computed // self.limits.span_size > sequence.entered:
                self._enter_prefix(sequence)
            if item.flags & DRAW:
                token = tokens[len(outcomes)]
                sequence.tokens.append(token)
                finished = sequence.stop.check(sequence.tokens, sequence.prompt_len)
                if finished is not None:
                    self._leave(sequence, State.ENDED)
                outcomes.append(Outcome(sequence, token, len(outcomes), finished))
        counters.generated_tokens += len(outcomes)
        counters.steps += 1
        return outcomes

    def take_unfit(self) -> list[Sequence]:
        """Sequences that ended because the whole cache is too small for one more of their tokens."""
        unfit, self._unfit = self._unfit, []
        return unfit

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.state = State.WAITING
        self._waiting_count += 1
        self._waiting_tokens += len(sequence.tokens)
        self._entries += 1
        heapq.heappush(self._waiting, (sequence.rank, self._entries, sequence))
        heapq.heappush(self._by_length, (len(sequence.tokens), self._entries, sequence))

    def _leave_queue(self, sequence: Sequence, state: State) -> None:
        sequence.state = state
        self._waiting_count -= 1
        self._waiting_tokens -= len(sequence.tokens)
        for heap in (self._waiting, self._by_length):
            if len(heap) > 2 * self._waiting_count + 64:  # nobody may ever meet those that have left
                heap[:] = [entry for entry in heap if entry[-1].state is State.WAITING]
                heapq.heapify(heap)

    def _leave(self, sequence: Sequence, state: State) -> None:
        """Takes a running sequence's slot and spans away."""
        self._running.remove(sequence)
        self.pool.release(sequence.spans, self._clock())
        self._slots_to_free.append(sequence.slot)
        self._free_slots.append(sequence.slot)
        sequence.lose_cache()
        sequence.state = state
        self._departures += 1

    def _schedule(self, step: Step, sequence: Sequence, count: int) -> None:
        flags = DRAW if sequence.computed + count == len(sequence.tokens) else 0
        item = WorkItem(sequence.slot, count, flags, spans=sequence.spans[sequence.sent_spans :])
        sequence.sent_spans = len(sequence.spans)
        step.plan.work.append(item)
        step.sequences.append(sequence)
        step.starts.append(sequence.computed)

    def _has_room(self, sequence: Sequence) -> bool:
        """Sees to it that the next position has a span, at others' cost if need be. False: it had to leave itself."""
        if sequence.computed < len(sequence.spans) * self.limits.span_size:
            return True
        while True:
            spans = self.pool.allocate(1)
            if spans is not None:
                sequence.spans += spans
                return True
            victim = self._running[-1]
            if victim is sequence and len(self._running) == 1:
                self._leave(sequence, State.ENDED)
                self._unfit.append(sequence)
                return False
            self._leave(victim, State.WAITING)
            victim.preemptions += 1
            self.counters.preemptions += 1
            self._enqueue(victim)
            if victim is sequence:
                return False

    def _admit(self, step: Step, budget: int) -> None:
        """Moves waiting sequences, in order, into free slots, as long as their spans and the budget suffice."""
        held_back = []
        while self._waiting and self._free_slots and budget > 0:
            entry = heapq.heappop(self._waiting)
            sequence = entry[-1]
            if sequence.state is not State.WAITING:
                continue
            if self._leader_is_computing(sequence):
                held_back.append(entry)
                continue
            if self._still_blocked(sequence) or not self._take_spans(sequence):
                held_back.append(entry)
                break
            budget -= self._start(step, sequence, budget)
        for entry in held_back:
            heapq.heappush(self._waiting, entry)

    def _share_with_short(self, step: Step, prompts: list[Sequence], room: int, may_admit: bool) -> int:
        """Gives up to `room` rows to prompts that are short beside the first of `prompts`, and takes out of these those
        that got some; waiting ones may be admitted for it. Returns how many rows they got."""
        limit, left = (len(prompts[0].tokens) - prompts[0].computed) // SHORT_PART, room
        for sequence in prompts[1:]:
            rest = len(sequence.tokens) - sequence.computed
            if rest <= limit and left > 0:
                count = min(rest, self.limits.max_chunk, left)
                self._schedule(step, sequence, count)
                left -= count
                prompts.remove(sequence)
        # Nobody overtakes a sequence that waits for spans: it would wait for those of the newcomers too.
        held_back = []
        while may_admit and self._by_length and self._free_slots and left > 0:
            if self._blocked is not None and self._still_blocked(self._blocked[0]):
                break
            length, _, sequence = entry = self._by_length[0]
            if length > limit:
                break
            heapq.heappop(self._by_length)
            if sequence.state is not State.WAITING:
                continue
            if self._leader_is_computing(sequence) or not self._take_spans(sequence):
                held_back.append(entry)
                continue
            left -= self._start(step, sequence, left)
        for entry in held_back:
            heapq.heappush(self._by_length, entry)
        return room - left

    def _start(self, step: Step, sequence: Sequence, budget: int) -> int:
        """Moves a waiting sequence that has its spans into a slot; returns how many rows it gets."""
        self._leave_queue(sequence, State.RUNNING)
        sequence.slot = self._free_slots.pop()
        bisect.insort(self._running, sequence, key=_rank_of)
        step.admitted.append(sequence)
        step.plan.new.append(NewSlot(sequence.slot, list(sequence.tokens), sequence.sampling, sequence.computed))
        count = min(len(sequence.tokens) - sequence.computed, self.limits.max_chunk, budget)
        self._schedule(step, sequence, count)
        return count

    def _still_blocked(self, sequence: Sequence) -> bool:
        """Whether there were too few spans for it, and nothing has changed that: only a departure makes spans
        available, and the prefix that was found can only have grown if the key that came next is known now."""
        if self._blocked is None or self._blocked[0] is not sequence:
            return False
        _, departures, key = self._blocked
        changed = departures != self._departures or (key is not None and key in self.prefix_cache)
        return sequence.state is State.WAITING and not changed

    def _leader_is_computing(self, sequence: Sequence) -> bool:
        """True while another sample of the same prompt computes spans that this one can then share."""
        leader = sequence.leader
        if leader is None or self.prefix_cache is None or leader.state is not State.RUNNING:
            return False
        size = self.limits.span_size
        return leader.computed < (sequence.prompt_len - 1) // size * size

    def _take_spans(self, sequence: Sequence) -> bool:
        """Shared spans from the prefix cache and new ones for the rest of the history; False if there are too few."""
        length = len(sequence.tokens)
        shared: list[int] = []
        self._blocked = next_key = None
        if self.prefix_cache is not None:
            # At least one row must be computed, or there would be nothing to sample from.
            full = (length - 1) // self.limits.span_size
            self.prefix_cache.extend(sequence.keys, sequence.root, sequence.tokens, full)
            shared = self.prefix_cache.match(sequence.keys[:full])
            next_key = sequence.keys[len(shared)] if len(shared) < full else None
            self.pool.acquire(shared)
        needed = self.spans_for(length) - len(shared)
        # One span to spare for each running sequence, lest the newcomer be preempted at once.
        if needed + len(self._running) > self.pool.available:
            self.pool.release(shared, self._clock())
            if not self._running:  # the whole cache is not enough
                self._leave_queue(sequence, State.ENDED)
                self._unfit.append(sequence)
            else:
                self._blocked = (sequence, self._departures, next_key)
            return False
        sequence.spans = shared + self.pool.allocate(needed)
        sequence.entered = len(shared)
        sequence.computed = len(shared) * self.limits.span_size
        if sequence.prefix_len is None:
            sequence.prefix_len = sequence.computed
            self.counters.prompt_tokens += sequence.prompt_len
            self.counters.prefix_tokens += sequence.computed
        return True

    def _enter_prefix(self, sequence: Sequence) -> None:
        full = sequence.computed // self.limits.span_size
        self.prefix_cache.extend(sequence.keys, sequence.root, sequence.tokens, full)
        for index in range(sequence.entered, full):
            self.prefix_cache.enter(sequence.keys[index], sequence.spans[index])
        sequence.entered = full


def _rank_of(sequence: Sequence) -> tuple[float, int]:
    return sequence.rank
