"""The scheduler's data: limits, planned steps, their results and outcomes, and totals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..cache import Copies, SpanGroups, StateCopies
from ..runtime.plan import COPIES, STATES, NewSlot, WorkTable, encode_plan
from .prompt_outputs import PromptOutputRows
from .sequence import FinishReason, Sequence

if TYPE_CHECKING:
    from ..guided import Guidance
from .speculation import DraftLengths


@dataclass(frozen=True)
class Limits:
    """What one step may hold.

    `max_chunk`: rows of one prompt. `draft_kind`: the plan's flag for the kind of drafts, 0 without speculation.
    `max_drafts`: drafts of one sequence. `first_drafts`: those of a new one. `masks`: masks of one step; twice as many
    exist, because the next step is planned while they are in use. `recompute_beyond`: a sequence that grows beyond this
    length is recomputed, because LongRoPE then changes its frequencies; 0: never. `windows`: of each cache group,
    `state_spans`: see SpanGroups. `whole`: prompts are computed whole, and a step is full when it has so many rows;
    0: they may be cut.
    """

    max_batch: int
    max_step_tokens: int
    max_chunk: int
    span_size: int
    draft_kind: int = 0
    max_drafts: int = 7
    first_drafts: int = DraftLengths.FIRST
    masks: int = 0
    recompute_beyond: int = 0
    windows: tuple[int, ...] = (0,)
    state_spans: int = 0
    whole: int = 0

    @property
    def groups(self) -> SpanGroups:
        """How many spans sequences need. A sliding window needs those of two prefill chunks in addition to its own."""
        return SpanGroups(self.span_size, self.windows, 2 * self.max_chunk, self.state_spans)


@dataclass(slots=True)
class Masked:
    """A sample under masks. `sample`: its index among the step's samples. `index`: the row of its mask; the masks after
    its `drafts` are in the next rows. -1: it has no mask yet, but later masks depend on its tokens.
    """

    sequence: Sequence
    guidance: Guidance
    sample: int
    index: int
    drafts: list[int]


@dataclass
class Step:
    """A planned step: what the ranks get, and the sequence of each work item.

    The first `decoding` items are decode rows, perhaps with drafts. The others are prefill chunks. `sampling`: indices
    of the items that sample, in order; all decode rows do.
    """

    free: list[int]
    new: list[NewSlot]
    work: WorkTable
    sequences: list[Sequence]
    epochs: np.ndarray  # of the slots of the items
    decoding: int
    sampling: np.ndarray
    admitted: list[Sequence]  # sequences that have just got their slots
    rows: int  # without drafts
    context: int  # positions before the rows, in all; an upper bound
    copies: Copies | None = None  # made before the rows are computed
    masked: list[Masked] = field(default_factory=list)
    states: StateCopies | None = None  # made after `copies`
    predicted: bool = False  # whether any drafts come from a prediction
    sections: list[tuple[int, np.ndarray]] = field(default_factory=list)  # of the plan, for images

    def encode(self) -> bytes:
        """The wire form of the step plan."""
        copies = [(kind, copies.words()) for kind, copies in ((COPIES, self.copies), (STATES, self.states)) if copies]
        return encode_plan(self.free, self.new, self.work, [*copies, *self.sections])


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
    """The outcome of a step for the sequences that sampled, in the order of its results.

    Tokens first[i] … first[i] + kept[i] - 1 of the results belong to the output of sequence i; kept[i] is 0 if it had
    ended before. `ended`: (i, reason) of sequences that are complete now. `failed`: those that had nothing to sample
    from. `prompt_rows`: results of prompts' rows. `computed`: sequences that are complete without sampling.
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
    """Totals since the start of the model."""

    prompt_tokens: int = 0
    prefix_tokens: int = 0  # prompt tokens found in the prefix cache
    restored_tokens: int = 0  # of these, tokens from the host cache
    saved_spans: int = 0  # copied to the host cache
    restored_spans: int = 0  # copied back
    generated_tokens: int = 0
    computed_rows: int = 0  # rows of rejected drafts do not count
    discarded_rows: int = 0  # rows whose token came after the end of its sequence
    drafted_tokens: int = 0  # drafts that were tried
    accepted_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
