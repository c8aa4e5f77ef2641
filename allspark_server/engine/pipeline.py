"""Keeps a group's ranks busy: the next step is submitted before the results of the last one are there."""

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

logger = logging.getLogger(__name__)

_CALM_LOOK = 0.01  # s


@dataclass
class _Running:
    """A step that was submitted at `submitted`, in seconds of the monotonic clock."""

    model: ServedModel
    step: Step
    submitted: float


class Pipeline:
    """The steps of all models in one queue of the group. On the engine's thread."""

    def __init__(self, group: Group):
        self._group = group
        self._running: deque[_Running] = deque()
        self._last: ServedModel | None = None  # whose step was submitted last
        self._after_alone = False  # it was the turn of one that is computed alone
        self._ended = 0.0  # when the step that was collected last had ended

    @property
    def busy(self) -> bool:
        """Whether there are steps to collect."""
        return bool(self._running)

    def advance(self, models: Iterable[ServedModel]) -> None:
        """Submits steps of models that have work, in turn, and collects the oldest one if there is no room for more, or
        nothing more to submit.
        """
        models = list(models)
        alone = next((m for m in models if m.has_suspects and m.suspect is not None), None)
        if alone is not None and (not self._after_alone or alone.suspect.slot >= 0):
            self._after_alone = True
            self._advance_alone(alone)
            return
        self._after_alone = False
        if self._last in models:  # the one after it first
            at = models.index(self._last) + 1
            models = models[at:] + models[:at]
        submitted = False
        for model in models:
            if len(self._running) >= self._group.depth:
                break
            submitted |= self._submit(model)
        if self._running and (len(self._running) >= self._group.depth or not submitted):
            self._collect()
        elif not submitted and any(model.has_suspects for model in models):
            time.sleep(_CALM_LOOK)  # it is too early for them, and there is nothing else to do

    def settle(self) -> None:
        """Before calls of the group that wait for its steps: one that draws under masks may wait for what is written when
        the one before it is collected.
        """
        while any(running.step.masked for running in self._running):
            self._collect()

    def _advance_alone(self, model: ServedModel) -> None:
        """A step of a request that may be what ends servers: no other must be blamed on it, nor it on another."""
        while self._running:
            self._collect()
        if model.suspect is not None and self._submit(model, alone=True):
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
        """A defect: this model's cache is no longer what the scheduler thinks it is."""
        logger.error("a step of model %r failed", model.name, exc_info=error)
        model.failure = str(error) or type(error).__name__
        model.give_up_masks()
        message = f"a step of model {model.name!r} failed: {model.failure}"
        model.end_all(GenerateRequestStatus.InternalError, AllSparkError(AsStatus.ALLSPARK_RUNTIME_ERROR, message))
