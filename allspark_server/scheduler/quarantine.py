"""Steps of one sequence alone, for requests in quarantine."""

from __future__ import annotations

from .scheduler import Scheduler
from .sequence import TOKEN_BYTES, Sequence, State
from .step import Step
from .step_builder import StepBuilder


class QuarantineScheduler(Scheduler):
    """A Scheduler that can also plan steps with a single sequence."""

    @property
    def pending_tokens(self) -> int:
        """Approximate number of prompt tokens still to be computed. Any thread."""
        return self.queue.bytes // TOKEN_BYTES + sum(len(s.tokens) - s.planned for s in list(self._prompts))

    def plan_alone(self, sequence: Sequence) -> Step | None:
        """The next step that computes only this sequence, which must be blocked or running, until it samples a token.
        Preempts other sequences for the slot and the spans that it needs. No other step may be running. Returns None if
        the sequence has ended: call `take_oversized`.
        """
        builder = StepBuilder(len(self.limits.windows))
        self._spans.begin_step(False)
        budget = self.limits.max_step_tokens
        if sequence.state is State.BLOCKED:
            self.unblock(sequence)
            if not self._free_slots:
                self._preempt(self._last_of_the_largest())
            while not self._take_spans(sequence):
                if sequence.state is not State.WAITING:
                    return None
                self._preempt(self._last_of_the_largest())
            self._start(builder, sequence, budget)
        elif sequence.state is State.RUNNING:
            count = min(len(sequence.tokens) - sequence.planned, self.limits.max_chunk, budget)
            self._plan_chunk(builder, sequence, count)
        else:
            return None
        return self._step(builder, self._spans.take_copies())
