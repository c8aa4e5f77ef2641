"""Continuous batching with chunked prefill over a span cache, planned before the last step's results are known."""

from __future__ import annotations

import bisect
import functools
from operator import attrgetter

import numpy as np

from ..cache import Copies, StateCopies
from ..runtime.plan import MAX_STEP_DRAFTS, SAMPLE, NewSlot
from .completion import Completion
from .sequence import Sequence, State
from .spans import Taken
from .step import Step
from .step_builder import StepBuilder
from .token_budget import TokenBudget

# A prompt counts as short if it has at most 1 / SHORT_PART as many uncomputed tokens as the prompt it would overtake.
SHORT_PART = 4
# The least number of rows that prompts get in a step, or the least cost of their rows.
FEWEST_ROWS = 4
# A short prompt takes rows from a long one only if its tenant is at most this many full steps ahead.
BURST_STEPS = 4

_order_of, _turn_of = attrgetter("order"), attrgetter("turn")


class Scheduler(Completion):
    """Plans the steps of one model.

    Tenants take turns: the tenant with the fewest rows so far is admitted first, and its prompts get rows first. Within
    a tenant, sequences are ordered by arrival time, adjusted by priority. If the cache is full, the last sequence of
    the tenant with the most spans is preempted. The first sequence of all is never preempted, so it always advances and
    no sequence starves. Short prompts do not wait for a long prompt: they get up to half of its rows.

    A sequence does not recompute a prefix that a running sequence is computing: it waits until that prefix is cached.
    An admitted sequence gets the spans of its whole history at once, so a prompt that has begun never stops halfway. It
    gets further spans as its output grows.

    A step is planned before the results of earlier steps are known. The ranks append sampled tokens to the histories
    themselves. The scheduler knows the greatest possible length of each history and allocates spans for it. It plans no
    row beyond a sequence's maximum length. Results of preempted sequences are kept. Only accepted positions of
    completed steps enter the prefix cache.
    """

    def plan(self, cost: TokenBudget | None = None) -> Step | None:
        """The next step; None if nothing can be computed before the results of running steps. Call `take_oversized`
        after it. `cost` is a further limit, but running sequences always get their next row, and prompts a few rows.
        """
        limits = self.limits
        self._spans.begin_step(len(self.active))
        if self._restoring:
            restoring, self._restoring = self._restoring, []
            for sequence in restoring:
                self.unblock(sequence)
        if self.queue.waiting and not self._free_slots and len(self.tenants) > 1:
            self._share_slots()
        preemptions = self.counters.preemptions
        self._cover_prompts()
        builder = StepBuilder(len(limits.windows))
        # Single rows first: sequences that stream do not wait for long prompts.
        self._plan_decoding(builder)
        may_admit = self.counters.preemptions == preemptions and self._may_admit()
        budget = limits.max_step_tokens - builder.rows
        if self._drafts is not None or builder.guided or builder.predicted:
            budget -= int(builder.drafts.sum())
        prompts = sorted((s for s in self._prompts if s is not self.alone), key=_turn_of) if self._prompts else []
        if cost is not None:
            left = cost.for_prompts(builder.rows, builder.context, len(prompts) + self.queue.waiting)
            planned = prompts[0].planned if prompts else 0
            rows = max(left, FEWEST_ROWS) / (1 + cost.price * planned)
            budget = int(min(budget, max(rows, 1), cost.most_rows(builder.rows, planned)))
        if prompts and len(prompts[0].tokens) - prompts[0].planned > budget > 1:
            budget -= self._share_with_short(builder, prompts, budget // 2, may_admit)
        if limits.whole:
            self._plan_whole(builder)
        elif prompts or (self._free_slots and self.queue.waiting):
            self._plan_prompts(builder, prompts, budget, may_admit)
        copies, states = self._spans.take_copies(), self._spans.take_states()
        if not builder.rows and copies is None and states is None:
            return None
        return self._step(builder, copies, states)

    def _may_admit(self) -> bool:
        """Whether waiting sequences may get slots."""
        return True

    def _step(self, builder: StepBuilder, copies: Copies | None, states: StateCopies | None) -> Step:
        free, self._slots_to_free = self._slots_to_free, []
        self._mask_rows = self.limits.masks - self._mask_rows  # the rows of the last step may still be in use
        return builder.step(free, self._slots, self.limits.draft_kind, copies, self._mask_rows, states)

    def _plan_decoding(self, builder: StepBuilder) -> None:
        """Plans a row for each sequence in decode, unless it may have reached its maximum length."""
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
        if len(self.tenants) > 1:  # one tenant needs no comparison
            self.tenants.charge_slots(slots)
        builder.sequences, builder.slots, builder.drafts = sequences, slots, drafts
        builder.rows += len(slots)
        builder.context += int(longest.sum()) - len(slots)

    def _choose_drafts(self, builder: StepBuilder, sequences: list[Sequence], slots: np.ndarray, longest: np.ndarray,
                       budget: int) -> np.ndarray:
        """The number of drafts of each sequence. Drafts do not exceed the sequence's maximum length and leave half of
        the rows to prompts. Where masks constrain a sequence, it gets only tokens that its grammar forces. While the
        output of a sequence follows a prediction, it gets that one's.
        """
        if self._drafts is None and not self._slots.any_guided and not self._slots.any_predicted:
            return np.zeros(len(slots), np.int64)
        drafts = np.zeros(len(slots), np.int64) if self._drafts is None else self._drafts.choose(slots)
        if len(guided := self._slots.guided[slots].nonzero()[0]):
            builder.guided = True
            own = drafts[guided].tolist()
            for n, (i, length) in enumerate(zip(guided.tolist(), longest[guided].tolist())):
                guidance = sequences[i].guidance
                assert guidance is not None
                if (free := guidance.first_masked - length) > 0:
                    own[n] = min(own[n], free - 1)
                    continue
                forced = guidance.forced_after(length)
                own[n] = len(forced)
                if forced:
                    builder.given[sequences[i].slot] = forced
            drafts[guided] = own
        if self._slots.any_predicted and len(predicted := self._slots.predicted[slots].nonzero()[0]):
            self._predict(builder, sequences, slots, longest, drafts, predicted)
        drafts = np.minimum(drafts, self._slots.limit[slots] - longest - 1)
        left = budget - len(slots)
        if self._prompts or self.queue.waiting:
            left //= 2
        left = min(left, MAX_STEP_DRAFTS)
        if drafts.sum() > left:
            drafts[np.cumsum(drafts) > left] = 0
        return drafts

    def _predict(self, builder: StepBuilder, sequences: list[Sequence], slots: np.ndarray, longest: np.ndarray,
                 drafts: np.ndarray, predicted: np.ndarray) -> None:
        """Takes drafts for the sequences at indices `predicted` from their predictions; sets their numbers."""
        table = self._slots
        own = slots[predicted]
        columns = (predicted, table.length[own], longest[predicted], table.pending[own], self._predicted.choose(own))
        for i, length, end, planned, most in zip(*(column.tolist() for column in columns)):
            sequence = sequences[i]
            assert sequence.prediction is not None
            known_from = functools.partial(table.known_from, sequence)
            if most and (found := sequence.prediction.drafts(known_from, length, end, planned, most)):
                builder.given[sequence.slot] = found
                builder.predicted = True
                drafts[i] = len(found)

    def _make_room(self, builder: StepBuilder, short: np.ndarray, sequences: list[Sequence], slots: np.ndarray,
                   longest: np.ndarray, drafts: np.ndarray) -> tuple:
        """Gives spans to the sequences at indices `short`, preempting others if necessary. Returns the sequences,
        slots, longest lengths and drafts that are left.
        """
        given: dict[int, list[list[int]]] = {}  # of each cache group
        keep = np.ones(len(slots), bool)
        for i in short.tolist():
            sequence = sequences[i]
            if sequence.state is not State.RUNNING:  # it was preempted
                continue
            positions = int(longest[i])
            if drafts[i] and not self._extend(sequence, positions + int(drafts[i])):
                drafts[i] = 0  # drafts do not preempt other sequences
            if not self._has_room(sequence, positions):
                keep[i] = False
                continue
            given[i] = sequence.take_unsent()
        counts = np.zeros(len(slots), np.int64)
        counts[list(given)] = [len(spans[0]) for spans in given.values()]
        if self._decoding is None or not keep.all():  # some were preempted, perhaps after they got spans
            keep &= np.fromiter((sequence.state is State.RUNNING for sequence in sequences), bool, len(slots))
            sequences = [sequences[i] for i in np.flatnonzero(keep).tolist()]
            slots, longest, drafts, counts = slots[keep], longest[keep], drafts[keep], counts[keep]
            given = {i: spans for i, spans in given.items() if keep[i]}
        builder.span_counts = counts
        groups = range(len(builder.spans))
        builder.spans = [[span for spans in given.values() for span in spans[group]] for group in groups]
        return sequences, slots, longest, drafts

    def _plan_chunk(self, builder: StepBuilder, sequence: Sequence, count: int) -> int:
        """Plans up to `count` more rows of a prompt, limited by its spans. Returns the number of planned rows."""
        begin = sequence.planned
        count = self._spans.rows_of_chunk(sequence, min(count, int(self._slots.capacity[sequence.slot]) - begin))
        if sequence.images is not None:
            left = self.limits.max_step_tokens - builder.rows - int(builder.drafts.sum())
            count = sequence.images.rows_of_chunk(begin, count, left)
        count, flags = builder.add_chunk(sequence, count)
        self._spans.before_writes(sequence, begin)
        self._spans.note_rows(sequence)
        self.tenants.serve(sequence.account, count)
        if flags & SAMPLE:
            self._slots.longest[sequence.slot] += 1
            self._slots.pending[sequence.slot] += 1
            builder.guided = builder.guided or sequence.guidance is not None
        if sequence.planned == len(sequence.tokens):
            self._prompts.remove(sequence)
            self._decoding = None
        return count

    def _cover_prompts(self) -> None:
        """Allocates the spans of the prompts' next rows. A cache group with a sliding window has spans for only a part
        of a prompt, and the spans that the window has passed are not free while other sequences share them.
        """
        for sequence in list(self._prompts) if self._windowed else ():
            end = min(len(sequence.tokens), sequence.planned + self.limits.max_chunk)
            if sequence.state is not State.RUNNING or sequence is self.alone or self._extend(sequence, end):
                continue
            if self._slots.capacity[sequence.slot] <= sequence.planned == sequence.computed:
                self._has_room(sequence, sequence.planned + 1)

    def _plan_prompts(self, builder: StepBuilder, prompts: list[Sequence], budget: int, may_admit: bool) -> None:
        """Gives `budget` rows to running and waiting prompts in the order of their tenants' turns. If too few spans are
        free for a waiting prompt, only short prompts may overtake it.
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

    def _plan_whole(self, builder: StepBuilder) -> None:
        """Admits waiting prompts in the order of their tenants' turns, each with all its rows, until the step is full.
        A prompt that is longer than what is left waits for the next step.
        """
        while self._free_slots and (waiting := self.queue.first()) is not None:
            if builder.rows and builder.rows + len(waiting.tokens) > self.limits.whole:
                break
            if self._take_spans(waiting):
                self._start(builder, waiting, self.limits.max_step_tokens)
            elif waiting.state is State.WAITING:
                break

    def _share_with_short(self, builder: StepBuilder, prompts: list[Sequence], room: int, may_admit: bool) -> int:
        """Gives up to `room` rows to prompts that are short compared with the first of `prompts`, and removes them from
        `prompts`. It may admit waiting prompts. Returns the number of rows given.
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
        `last`. Returns the number of rows given.
        """
        left, aside = room, []
        while left > 0 and self._free_slots and (entry := self.queue.pop_shortest(limit)) is not None:
            sequence = entry[-1]
            if sequence.account.time > last:  # it is not put back: it waits for its tenant's turn
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
        """Moves a waiting sequence that has its spans into a slot; returns the number of rows it gets."""
        self.queue.remove(sequence, State.RUNNING)
        sequence.slot = self._free_slots.pop()
        self.tenants.enter_slot(sequence.account, sequence.slot)
        self._slots.start(sequence)
        if self._drafts is not None:
            self._drafts.start(sequence.slot)
        if sequence.prediction is not None:
            self._predicted.start(sequence.slot)
        bisect.insort(self.active, sequence, key=_order_of)
        bisect.insort(self._prompts, sequence, key=_order_of)
        builder.admitted.append(sequence)
        builder.new.append(NewSlot(sequence.slot, sequence.tokens, sequence.sampling, sequence.planned))
        if sequence.images is not None:
            builder.sections += sequence.images.begin(sequence.slot)
        self._spans.load_state(sequence)
        count = min(len(sequence.tokens) - sequence.planned, self.limits.max_chunk, budget)
        return self._plan_chunk(builder, sequence, count)

    def _take_spans(self, sequence: Sequence) -> bool:
        """Gives a waiting sequence its spans. Returns False if too few are free. Also returns False, and blocks the
        sequence, if another sequence computes some of them or they must be copied from the host cache.
        """
        # Leave one free span for each running sequence, so that the new sequence is not preempted at once.
        taken = self._spans.take(sequence, len(self.active))
        if taken is Taken.PENDING:
            self.block(sequence, "spans that another request computes")
        elif taken is Taken.RESTORING:
            self.block(sequence, "spans of the host cache")
            self._restoring.append(sequence)
        elif taken is Taken.SHORT and not self.active:  # the whole cache is not enough
            self.queue.remove(sequence, State.ENDED)
            self._oversized.append(sequence)
        elif taken is Taken.YES and sequence.prefix_len is None:
            sequence.prefix_len = sequence.computed
            self.counters.prompt_tokens += sequence.prompt_len
            self.counters.prefix_tokens += sequence.computed
            self.counters.restored_tokens += sequence.restored
        return taken is Taken.YES
