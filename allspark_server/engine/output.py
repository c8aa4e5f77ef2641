"""The output stage: a thread that turns sampled tokens into text and messages, and ends requests.

All calls of sinks come from here, in the order in which the engine's thread has queued the events.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from allspark_client.errors import AllSparkError, AsStatus
from allspark_client.types import GenerateRequestStatus

from ..scheduler import FinishReason, Outcome, Sequence, StepResult
from .request import Request
from .statistics import Timings
from .threads import OUTPUT, output_only

logger = logging.getLogger(__name__)

# The number of queued events beyond which the engine's thread waits for the output stage.
MAX_WAITING = 256
# The engine's thread delivers steps of up to so many sequences itself: waking the output stage would take longer.
FEW = 8
REST_SECONDS = 20e-6  # after first tokens, in which the event loop gets the interpreter's lock
_ALIVE_SECONDS = 1.0  # time between a waiting thread's checks that the output stage's thread is alive
_NO_TOP: list[tuple[int, float]] = []  # never filled


@dataclass
class End:
    """The end of a request. `complete`: the reason, with GenerateFinished."""

    request: Request
    status: GenerateRequestStatus
    error: AllSparkError | None = None
    complete: FinishReason | None = None


@dataclass
class StepOutput:
    """The tokens of a step that ended at `now`: the scheduler's outcome and the StepResult it refers to; the histograms
    of its model; and the requests that are complete with it.
    """

    outcome: Outcome
    result: StepResult
    now: float
    timings: Timings
    ends: list[End] = field(default_factory=list)


@dataclass
class Begun:
    """A step is about to run a quarantined request."""

    request: Request


Event = StepOutput | End | Begun | threading.Event | None


class OutputStage:
    """Calls `on_undeliverable(request)` after a request has ended because its sink or its text failed, and
    `on_stop(sequence)` when a stop string has ended a sequence that may still run.
    """

    def __init__(self, on_undeliverable: Callable[[Request], None], on_stop: Callable[[Sequence], None]):
        self._on_undeliverable, self._on_stop = on_undeliverable, on_stop
        #: deliver outputs on the engine's thread, between steps, because this thread has no CPU of its own
        self.inline = False
        self._listeners: list[Callable[[], None]] = []
        self._notifying = threading.Lock()
        self._queue: queue.Queue[Event] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name=OUTPUT, daemon=True)
        self._thread.start()

    def add_flush_listener(self, listener: Callable[[], None]) -> None:
        """`listener()` is called after the tokens of each step, and after ends without a step."""
        self._listeners.append(listener)

    def put(self, event: StepOutput | End | Begun) -> None:
        """Takes an event; waits while too many are queued. Always on the same thread. RuntimeError if the output
        stage's thread has ended.
        """
        idle = not self._queue.unfinished_tasks and self.alive
        if idle and isinstance(event, StepOutput) and (self.inline or len(event.outcome.sequences) <= FEW):
            first = self._deliver(event)
            self._notify()
            if first and not self.inline:  # the next step runs: leave the interpreter's lock to those who send them
                time.sleep(REST_SECONDS)
        else:
            self._put(event)

    def flush(self) -> None:
        """Returns when all earlier events have been delivered. Not on the output stage's thread."""
        reached = threading.Event()
        try:
            self._put(reached)
        except RuntimeError:
            return
        while not reached.wait(_ALIVE_SECONDS):
            if not self._thread.is_alive():
                return

    def close(self) -> None:
        """Ends the thread after all queued events."""
        try:
            self._put(None)
        except RuntimeError:
            return
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether events are still delivered."""
        return self._thread.is_alive()

    def _put(self, event: Event) -> None:
        while self._thread.is_alive():
            try:
                return self._queue.put(event, timeout=_ALIVE_SECONDS)
            except queue.Full:
                continue
        raise RuntimeError("the output stage's thread has ended")

    # --- the output stage's thread ---

    def _run(self) -> None:
        notified = True  # whether listeners know of all delivered events
        event: Event
        while True:
            if not notified and self._queue.empty():
                notified = self._notify()
            event = self._queue.get()
            if event is None:
                break
            if isinstance(event, StepOutput):
                self._deliver(event)
                notified = self._notify()
            elif isinstance(event, End):
                event.request.finish(event.status, event.error, event.complete)
                notified = False
            elif isinstance(event, Begun):
                event.request.announce()
                notified = False
            else:
                notified = notified or self._notify()
                event.set()
            event = None  # keep nothing alive while waiting
            self._queue.task_done()
        if not notified:
            self._notify()

    def _notify(self) -> bool:
        with self._notifying:
            for listener in self._listeners:
                try:
                    listener()
                except Exception:  # a listener's error must not stop the engine
                    logger.exception("a flush listener failed")
        return True

    @output_only
    def _deliver(self, output: StepOutput) -> bool:
        """Gives a step's tokens to their sinks; returns whether any is the first of its request."""
        outcome, result, now = output.outcome, output.result, output.now
        for prompt_rows in outcome.prompt_rows:
            request = prompt_rows.sequence.owner.request
            if request.sink is not None:
                try:
                    request.deliver_prompt(prompt_rows)
                except Exception as error:
                    self._give_up(request, error)
        ended = dict(outcome.ended)
        tokens = result.tokens.tolist()
        rows = _LogprobRows(result)
        first_tokens: list[float] = []
        gaps: list[float] = []
        for index, (sequence, first, kept) in enumerate(
            zip(outcome.sequences, outcome.first.tolist(), outcome.kept.tolist())
        ):
            sample = sequence.owner
            request = sample.request
            for at in range(first, first + kept):
                if request.sink is None or sample.stopped:  # delivery has failed, or a stop string has ended it
                    break
                logprob, top = None, _NO_TOP
                if sample.top_logprobs >= 0:
                    logprob, top = rows.of(at, sample.top_logprobs)
                if request.last_token:
                    gaps.append(now - request.last_token)
                else:
                    first_tokens.append(now - request.arrival)
                try:
                    reason = ended.get(index) if at == first + kept - 1 else None
                    request.deliver(sequence, tokens[at], logprob, top, reason, now)
                    if sample.stopped and reason is None:
                        self._on_stop(sequence)
                except Exception as error:  # the failure concerns only this request
                    self._give_up(request, error)
        output.timings.between.add(gaps)
        output.timings.first.add(first_tokens)
        for end in output.ends:
            end.request.finish(end.status, end.error, end.complete)
        return bool(first_tokens)

    def _give_up(self, request: Request, error: Exception) -> None:
        logger.exception("request %d", request.handle)
        failure = AllSparkError(AsStatus.ALLSPARK_UNKNOWN_ERROR, f"its output cannot be delivered: {error}")
        request.finish(GenerateRequestStatus.InternalError, failure)
        self._on_undeliverable(request)


class _LogprobRows:
    """The log probabilities of a step, converted once for all rows: arrays are slow to read one element at a time."""

    def __init__(self, result: StepResult):
        self._result = result
        self._logprobs: list[float] | None = None
        self._count = 0  # columns of `_ids` and `_values`
        self._ids: list[list[int]] = []
        self._values: list[list[float]] = []

    def of(self, at: int, count: int) -> tuple[float, list[tuple[int, float]]]:
        """The log probability of a row's token, and the row's top `count` ids with theirs."""
        if self._logprobs is None:
            self._logprobs = self._result.logprobs.tolist()
        if not count:
            return self._logprobs[at], _NO_TOP
        if count > self._count:
            self._count = count
            self._ids, self._values = (
                a[:, :count].tolist() for a in (self._result.top_ids, self._result.top_logprobs))
        ids = self._ids[at][:count]
        top = list(zip(ids, self._values[at]))
        return self._logprobs[at], [pair for pair in top if pair[0] >= 0] if -1 in ids else top
