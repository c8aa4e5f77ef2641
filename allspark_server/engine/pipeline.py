"""Keeps a group's ranks busy: submits the next step before the results of the last one are known."""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from allspark_client.errors import AllSparkError, AsStatus
from allspark_client.types import GenerateRequestStatus

from ..runtime.group import Group
from ..runtime.native import DeviceLost
from .image_encoder import ImageEncoder
from .served_model import ServedModel
from .threads import one_thread

Stepping = ServedModel | ImageEncoder

logger = logging.getLogger(__name__)

_ALONE_PART = 0.25  # of the time that steps of quarantined sequences get while others have work


@dataclass
class _Running:
    """A step, submitted at `submitted` on the monotonic clock."""

    model: Stepping
    step: Any   # a Step of a model, an EncoderStep of a vision tower
    submitted: float


class Pipeline:
    """The steps of all models, in one queue of the group. On the engine's thread."""

    def __init__(self, group: Group):
        self._group = group
        self._running: deque[_Running] = deque()
        self._last: Stepping | None = None  # the model of the last submitted step
        self._alone_at = 0.0  # when a quarantined sequence may have the next step, on the monotonic clock
        self._ended = 0.0  # when the last collected step ended

    @property
    def busy(self) -> bool:
        """Whether there are steps to collect."""
        return bool(self._running)

    @one_thread
    def advance(self, models: Iterable[Stepping]) -> bool:
        """Submits steps of models that have work, in turn. Collects the oldest step if the queue is full or no model
        has a step to submit. Returns False if nothing can be done now, since quarantined sequences must wait.
        """
        models = list(models)
        if any(model.has_quarantined for model in models) and self._advance_alone(models):
            return True
        if self._last in models:  # start with the model after it
            at = models.index(self._last) + 1
            models = models[at:] + models[:at]
        submitted = False
        for model in models:
            if len(self._running) >= self._group.depth:
                break
            submitted |= self._submit(model, model.plan)
        if self._running and (len(self._running) >= self._group.depth or not submitted):
            self._collect()
            return True
        return submitted or not any(model.has_quarantined for model in models)

    @one_thread
    def collect_masked(self) -> None:
        """Collects all steps that sample under masks. Call this before a call of the group that blocks until its steps
        have ended: such a step may wait for masks that are written only when the previous step is collected.
        """
        while any(running.step.masked for running in self._running):
            self._collect()

    def _advance_alone(self, models: list[Stepping]) -> bool:
        """Runs a step of a quarantined sequence while no other step runs, so that a crash has one possible cause.
        Returns False if it is the turn of other sequences, which get the most of the time.
        """
        others = self._running or any(model.has_others for model in models)
        if others and time.monotonic() < self._alone_at:
            return False
        for model in models:
            if not isinstance(model, ServedModel) or not model.has_quarantined:
                continue
            sequence = model.next_alone()
            if sequence is None:
                continue
            while self._running:
                self._collect()
            began = time.monotonic()
            done = self._submit(model, functools.partial(model.plan_alone, sequence))
            if done:
                self._collect()
            now = time.monotonic()
            self._alone_at = now + (1 / _ALONE_PART - 1) * (now - began)
            if done:
                return True
        return False

    def _submit(self, model: Stepping, plan: Callable[[], Any]) -> bool:
        """Submits the step that `plan` gives, if there is one."""
        try:
            step = plan()
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

    def _fail(self, model: Stepping, error: Exception) -> None:
        """Fails a model after an internal error: its cache may differ from what the scheduler assumes."""
        logger.error("a step of model %r failed", model.name, exc_info=error)
        model.failure, model.lost = str(error) or type(error).__name__, isinstance(error, DeviceLost)
        model.release_masks()
        message = f"a step of model {model.name!r} failed: {model.failure}"
        model.end_all(GenerateRequestStatus.InternalError, AllSparkError(AsStatus.ALLSPARK_RUNTIME_ERROR, message))
