"""Outputs of a prompt's rows besides the next token: hidden states, and log probabilities of the prompt's tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..runtime.plan import Flag, WorkTable

if TYPE_CHECKING:
    from .sequence import Sequence
    from .step import Step, StepResult


@dataclass
class PromptOutputs:
    """The outputs that a request wants. `flags`: HIDDEN or PROMPT of the plan. `every`: they are of every prompt
    row, otherwise of the last one only. `received`: the number of positions whose results have arrived.
    """

    flags: int
    every: bool
    received: int = 0


@dataclass
class PromptOutputRows:
    """Results of some of a prompt's rows, in order. `complete`: they are the last ones. With PROMPT: `logprobs` [rows]
    of the next ids, and `top_ids` and `top_logprobs` [rows, 20]. With HIDDEN: `hidden` [rows, hidden size].
    """

    sequence: Sequence
    complete: bool
    logprobs: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    hidden: np.ndarray | None = None


class PromptOutputReader:
    """Distributes the prompt rows of a StepResult. Call `take` for each item in order."""

    def __init__(self, step: Step, result: StepResult):
        self._columns, self._result = step.work.columns, result
        self._scores = self._hidden = 0  # taken so far

    def take(self, index: int, sequence: Sequence, start: int, alive: bool) -> PromptOutputRows | None:
        """The new results of the item `index`, whose first row is position `start`; None if there are none. `alive`:
        the sequence still has the slot in which they were computed.
        """
        flags, rows, outputs = self._columns[[WorkTable.FLAGS, WorkTable.ROWS, WorkTable.OUTPUTS], index].tolist()
        if not flags & (Flag.HIDDEN | Flag.PROMPT):
            return None
        scores, hidden = self._scores, self._hidden
        inside = outputs - (1 if flags & Flag.SAMPLE else 0)
        self._scores += inside if flags & Flag.PROMPT else 0
        self._hidden += outputs if flags & Flag.HIDDEN else 0
        if not alive:
            return None
        prompt_outputs, end = sequence.prompt_outputs, start + rows
        assert prompt_outputs is not None
        new = min(end - max(prompt_outputs.received, end - outputs), outputs)
        prompt_outputs.received = max(prompt_outputs.received, end)
        if new <= 0:
            return None
        prompt_rows = PromptOutputRows(sequence, prompt_outputs.received == sequence.prompt_len)
        if flags & Flag.PROMPT:
            cut = slice(scores + outputs - new, scores + inside)
            if cut.stop > cut.start:
                prompt_rows.logprobs = self._result.prompt_logprobs[cut]
                prompt_rows.top_ids = self._result.prompt_top_ids[cut]
                prompt_rows.top_logprobs = self._result.prompt_top_logprobs[cut]
        if flags & Flag.HIDDEN:
            prompt_rows.hidden = self._result.hidden[hidden + outputs - new : hidden + outputs]
        return prompt_rows
