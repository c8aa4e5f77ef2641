"""The output stage: a thread that turns what steps have drawn into text and messages, and tells requests of their ends.

Everything that a request's sink hears comes from here, in the order in which the engine's thread has put it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Union

import numpy as np

from allspark_client.errors import AllSparkError, AsStatus
from allspark_client.types import GenerateRequestStatus

from ..scheduler import FinishReason, Outcome, Sequence
from .request import Request
from .timings import Timings

logger = logging.getLogger(__name__)

# Steps and ends that may wait for the output stage; beyond it the engine's thread waits.
MAX_WAITING = 256
_LOOK_SECONDS = 1.0  # between two looks of somebody who waits at whether the thread still lives
_NO_TOP: list[tuple[int, float]] = []  # never filled


@dataclass
class End:
    """The end of a request. `complete`: why, with GenerateFinished."""

    request: Request
    status: GenerateRequestStatus
    error: AllSparkError | None = None
    complete: FinishReason | None = None


@dataclass
class StepOutput:
    """What a step that ended at `now` has drawn: the scheduler's outcome and the StepResult that it speaks of; where
    its model's times are counted; and the requests that are complete with it.
    """

    outcome: Outcome
    result: object
    now: float
    timings: Timings
    ends: list[End] = field(default_factory=list)


@dataclass
class Begun:
    """A step is about to hold a request that may be what ends servers."""

    request: Request


Event = Union[StepOutput, End, Begun, threading.Event, None]


class OutputStage:
    """`on_undeliverable(request)`: a request has been ended because its sink or its text failed. `on_stop(sequence)`: a
    stop string has ended a sequence that may still run.
    """

    def __init__(self, on_undeliverable: Callable[[Request], None], on_stop: Callable[[Sequence], None]):
        self._on_undeliverable, self._on_stop = on_undeliverable, on_stop
        #: whether steps' outputs are delivered by who puts them, between steps: where there is no processor for the thread
        self.inline = False
        self._listeners: list[Callable[[], None]] = []
        self._telling = threading.Lock()
        self._queue: queue.Queue[Event] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="allspark-output", daemon=True)
        self._thread.start()

    def add_flush_listener(self, listener: Callable[[], None]) -> None:
        """`listener()` is called after the tokens of each step, and after ends that no step brought."""
        self._listeners.append(listener)

    def put(self, event: StepOutput | End | Begun) -> None:
        """Hands over what happened. Waits while there is too much to do. RuntimeError if the thread has gone. Always by
        one and the same thread.
        """
        if self.inline and isinstance(event, StepOutput) and not self._queue.unfinished_tasks and self.alive:
            self._deliver(event)
            self._tell()
        else:
            self._put(event)

    def flush(self) -> None:
        """Returns when everything that was put before has been told. Not on the output stage's thread."""
        reached = threading.Event()
        try:
            self._put(reached)
        except RuntimeError:
            return
        while not reached.wait(_LOOK_SECONDS):
            if not self._thread.is_alive():
                return

    def close(self) -> None:
        """Ends the thread, after all that was put."""
        try:
            self._put(None)
        except RuntimeError:
            return
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether sinks are still told anything."""
        return self._thread.is_alive()

    def _put(self, event: Event) -> None:
        while self._thread.is_alive():
            try:
                return self._queue.put(event, timeout=_LOOK_SECONDS)
            except queue.Full:
                continue
        raise RuntimeError("the output stage's thread has ended")

    # --- its thread ---

    def _run(self) -> None:
        told = True  # of all that was delivered
        event: Event
        while True:
            if not told and self._queue.empty():
                told = self._tell()
            event = self._queue.get()
            if event is None:
                break
            if isinstance(event, StepOutput):
                self._deliver(event)
                told = self._tell()
            elif isinstance(event, End):
                event.request.finish(event.status, event.error, event.complete)
                told = False
            elif isinstance(event, Begun):
                event.request.announce()
                told = False
            else:
                told = told or self._tell()
                event.set()
            event = None  # keeps nothing alive while it waits
            self._queue.task_done()
        if not told:
            self._tell()

    def _tell(self) -> bool:
        with self._telling:
            for listener in self._listeners:
                try:
                    listener()
                except Exception:  # a client's trouble is not the engine's
                    logger.exception("a flush listener failed")
        return True

    def _deliver(self, output: StepOutput) -> None:
        outcome, result, now = output.outcome, output.result, output.now
        for probed in outcome.probed:
            request = probed.sequence.owner.request
            if request.sink is not None:
                try:
                    request.deliver_prompt(probed)
                except Exception as error:
                    self._give_up(request, error)
        ended = dict(outcome.ended)
        tokens = result.tokens.tolist()
        logprobs: list[float] | None = None
        first_tokens: list[float] = []
        gaps: list[float] = []
        for index, (sequence, first, kept) in enumerate(
            zip(outcome.sequences, outcome.first.tolist(), outcome.kept.tolist())
        ):
            sample = sequence.owner
            request = sample.request
            for at in range(first, first + kept):
                if request.sink is None or sample.stopped:  # it could not be delivered, or nothing more belongs to it
                    break
                logprob, top = None, _NO_TOP
                if sample.top_logprobs >= 0:
                    if logprobs is None:
                        logprobs = result.logprobs.tolist()
                    logprob, top = logprobs[at], _top(result, at, sample.top_logprobs)
                if request.last_token:
                    gaps.append(now - request.last_token)
                else:
                    first_tokens.append(now - request.arrival)
                try:
                    reason = ended.get(index) if at == first + kept - 1 else None
                    request.deliver(sequence, tokens[at], logprob, top, reason, now)
                    if sample.stopped and reason is None:
                        self._on_stop(sequence)
                except Exception as error:  # this request's output cannot be delivered; the others' can
                    self._give_up(request, error)
        output.timings.between.add(gaps)
        output.timings.first.add(first_tokens)
        for end in output.ends:
            end.request.finish(end.status, end.error, end.complete)

    def _give_up(self, request: Request, error: Exception) -> None:
        logger.exception("request %d", request.handle)
        failure = AllSparkError(AsStatus.ALLSPARK_UNKNOWN_ERROR, f"its output cannot be delivered: {error}")
        request.finish(GenerateRequestStatus.InternalError, failure)
        self._on_undeliverable(request)


def _top(result, at: int, count: int) -> list[tuple[int, float]]:
    """The `count` best ids of a result's row and their log probabilities."""
    if not count:
        return _NO_TOP
    ids: np.ndarray = result.top_ids[at, :count]
    return [(i, value) for i, value in zip(ids.tolist(), result.top_logprobs[at, :count].tolist()) if i >= 0]
