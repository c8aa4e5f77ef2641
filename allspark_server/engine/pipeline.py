"""Keeps a group's ranks busy: submits the next step before the results of the last one are known."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from allspark_client.errors import AllSparkError, AsStatus
from allspark_client.types import GenerateRequestStatus

from ..runtime.group import Group
from ..scheduler import Step
from .served_model import ServedModel
from .threads import one_thread

logger = logging.getLogger(__name__)

_QUARANTINE_POLL_SECONDS = 0.01


@dataclass
class _Running:
    """A step, submitted at `submitted` on the monotonic clock."""

    model: ServedModel
    step: Step
    submitted: float


class Pipeline:
    """The steps of all models, in one queue of the group. On the engine's thread."""

    def __init__(self, group: Group):
        self._group = group
        self._running: deque[_Running] = deque()
        self._last: ServedModel | None = None  # the model of the last submitted step
        self._was_alone = False  # whether the last turn went to a quarantined sequence
        self._ended = 0.0  # when the last collected step ended

    @property
    def busy(self) -> bool:
        """Whether there are steps to collect."""
        return bool(self._running)

    @one_thread
    def advance(self, models: Iterable[ServedModel]) -> None:
        """Submits steps of models that have work, in turn. Collects the oldest step if the queue is full or no model
        has a step to submit.
        """
        models = list(models)
        alone = next((m for m in models if m.has_quarantined and m.quarantined is not None), None)
        turn = alone.quarantined if alone is not None else None
        if alone is not None and turn is not None and (not self._was_alone or turn.slot >= 0):
            self._was_alone = True
            self._advance_alone(alone)
            return
        self._was_alone = False
        if self._last in models:  # start with the model after it
            at = models.index(self._last) + 1
            models = models[at:] + models[:at]
        submitted = False
        for model in models:
            if len(self._running) >= self._group.depth:
                break
            submitted |= self._submit(model)
        if self._running and (len(self._running) >= self._group.depth or not submitted):
            self._collect()
        elif not submitted and any(model.has_quarantined for model in models):
            time.sleep(_QUARANTINE_POLL_SECONDS)  # quarantined sequences may not run yet, and there is no other work

    @one_thread
    def collect_masked(self) -> None:
        """Collects all steps that sample under masks. Call this before a call of the group that blocks until its steps
        have ended: such a step may wait for masks that are written only when the previous step is collected.
        """
        while any(running.step.masked for running in self._running):
            self._collect()

    def _advance_alone(self, model: ServedModel) -> None:
        """Runs a step of a quarantined sequence while no other step runs, so that a crash has one possible cause."""
        while self._running:
            self._collect()
        if model.quarantined is not None and self._submit(model, alone=True):
            self._collect()

    def _submit(self, model: ServedModel, alone: bool = False) -> bool:
        try:
            step = model.plan_alone() if alone else model.plan()
            if step is None:
                return False
            self._group.submit(model.name, step.encode())
        except Exception as error:
            self._fail(model, error)
            return False
        self._last = model
        self._running.append(_Running(model, step, time.monotonic()))
        return True

    def _collect(self) -> None:
        running = self._running.popleft()
        model = running.model
        try:
            result = self._group.collect()
            now = time.monotonic()
            began, self._ended = max(running.submitted, self._ended), now
            if model.failure is None:
                model.complete(running.step, result, now - began)
        except Exception as error:
            if model.failure is None:
                self._fail(model, error)

    def _fail(self, model: ServedModel, error: Exception) -> None:
        """Fails a model after an internal error: its cache may differ from what the scheduler assumes."""
        logger.error("a step of model %r failed", model.name, exc_info=error)
        model.failure = str(error) or type(error).__name__
        model.release_masks()
        message = f"a step of model {model.name!r} failed: {model.failure}"
        model.end_all(GenerateRequestStatus.InternalError, AllSparkError(AsStatus.ALLSPARK_RUNTIME_ERROR, message))
