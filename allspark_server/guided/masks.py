"""Writes the masks of constrained sequences in a thread of its own, in parallel with the forward pass.

A step is planned and starts before the tokens of the previous step are known. If a sequence samples in both steps, the
mask of the second is written once those tokens are known, while the second step's layers run. The sampling op, which
comes last, waits for the mask. Where the grammar allows only one continuation, its ids are known in advance and the
scheduler uses them as drafts.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLExecutor

from .grammar import MatcherError

if TYPE_CHECKING:
    from ..scheduler import Masked, Outcome, Sequence, Step

    Job = tuple[list[tuple[Masked, list[int]]], list[Masked]]   # sampled tokens, then masks that depend on them

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0


class MaskWriter:
    """The masks' thread of one model. The engine's thread calls `plan` and `complete` for every step."""

    def __init__(self, masks: Any, on_error: Callable[[Sequence, MatcherError], None]):
        """`masks`: rank 0's native Masks. `on_error(sequence, error)`: called on the masks' thread if a sequence cannot
        continue in its grammar.
        """
        self._masks, self._on_error = masks, on_error
        self._rows: np.ndarray = masks.bits
        self._executor = LLExecutor(num_threads=1)
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def plan(self, masked: list[Masked]) -> None:
        """Schedules the writing of a planned step's masks. Call this before the step is submitted."""
        ready: list[Masked] = []
        self._masks.clear(_rows(masked))
        for one in masked:
            guidance = one.guidance
            if guidance.pending:
                guidance.deferred.append(one if one.index >= 0 else None)
            elif one.index >= 0:
                ready.append(one)
            guidance.pending += 1
        if ready:
            self._put(([], ready))

    def complete(self, step: Step, outcome: Outcome, tokens: np.ndarray) -> None:
        """Takes the tokens of the oldest planned step, on which later masks depend."""
        sampled, ready = [], []
        firsts, counts, ids = outcome.first.tolist(), outcome.kept.tolist(), tokens.tolist()
        for one in step.masked:
            guidance, first, kept = one.guidance, firsts[one.sample], counts[one.sample]
            guidance.pending -= 1
            if kept:
                sampled.append((one, ids[first : first + kept]))
            if guidance.deferred and (mask := guidance.deferred.popleft()) is not None:
                ready.append(mask)
        if sampled or ready:
            self._put((sampled, ready))

    def release(self) -> None:
        """Lets steps that wait for masks continue with the masks' current content; their results are not needed. Any
        thread.
        """
        self._masks.publish(list(range(len(self._rows))))

    def close(self) -> None:
        """Ends the thread."""
        self.release()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(CLOSE_SECONDS)
            self._thread = None

    def _put(self, job: Job) -> None:
        if self._thread is None:  # most models never need it
            self._thread = threading.Thread(target=self._run, name="allspark-masks", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    # --- the masks' thread ---

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            sampled, masks = job
            try:
                self._advance(sampled)
                self._write(masks)
            except Exception:  # a bug; the steps must not wait forever
                logger.exception("masks cannot be written")
            self._masks.publish(_rows(masks))
            job, sampled, masks = None, [], []  # keep nothing alive while waiting

    def _advance(self, sampled: list[tuple[Masked, list[int]]]) -> None:
        """Advances sequences; those by one token together, without the GIL, which the engine's thread needs."""
        matchers = [one.guidance.takes_single(ids) for one, ids in sampled]
        single = [(matcher, ids[0]) for matcher, (_, ids) in zip(matchers, sampled) if matcher is not None]
        accepted = iter(self._executor.consume_token_par(single)) if single else iter(())
        for matcher, (one, ids) in zip(matchers, sampled):
            try:
                one.guidance.advance(ids, None if matcher is None else next(accepted))
            except MatcherError as error:
                self._on_error(one.sequence, error)

    def _write(self, masks: list[Masked]) -> None:
        """Writes masks, without the GIL unless requests have end-of-sequence ids of their own or limited reasoning.
        Masks behind a draft that the grammar does not allow stay as they are: sampling never reaches them.
        """
        rows, plain, drafted = self._rows, [], []
        for mask in masks:
            matcher = mask.guidance.matcher
            if matcher is None or mask.guidance.budget is not None:
                self._write_limited(mask)
            elif not mask.drafts:
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
            if matcher is None or mask.guidance.budget is not None or not matcher.patches:
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

    def _write_limited(self, mask: Masked) -> None:
        """Writes the masks of a sequence whose reasoning is limited."""
        rows, matcher, budget = self._rows, mask.guidance.matcher, mask.guidance.budget
        if mask.drafts:
            matcher, budget = matcher and matcher.fork(), budget and budget.fork()
        for row, draft in enumerate([*mask.drafts, None], mask.index):
            if matcher is None:
                rows[row] = 0xFFFFFFFF
            else:
                matcher.fill(rows[row])
            if budget is not None:
                budget.restrict(rows[row])
            if draft is None or not rows[row][draft // 32] >> (draft % 32) & 1:
                break
            if matcher is not None:
                matcher.accept([draft])
            if budget is not None:
                budget.accept([draft])


def _rows(masked: list[Masked]) -> list[int]:
    """The rows of their masks."""
    rows = [one.index for one in masked if one.index >= 0]
    for one in masked:
        if one.drafts:
            rows += range(one.index + 1, one.index + 1 + len(one.drafts))
    return rows
