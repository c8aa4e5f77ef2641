"""A thread that keeps the matchers of a model's sequences and writes their masks while the steps run.

A step is planned, and begins, before the tokens of the one before it are known. So the mask of a sequence that draws in
both is written when those tokens have come, while the layers of the second run; its sampling op, which comes last,
waits for it. What the grammar leaves no choice for is known in advance, as far as it goes: the scheduler gives it as
drafts.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLExecutor

from .grammar import Matcher, MatcherError

if TYPE_CHECKING:
    from ..scheduler import Masked, Outcome, Sequence, Step

logger = logging.getLogger(__name__)

MAX_FORCED = 16  # ids of one sequence that are known in advance, at most
CLOSE_SECONDS = 5.0


@dataclass
class _Mask:
    """A mask to be written to row `index`, and those after each of `drafts` to the rows behind it."""

    guidance: Guidance
    index: int
    drafts: list[int]


class Guidance:
    """Where a sequence is in its grammar, as the scheduler and the masks' thread see it."""

    def __init__(self, matcher: Matcher, length: int):
        """length: of the sequence, prompt and output."""
        self._matcher, self._length = matcher, length
        self._failed = False
        self._forced = length, matcher.forced()[:MAX_FORCED]
        # On the engine's thread: draws that are planned and whose tokens are not known, and the masks that wait for
        # these.
        self.pending = 0
        self.deferred: deque[_Mask] = deque()

    def forced_after(self, length: int) -> list[int]:
        """The ids that will follow a history of this length, as far as they are known; drafts to be verified. Any
        thread.
        """
        known, ids = self._forced
        return ids[length - known :] if length >= known else []

    # The masks' thread.

    def advance(self, ids: list[int]) -> None:
        """The sequence has drawn these. MatcherError if they do not fit, the first time."""
        self._length += len(ids)
        if not self._failed:
            try:
                self._matcher.accept(ids)
                self._forced = self._length, self._matcher.forced()[:MAX_FORCED]
                if error := self._matcher.error():
                    raise error
            except MatcherError:
                self._failed = True  # its masks allow the end alone
                raise

    @property
    def matcher(self) -> Matcher:
        """The sequence's own."""
        return self._matcher


class MaskWriter:
    """The thread of one model. `plan` and `complete` are told of every step, on the engine's thread."""

    def __init__(self, masks: Any, on_error: Callable[[Sequence, MatcherError], None]):
        """masks: rank 0's native Masks. on_error(sequence, error): it can go on in its grammar no more; on the masks'
        thread.
        """
        self._masks, self._on_error = masks, on_error
        self._rows: np.ndarray = masks.bits
        self._executor = LLExecutor(num_threads=1)
        self._jobs: queue.SimpleQueue[tuple[list[tuple[Sequence, list[int]]], list[_Mask]] | None]
        self._jobs = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def plan(self, masked: list[Masked]) -> None:
        """A step that draws under these masks was planned; to be called before it is submitted."""
        ready = []
        for one in masked:
            for row in range(one.index, one.index + 1 + len(one.drafts)):
                self._masks.clear(row)
            guidance: Guidance = one.sequence.guidance
            mask = _Mask(guidance, one.index, one.drafts)
            (guidance.deferred if guidance.pending else ready).append(mask)
            guidance.pending += 1
        if ready:
            self._put(([], ready))

    def complete(self, step: Step, outcome: Outcome, tokens: np.ndarray) -> None:
        """The tokens of the oldest step that was planned have come."""
        drawn, ready = [], []
        for one in step.masked:
            guidance: Guidance = one.sequence.guidance
            guidance.pending -= 1
            first, kept = int(outcome.first[one.draw]), int(outcome.kept[one.draw])
            if kept:
                drawn.append((one.sequence, tokens[first : first + kept].tolist()))
            if guidance.deferred:
                ready.append(guidance.deferred.popleft())
        if drawn or ready:
            self._put((drawn, ready))

    def release(self) -> None:
        """No more tokens will come: steps that still wait for masks go on with whatever is there, for nobody. Any
        thread.
        """
        for row in range(len(self._rows)):
            self._masks.publish(row)

    def close(self) -> None:
        """Ends the thread."""
        self.release()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(CLOSE_SECONDS)
            self._thread = None

    def _put(self, job: tuple[list[tuple[Sequence, list[int]]], list[_Mask]]) -> None:
        if self._thread is None:  # most models never have any
            self._thread = threading.Thread(target=self._run, name="allspark-masks", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    # --- its thread ---

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            drawn, masks = job
            try:
                self._advance(drawn)
                self._write(masks)
            except Exception:  # a defect; the steps must not wait for it
                logger.exception("masks cannot be written")
            for mask in masks:
                # The first, which is always waited for, last: then all were published.
                for row in range(mask.index + len(mask.drafts), mask.index - 1, -1):
                    self._masks.publish(row)
            job = drawn = masks = None  # keeps nothing alive while it waits

    def _advance(self, drawn: list[tuple[Sequence, list[int]]]) -> None:
        for sequence, ids in drawn:
            try:
                sequence.guidance.advance(ids)
            except MatcherError as error:
                self._on_error(sequence, error)

    def _write(self, masks: list[_Mask]) -> None:
        """Writes masks; without the GIL but for those of requests with an end of their own. Those behind a draft that
        is not allowed are left as they are: nobody gets there.
        """
        rows, plain, drafted = self._rows, [], []
        for mask in masks:
            matcher = mask.guidance.matcher
            if not mask.drafts:
                plain.append((matcher.inner, mask.index))
            elif not matcher.patches:
                drafted.append((matcher.inner, mask.index, mask.drafts))
        size, count = rows.strides[0], len(rows)
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, rows.ctypes.data, size, count)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, rows.ctypes.data, size, count)
        for mask in masks:
            matcher = mask.guidance.matcher
            if not matcher.patches:
                continue
            if not mask.drafts:
                matcher.patch(rows[mask.index])
                continue
            fork = matcher.fork()
            for row, draft in enumerate([*mask.drafts, None], mask.index):
                fork.fill(rows[row])
                if draft is None or not rows[row][draft // 32] >> (draft % 32) & 1:
                    break
                fork.accept([draft])
