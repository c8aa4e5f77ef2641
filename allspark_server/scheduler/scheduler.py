"""Continuous batching with chunked prefill over a span cache, planned before the last step's results are known."""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Callable
from operator import attrgetter

import numpy as np

from ..cache import PrefixCache, SpanPool
from ..runtime.plan import DRAW, MAX_STEP_DRAFTS, NewSlot, WorkTable
from .prompt_outputs import PromptOutputReader
from .sequence import TOKEN_BYTES, FinishReason, Sequence, State
from .slots import SlotTable
from .spans import SequenceSpans, Taken
from .speculation import DraftLengths
from .step import Counters, Limits, Outcome, Step
from .step_builder import NOBODY, StepBuilder
from .tenants import Account, Tenants
from .token_budget import TokenBudget
from .waiting_queue import WaitingQueue

# A level of priority is worth so many seconds of waiting, and there are so many levels up and down: whoever has waited
# longer than the highest is worth goes before all that come later.
PRIORITY_SECONDS, PRIORITY_LEVELS = 30.0, 10
# A prompt is short beside another if what is left of it is at most this part of what is left of the other.
SHORT_PART = 4
# Prompts get so many rows of a step at least, or what costs as much.
FEWEST_ROWS = 4
# Of the rows beside a long prompt, short ones get their part only if their tenant had at most so many more, in steps.
BURST_STEPS = 4

_rank_of, _turn_of = attrgetter("rank"), attrgetter("turn")

