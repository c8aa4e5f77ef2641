"""Steps of one sequence alone, for requests in quarantine."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .scheduler import Scheduler
from .sequence import TOKEN_BYTES, Sequence, State
from .step import Step
from .step_builder import StepBuilder
from .token_budget import TokenBudget

_REASON = "a step of its own"


class QuarantineScheduler(Scheduler):
    """A Scheduler that can also plan steps with a single sequence, between those of the others."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._claimant: Sequence | None = None  # a quarantined sequence that waits for a slot or spans

    @property
    def pending_tokens(self) -> int:
        """Approximate number of prompt tokens still to be computed. Any thread."""
        return self.queue.bytes // TOKEN_BYTES + sum(len(s.tokens) - s.planned for s in list(self._prompts))

    @property
    def has_others(self) -> bool:
        """Whether there is work besides sequences in quarantine."""
        return (len(self.active) > (self.alone is not None) or bool(self._restoring) or self.queue.waiting > 0)

    def quarantine(self, sequence: Sequence) -> None:
        """Puts a new sequence into the queue; `plan_alone` computes it."""
        sequence.blocked_on = _REASON
        self.add(sequence)

    def plan_alone(self, sequence: Sequence, cost: TokenBudget | None = None) -> Step | None:
        """The next step that computes only this sequence, which must be blocked or running, until it samples a token.

        No other step may be running. It preempts sequences for the slot and the spans that it needs, but those of other
        tenants only if these have more than its own. Returns None if it has no room yet, or has ended: call
        `take_oversized`. `cost`: as for `plan`.
        """
        builder = StepBuilder(len(self.limits.windows))
        self._spans.begin_step(max(1, len(self.active)))
        budget = self.limits.max_step_tokens
        if cost is not None:
            budget = int(max(1, min(budget, cost.for_prompts(len(self.active), 0, 1))))
        if sequence.state is State.BLOCKED:
            self.unblock(sequence)
            while not self._free_slots or not self._take_spans(sequence):
                if sequence.state is not State.WAITING:
                    return None
                victim = self._victim(sequence)
                if victim is None:
                    self.block(sequence, _REASON)
                    self._claimant = sequence
                    return None
                self._preempt(victim)
            self.alone, self._claimant = sequence, None
            self._start(builder, sequence, budget)
        elif sequence.state is State.RUNNING:
            count = min(len(sequence.tokens) - sequence.planned, self.limits.max_chunk, budget)
            self._plan_chunk(builder, sequence, count)
        else:
            return None
        if sequence.planned == len(sequence.tokens):
            self.alone = None
        self.tenants.serve(sequence.account, len(self.active))  # what others could have got in this step
        return self._step(builder, self._spans.take_copies(), self._spans.take_states())

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """The sequence to preempt for a quarantined one; None if that would take from a tenant with no more than the
        quarantined one's tenant.
        """
        own, held = sequence.account, Counter[Any]()
        if self._free_slots:
            for other in self.active:
                held[other.account] += other.held_spans
            needed = self._spans.needed(len(sequence.tokens))
        else:
            held.update(other.account for other in self.active)
            needed = 1
        largest = max(held, key=held.__getitem__)
        if largest is not own and held[largest] <= held[own] + needed:
            largest = own
        return next((other for other in reversed(self.active) if other.account is largest), None)

    def _may_admit(self) -> bool:
        """Others may not be admitted while a quarantined sequence, whose tenant's turn it is, waits for room."""
        claimant = self._claimant
        if claimant is None or claimant.state is not State.BLOCKED:
            self._claimant = None
            return True
        first = self.queue.first()
        return first is not None and first.account.time < claimant.account.time

    def _preempt(self, victim: Sequence) -> None:
        if victim is self.alone:
            self.alone, victim.blocked_on = None, _REASON  # it goes back to its place in quarantine
        super()._preempt(victim)

    def _leave(self, sequence: Sequence, state: State) -> None:
        if sequence is self.alone:
            self.alone = None
        super()._leave(sequence, state)
