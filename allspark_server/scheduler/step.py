"""What passes in and out of the scheduler: limits, a planned step, what came of it, and totals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..cache import Copies, SpanGroups
from ..runtime.plan import COPIES, NewSlot, WorkTable, encode_plan
from .prompt_outputs import PromptOutputRows
from .sequence import FinishReason, Sequence


@dataclass(frozen=True)
class Limits:
    """What one step may hold. `max_chunk`: rows of one prompt in one step. `draft_kind`: the plan's flag of the way in
    which drafts are made, 0 for no speculation; `max_drafts`: of one sequence in one step. `masks`: of one step; there
    must be twice as many, as the next step takes others. `anew_beyond`: a history that grows beyond this length is
    computed anew, as all of it then is with other frequencies (LongRoPE); 0: none is. `windows`: of each cache group,
    see SpanGroups.
    """

    max_batch: int
    max_step_tokens: int
    max_chunk: int
    span_size: int
    draft_kind: int = 0
    max_drafts: int = 7
    masks: int = 0
    anew_beyond: int = 0
    windows: tuple[int, ...] = (0,)

    @property
    def groups(self) -> SpanGroups:
        """What spans sequences need: with windows, of a prompt those of two steps beside them."""
        return SpanGroups(self.span_size, self.windows, 2 * self.max_chunk)


@dataclass
class Masked:
    """A draw under masks: the sequence, the draw's place among the step's, the row of its mask, and the drafts, whose
    masks are in the rows behind.
    """

    sequence: Sequence
    draw: int
    index: int
    drafts: list[int]


@dataclass
class Step:
    """A planned step: what the ranks get, and which sequence each work item is for.

    The first `decoding` items are single rows, with drafts if there are any, of sequences whose history the ranks have;
    the others are chunks of prompts. `drawing`: indices of the items that draw, in order; all of the first kind do.
    """

    free: list[int]
    new: list[NewSlot]
    work: WorkTable
    sequences: list[Sequence]
    epochs: np.ndarray  # of the items' slots
    decoding: int
    drawing: np.ndarray
    admitted: list[Sequence]  # those that have just got their slots
    rows: int  # without drafts
    context: int  # positions before each row, in all; an upper bound
    copies: Copies | None = None  # made before anything is computed
    masked: list[Masked] = field(default_factory=list)

    def encode(self) -> bytes:
        """The step plan's wire form."""
        sections = [(COPIES, self.copies.words())] if self.copies is not None else ()
        return encode_plan(self.free, self.new, self.work, sections)


class StepResult(Protocol):
    """The native result of a step. Rows are tokens, in the order of the items that sample."""

    tokens: np.ndarray  # int32 [rows]
    counts: np.ndarray  # int32 [items]: tokens of each item
    drafted: np.ndarray  # int32 [items]: drafts that were tried
    status: np.ndarray  # [rows]: not 0 if there was nothing to sample from
    logprobs: np.ndarray  # float32 [rows]
    top_ids: np.ndarray  # int32 [rows, 20]; -1 for none
    top_logprobs: np.ndarray  # float32 [rows, 20]
    prompt_logprobs: np.ndarray  # float32 [rows of prompts]
    prompt_top_ids: np.ndarray
    prompt_top_logprobs: np.ndarray
    hidden: np.ndarray  # float32 [rows of prompts, hidden size]
    copy_seconds: float  # time of the copies between the caches


@dataclass
class Outcome:
    """What came of a step for the sequences that drew, in the order of its results.

    Of sequence i, the tokens first[i] … first[i] + kept[i] - 1 of the results belong to its output; kept[i] is 0 where
    it had ended before. `ended`: (i, why) of those that are complete now. `failed`: those that had nothing to draw
    from. `prompt_rows`: what rows of prompts gave. `computed`: sequences that are complete without a draw.
    """

    sequences: list[Sequence]
    first: np.ndarray
    kept: np.ndarray
    ended: list[tuple[int, FinishReason]] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    prompt_rows: list[PromptOutputRows] = field(default_factory=list)
    computed: list[Sequence] = field(default_factory=list)


@dataclass
class Counters:
    """Totals since the model was started."""

    prompt_tokens: int = 0
    prefix_tokens: int = 0  # of the prompt tokens, those found in the prefix cache
    restored_tokens: int = 0  # of these, those that came back from the host cache
    saved_spans: int = 0  # copied to the host cache
    restored_spans: int = 0  # and back
    generated_tokens: int = 0
    computed_rows: int = 0  # those of rejected drafts are not counted
    discarded_rows: int = 0  # rows whose token came after the end of its sequence
    drafted_tokens: int = 0  # drafts that were asked for
    accepted_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