class Scheduler:
    """Waiting and running sequences of one model.

    Tenants take turns: whoever had the fewest rows so far is admitted first and has its prompt's rows first in a step.
    Of one tenant order is by arrival, made earlier or later by the priority. Who gives up its spans when the cache is
    full is the last one of the tenant that has most of them, and never the first of all: so that one always advances,
    and nobody starves. Only short prompts do not wait until a long one is computed: they get up to half of its rows.

    What a running sequence computes is not computed by another one as well: that one waits until it is there.
    A sequence gets the spans of its whole history when it is admitted (so a prompt once begun never gets stuck half
    way), and one more whenever its output may have filled the last.

    A step is planned before the results of those before it are completed. The ranks append what they draw by
    themselves; here only the most that a history can hold is known, and spans are given for that. No row is planned
    that could pass a sequence's maximum length. Results of sequences that have ended meanwhile are discarded;
    those of preempted ones are kept. Only accepted positions of completed steps enter the prefix cache.
    """

    def __init__(
        self,
        limits: Limits,
        pool: SpanPool,
        prefix_cache: PrefixCache | None = None,
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
        self._restoring: list[Sequence] = []  # those that wait for more of the host cache's spans
        self.active: list[Sequence] = []  # by rank
        self._prompts: list[Sequence] = []  # of these, those that have rows of their history left to plan; by rank
        self._decoding: list[Sequence] | None = []  # the others; None: to be listed anew. Steps share the list
        self._decoding_slots = NOBODY
        self._windowed = any(limits.windows)
        watched = prefix_cache is not None or self._windowed
        self._slots = SlotTable(limits.max_batch, limits.span_size, watched, limits.anew_beyond)
        self._drafts = DraftLengths(limits.max_batch, limits.max_drafts) if limits.draft_kind else None
        self._free_slots = list(range(limits.max_batch - 1, -1, -1))
        self._slots_to_free: list[int] = []  # the ranks are told with the next plan
        self._unfit: list[Sequence] = []
        self._mask_rows = 0  # where those of the last step begin

    @property
    def waiting(self) -> int:
        """Sequences in the queue, those that are blocked included."""
        return self.queue.waiting + self.queue.blocked

    @property
    def waiting_bytes(self) -> int:
        """What the sequences in the queue take in this process."""
        return self.queue.bytes

    @property
    def blocked(self) -> int:
        """Sequences in the queue that wait for something else than a slot and spans."""
        return self.queue.blocked

    @property
    def running(self) -> int:
        """Sequences with a slot."""
        return len(self.active)

    @property
    def has_work(self) -> bool:
        """Whether there is any sequence to plan for."""
        return bool(self.active or self._restoring) or self.queue.waiting > 0

    def add(self, sequence: Sequence) -> None:
        """Puts a new sequence into the queue."""
        level = max(-PRIORITY_LEVELS, min(sequence.priority, PRIORITY_LEVELS))
        sequence.rank = (self._clock() - PRIORITY_SECONDS * level, self._arrivals)
        self._arrivals += 1
        if self.prefix_cache is not None and not sequence.root:
            sequence.root = self.prefix_cache.keys.root(sequence.salt, sequence.prompt_len, len(sequence.tokens))
        self.queue.add(sequence)

    def block(self, sequence: Sequence, reason: str) -> None:
        """From now on the sequence, unless it has ended, waits for something outside; its place in the order stays."""
        if sequence.state in (State.ENDED, State.BLOCKED):
            return
        sequence.blocked_on = reason
        if sequence.state is State.RUNNING:
            self._leave(sequence, State.WAITING)
        else:
            self.queue.block(sequence)

    def unblock(self, sequence: Sequence) -> None:
        """What the sequence waited for is there. Nothing happens if it does not wait for anything."""
        sequence.blocked_on, sequence.awaited = "", None
        if sequence.state is State.BLOCKED:
            self.queue.unblock(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence, whatever its state; its spans and its slot are free at once."""
        if sequence.state is State.RUNNING:
            self._leave(sequence, State.ENDED)
        elif sequence.state is not State.ENDED:
            self.queue.remove(sequence, State.ENDED)

    def plan(self, cost: TokenBudget | None = None) -> Step | None:
        """The next step, or None if nothing can be computed before the results of steps that run. Call `take_unfit`
        after it. `cost` limits it, too; running sequences always get their next row, and prompts a few.
        """
        limits = self.limits
        self._spans.begin_step(not self.active)
        if self._restoring:
            restoring, self._restoring = self._restoring, []
            for sequence in restoring:
                self.unblock(sequence)
        if self.queue.waiting and not self._free_slots and len(self.tenants) > 1:
            self._share_slots()
        preemptions = self.counters.preemptions
        self._cover_prompts()
        builder = StepBuilder(len(limits.windows))
        # Single rows first: nobody who is already streaming waits for somebody's long prompt.
        self._plan_decoding(builder)
        may_admit = self.counters.preemptions == preemptions
        budget = limits.max_step_tokens - builder.rows
        if self._drafts is not None or builder.guided:
            budget -= int(builder.drafts.sum())
        prompts = sorted(self._prompts, key=_turn_of) if self._prompts else []
        if cost is not None:
            left = cost.for_prompts(builder.rows, builder.context, len(prompts) + self.queue.waiting)
            rows = max(left, FEWEST_ROWS) / (1 + cost.price * (prompts[0].planned if prompts else 0))
            budget = int(min(budget, max(rows, 1)))
        if prompts and len(prompts[0].tokens) - prompts[0].planned > budget > 1:
            budget -= self._share_with_short(builder, prompts, budget // 2, may_admit)
        if prompts or (self._free_slots and self.queue.waiting):
            self._plan_prompts(builder, prompts, budget, may_admit)
        copies = self._spans.take_copies()
        if not builder.rows and copies is None:
            return None
        return self._step(builder, copies)

    def _step(self, builder: StepBuilder, copies) -> Step:
        free, self._slots_to_free = self._slots_to_free, []
        self._mask_rows = self.limits.masks - self._mask_rows  # those of the last step may still be in use
        return builder.step(free, self._slots, self.limits.draft_kind, copies, self._mask_rows)

    def complete(self, step: Step, result) -> Outcome:
        """Takes the StepResult of the oldest step that was planned and not completed."""
        table, counters = self._slots, self.counters
        reader, prompt_rows, computed = PromptOutputReader(step, result), [], []
        for index in range(step.decoding, len(step.sequences)):
            sequence, slot = step.sequences[index], int(step.work.columns[WorkTable.SLOT, index])
            here = sequence.slot == slot and bool(table.epoch[slot] == step.epochs[index])
            if sequence.prompt_outputs is not None and (found := reader.take(index, sequence, sequence.computed, here)):
                prompt_rows.append(found)
            if here:
                sequence.computed += int(step.work.columns[WorkTable.ROWS, index])
                self._advance(sequence)
                if not sequence.draws and sequence.computed == len(sequence.tokens):
                    computed.append(sequence)
                    self._leave(sequence, State.ENDED)
        counts, tokens = result.counts, result.tokens
        several = len(tokens) != len(counts)
        drew, epochs, slots = step.sequences, step.epochs, step.work.columns[WorkTable.SLOT]
        if len(step.drawing) != len(drew):
            drew = [drew[i] for i in step.drawing.tolist()]
            epochs, slots = epochs[step.drawing], slots[step.drawing]
        first = np.cumsum(counts) - counts if several else np.arange(len(counts))
        outcome = Outcome(drew, first, counts.copy(), prompt_rows=prompt_rows, computed=computed)
        alive = table.epoch[slots] == epochs
        live = slots[alive]
        table.pending[live] -= 1
        if self._drafts is not None or step.masked:
            drafts = step.work.columns[WorkTable.DRAFTS, step.drawing]
            table.longest[live] -= (drafts + 1 - counts)[alive]
            if self._drafts is not None:
                own = alive & ~table.guided[slots]
                self._drafts.learn(slots[own], result.drafted[own], counts[own] - 1)  # fewer may have been found
            counters.drafted_tokens += int(result.drafted.sum())
            counters.accepted_tokens += len(tokens) - len(counts)
        plain = alive & ~table.careful[slots]
        if result.status.any():
            plain[np.repeat(np.arange(len(counts)), counts)[result.status != 0]] = False
        if not several and plain.all():
            self._take_each(outcome, None, slots, tokens)
        else:
            self._take_plain(outcome, plain.nonzero()[0], counts, slots, tokens)
            for index in (~plain).nonzero()[0].tolist():
                drawn = slice(int(first[index]), int(first[index] + counts[index]))
                self._take(outcome, index, tokens[drawn].tolist(), result.status[drawn].tolist(), bool(alive[index]))
        counters.computed_rows += step.rows + len(tokens) - len(counts)
        counters.generated_tokens += int(outcome.kept.sum())
        if step.copies is not None:
            counters.saved_spans += len(step.copies.saved)
            counters.restored_spans += len(step.copies.restored)
        counters.steps += 1
        return outcome

    def take_unfit(self) -> list[Sequence]:
        """Sequences that ended because the whole cache is too small for one more of their tokens."""
        unfit, self._unfit = self._unfit, []
        return unfit

    # --- results ---

    def _take_plain(
        self, outcome: Outcome, indices: np.ndarray, counts: np.ndarray, slots: np.ndarray, tokens: np.ndarray
    ) -> None:
        """All tokens of many running sequences: the first of each, then the second of each that has one, and so on."""
        turn = 0
        while len(indices):
            ended = self._take_each(outcome, indices, slots[indices], tokens[outcome.first[indices] + turn])
            turn += 1
            if ended.any():
                gone = indices[ended]
                outcome.kept[gone] = turn
                self.counters.discarded_rows += int((counts[gone] - turn).sum())
                indices = indices[~ended]
            indices = indices[counts[indices] > turn]

    def _take_each(
        self, outcome: Outcome, indices: np.ndarray | None, slots: np.ndarray, tokens: np.ndarray
    ) -> np.ndarray:
        """One token for each of many running sequences: those of `indices`, None for all that drew. Returns whether it
        has ended them.
        """
        table = self._slots
        at = table.tail_length[slots]
        table.tail[slots, at] = tokens
        table.tail_length[slots] = at + 1
        length = table.length[slots] + 1
        table.length[slots] = length
        eos = (table.eos[slots] == tokens[:, None]).any(axis=1)
        ended = eos | (length >= table.limit[slots])
        full = (length > table.span_end[slots]) | (at + 1 == table.TAIL)
        for k in (ended | full).nonzero()[0].tolist():
            index = k if indices is None else int(indices[k])
            sequence = outcome.sequences[index]
            if full[k]:
                table.settle(sequence)
                self._advance(sequence)
            if ended[k] and not eos[k] and length[k] < sequence.stop.max_length:
                self._leave(sequence, State.WAITING)  # to be computed anew
            elif ended[k]:
                outcome.ended.append((index, FinishReason.STOP if eos[k] else FinishReason.LENGTH))
                self._leave(sequence, State.ENDED)
        return ended

    def _take(self, outcome: Outcome, index: int, tokens: list[int], status: list[int], alive: bool) -> None:
        """The tokens of one sequence, whatever became of it. `alive`: it still has the slot that it drew in."""
        sequence = outcome.sequences[index]
        if not alive:
            sequence.in_flight -= 1
        if sequence.state is State.ENDED:
            outcome.kept[index] = 0
            self.counters.discarded_rows += len(tokens)
            return
        if alive:
            self._slots.settle(sequence)
        reason, kept = None, 0
        while reason is None and kept < len(tokens) and status[kept] == 0:
            sequence.tokens.append(tokens[kept])
            kept += 1
            reason = sequence.stop.check(sequence.tokens, sequence.prompt_len)
        outcome.kept[index] = kept
        self.counters.discarded_rows += len(tokens) - kept
        if reason is None and kept < len(tokens):
            outcome.failed.append(index)
        if alive:
            self._slots.length[sequence.slot] += kept
            sequence.computed = len(sequence.tokens) - 1
            self._advance(sequence)
        else:
            self.queue.note_growth(sequence, kept * TOKEN_BYTES)
        if reason is not None:
            outcome.ended.append((index, reason))
        if reason is not None or kept < len(tokens):
            self.cancel(sequence)
        elif alive and len(sequence.tokens) >= self._slots.limit[sequence.slot]:
            self._leave(sequence, State.WAITING)  # to be computed anew

    def _advance(self, sequence: Sequence) -> None:
        """More of its positions are computed: what is full can be found, and what windows have left behind is free."""
        ready = self._spans.enter(sequence)
        if self._windowed and self._spans.slide(sequence):
            self._slots.note_spans(sequence)
        if ready is not None or self._windowed:
            self._slots.note_computed(sequence)
        for follower in ready or ():
            self.unblock(follower)

    # --- running sequences ---

    def _plan_decoding(self, builder: StepBuilder) -> None:
        """A row for each sequence whose history the ranks have, unless its maximum length may have been reached."""
        table, budget = self._slots, self.limits.max_step_tokens
        if self._decoding is None:
            prompts = set(map(id, self._prompts))
            self._decoding = [sequence for sequence in self.active if id(sequence) not in prompts]
            self._decoding_slots = np.array([sequence.slot for sequence in self._decoding], np.int64)
        sequences, slots = self._decoding, self._decoding_slots
        longest = table.longest[slots]
        chosen = longest < table.limit[slots]
        if len(slots) > budget:
            chosen &= np.cumsum(chosen) <= budget
        if not chosen.all():
            sequences = [sequences[i] for i in np.flatnonzero(chosen).tolist()]
            slots, longest = slots[chosen], longest[chosen]
        drafts = self._choose_drafts(builder, sequences, slots, longest, budget)
        short = (longest + drafts > table.capacity[slots]).nonzero()[0]
        if len(short):
            sequences, slots, longest, drafts = self._make_room(builder, short, sequences, slots, longest, drafts)
        table.longest[slots] = longest + 1 + drafts
        table.pending[slots] += 1
        if len(self.tenants) > 1:  # nobody is compared with the only one
            self.tenants.charge_slots(slots)
        builder.sequences, builder.slots, builder.drafts = sequences, slots, drafts
        builder.rows += len(slots)
        builder.context += int(longest.sum()) - len(slots)

    def _choose_drafts(self, builder: StepBuilder, sequences: list[Sequence], slots: np.ndarray, longest: np.ndarray,
                       budget: int) -> np.ndarray:
        """How many drafts each gets: none may pass its maximum length, and prompts keep half of the rows. Guided ones
        get what is known to follow, and nothing else.
        """
        if self._drafts is None and not self._slots.any_guided:
            return np.zeros(len(slots), np.int64)
        guided = self._slots.guided[slots].nonzero()[0].tolist()
        drafts = np.zeros(len(slots), np.int64) if self._drafts is None else self._drafts.choose(slots)
        for i in guided:
            forced = builder.forced[int(slots[i])] = sequences[i].guidance.forced_after(int(longest[i]))
            drafts[i] = len(forced)
        builder.guided = builder.guided or bool(guided)
        drafts = np.minimum(drafts, self._slots.limit[slots] - longest - 1)
        left = budget - len(slots)
        if self._prompts or self.queue.waiting:
            left //= 2
        left = min(left, MAX_STEP_DRAFTS)
        if drafts.sum() > left:
            drafts[np.cumsum(drafts) > left] = 0
        return drafts

    def _make_room(self, builder: StepBuilder, short: np.ndarray, sequences: list[Sequence], slots: np.ndarray,
                   longest: np.ndarray, drafts: np.ndarray) -> tuple:
        """Gives spans to those that are short of them, to some at the cost of others; returns who is left, as given."""
        given: dict[int, list[list[int]]] = {}  # of each cache group
        keep = np.ones(len(slots), bool)
        for i in short.tolist():
            sequence = sequences[i]
            if sequence.state is not State.RUNNING:  # it gave way to another
                continue
            positions = int(longest[i])
            if drafts[i] and not self._extend(sequence, positions + int(drafts[i])):
                drafts[i] = 0  # nobody gives way to drafts
            if not self._has_room(sequence, positions):
                keep[i] = False
                continue
            given[i] = sequence.take_unsent()
        counts = np.zeros(len(slots), np.int64)
        counts[list(given)] = [len(spans[0]) for spans in given.values()]
        if self._decoding is None or not keep.all():  # somebody has left, with or without what it was given
            keep &= np.fromiter((sequence.state is State.RUNNING for sequence in sequences), bool, len(slots))
            sequences = [sequences[i] for i in np.flatnonzero(keep).tolist()]
            slots, longest, drafts, counts = slots[keep], longest[keep], drafts[keep], counts[keep]
            given = {i: spans for i, spans in given.items() if keep[i]}
        builder.span_counts = counts
        groups = range(len(builder.spans))
        builder.spans = [[span for spans in given.values() for span in spans[group]] for group in groups]
        return sequences, slots, longest, drafts

    def _extend(self, sequence: Sequence, positions: int) -> bool:
        """Gives the sequence the spans of so many positions, if there are enough."""
        if not self._spans.extend(sequence, positions):
            return False
        self._slots.note_spans(sequence)
        return True

    def _has_room(self, sequence: Sequence, positions: int) -> bool:
        """Sees to it that so many positions have spans, at others' cost if need be. False: it had to leave itself, or
        must wait for what it drew.
        """
        while not self._extend(sequence, positions):
            victim = self._last_of_the_largest()
            if victim is sequence and len(self.active) == 1:
                if self._slots.pending[sequence.slot] == 0:
                    self._leave(sequence, State.ENDED)
                    self._unfit.append(sequence)
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _last_of_the_largest(self) -> Sequence:
        """Of the tenant with most spans, the last that runs; never the first of all, unless it is the only one."""
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
        """All slots are taken: the tenant that has the most of them gives one to the tenant whose turn it is, if that
        one has less than its share. Spans of who gives way stay in the prefix cache.
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
        """Takes a running sequence's slot and spans away. Unless it has ended it is in the queue then."""
        table, slot = self._slots, sequence.slot
        table.settle(sequence)
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

    def _plan_chunk(self, builder: StepBuilder, sequence: Sequence, count: int) -> int:
        """Up to `count` more rows of a history, as far as there are spans for them; returns how many."""
        begin = sequence.planned
        count, flags = builder.add_chunk(sequence, min(count, int(self._slots.capacity[sequence.slot]) - begin))
        self._spans.before_writes(sequence, begin)
        self.tenants.serve(sequence.account, count)
        if flags & DRAW:
            self._slots.longest[sequence.slot] += 1
            self._slots.pending[sequence.slot] += 1
            builder.guided = builder.guided or sequence.guidance is not None
        if sequence.planned == len(sequence.tokens):
            self._prompts.remove(sequence)
            self._decoding = None
        return count

    # --- prompts ---

    def _cover_prompts(self) -> None:
        """Sees to it that prompts have spans for their next rows. Groups with windows have them for a part of a prompt,
        and what they leave behind is not free if others have it too.
        """
        for sequence in list(self._prompts) if self._windowed else ():
            end = min(len(sequence.tokens), sequence.planned + self.limits.max_chunk)
            if sequence.state is not State.RUNNING or self._extend(sequence, end):
                continue
            if self._slots.capacity[sequence.slot] <= sequence.planned == sequence.computed:
                self._has_room(sequence, sequence.planned + 1)

    def _plan_prompts(self, builder: StepBuilder, prompts: list[Sequence], budget: int, may_admit: bool) -> None:
        """Gives `budget` rows to prompts, those in slots and waiting ones as it is their tenants' turn. A waiting one
        whose spans do not suffice is not overtaken, unless by short ones.
        """
        aside = []
        prompts = prompts[::-1]
        while budget > 0:
            waiting = self.queue.first() if may_admit and self._free_slots and self.queue.waiting else None
            if prompts and (waiting is None or prompts[-1].turn[0] <= waiting.account.time):
                sequence = prompts.pop()
                count = min(len(sequence.tokens) - sequence.planned, self.limits.max_chunk, budget)
                budget -= self._plan_chunk(builder, sequence, count)
            elif waiting is None:
                break
            elif waiting.in_flight:
                aside.append(self.queue.set_aside(waiting))
            elif self._spans.short is not waiting and self._take_spans(waiting):
                budget -= self._start(builder, waiting, budget)
            elif waiting.state is State.WAITING:
                may_admit = False
                last = waiting.account.time + BURST_STEPS * self.limits.max_step_tokens
                budget -= self._admit_short(builder, len(waiting.tokens) // SHORT_PART, budget, last)
        for sequence in aside:
            self.queue.put_back(sequence)

    def _share_with_short(self, builder: StepBuilder, prompts: list[Sequence], room: int, may_admit: bool) -> int:
        """Gives up to `room` rows to prompts that are short beside the first of `prompts`, and takes out of these those
        that got some; waiting ones may be admitted for it. Returns how many rows they got.
        """
        limit, left = (len(prompts[0].tokens) - prompts[0].planned) // SHORT_PART, room
        last = prompts[0].turn[0] + BURST_STEPS * self.limits.max_step_tokens
        for sequence in prompts[1:]:
            rest = len(sequence.tokens) - sequence.planned
            if rest <= limit and left > 0 and sequence.turn[0] <= last:
                left -= self._plan_chunk(builder, sequence, min(rest, self.limits.max_chunk, left))
                prompts.remove(sequence)
        if may_admit and left > 0:
            left -= self._admit_short(builder, limit, left, last)
        return room - left

    def _admit_short(self, builder: StepBuilder, limit: int, room: int, last: float) -> int:
        """Admits waiting prompts of at most `limit` tokens, for up to `room` rows, of tenants whose time is at most
        `last`. Returns how many rows they got.
        """
        left, aside = room, []
        while left > 0 and self._free_slots and (entry := self.queue.pop_shortest(limit)) is not None:
            sequence = entry[-1]
            if sequence.account.time > last:  # it must wait for its tenant's turn, from now on
                continue
            aside.append(entry)
            if sequence.in_flight:
                continue
            if not self._spans.has_room_beside(sequence, len(self.active)):
                break
            if self._take_spans(sequence):
                left -= self._start(builder, sequence, left)
                self._spans.note_overtaking(sequence)
        for entry in aside:
            if entry[-1].state is State.WAITING:
                self.queue.put_back_shortest(entry)
        return room - left

    def _start(self, builder: StepBuilder, sequence: Sequence, budget: int) -> int:
        """Moves a waiting sequence that has its spans into a slot; returns how many rows it gets."""
        self.queue.remove(sequence, State.RUNNING)
        sequence.slot = self._free_slots.pop()
        self.tenants.enter_slot(sequence.account, sequence.slot)
        self._slots.start(sequence)
        if self._drafts is not None:
            self._drafts.start(sequence.slot)
        bisect.insort(self.active, sequence, key=_rank_of)
        bisect.insort(self._prompts, sequence, key=_rank_of)
        builder.admitted.append(sequence)
        builder.new.append(NewSlot(sequence.slot, sequence.tokens, sequence.sampling, sequence.planned))
        count = min(len(sequence.tokens) - sequence.planned, self.limits.max_chunk, budget)
        return self._plan_chunk(builder, sequence, count)

    def _take_spans(self, sequence: Sequence) -> bool:
        """Gives a waiting sequence its spans. False if there are too few; or if some are to come, for which it is
        blocked then.
        """
        # One span to spare for each running sequence, lest the newcomer be preempted at once.
        taken = self._spans.take(sequence, len(self.active))
        if taken is Taken.PENDING:
            self.block(sequence, "spans that another request computes")
        elif taken is Taken.RESTORING:
            self.block(sequence, "spans of the host cache")
            self._restoring.append(sequence)
        elif taken is Taken.SHORT and not self.active:  # the whole cache is not enough
            self.queue.remove(sequence, State.ENDED)
            self._unfit.append(sequence)
        elif taken is Taken.YES and sequence.prefix_len is None:
            sequence.prefix_len = sequence.computed
            self.counters.prompt_tokens += sequence.prompt_len
            self.counters.prefix_tokens += sequence.computed
            self.counters.restored_tokens += sequence.restored
        return taken is Taken.YES
