"""A request inside the engine, from its taking to its end."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

from allspark_client.errors import AllSparkError
from allspark_client.types import GenerateRequestStatus

from .prepare import Obstacle, PreparedRequest
from .scheduler import FinishReason, Sequence
from .sinks import SampleEnd, Sink

if TYPE_CHECKING:
    from .stop_strings import OutputText

logger = logging.getLogger(__name__)

_STATUS_WITH_TOKEN = {1: GenerateRequestStatus.ContextFinished, 2: GenerateRequestStatus.Generating}


@dataclass
class Sample:
    """One of a request's sequences, with what its output needs: the owner of the `Sequence`."""

    request: "Request"
    index: int
    top_logprobs: int  # -1: no logprobs wanted
    text: Optional[OutputText]

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended it; the engine's thread may not know that yet."""
        return self.text is not None and self.text.found is not None


class Request:
    """The engine's thread decides of it (`sequences`, `unfinished`, `ended`, `first_step`), the output stage tells its
    sink (`status`, `done` and the rest); `done` and `status` may be read by any thread."""

    def __init__(self, handle: int, sink: Sink, prepared: PreparedRequest):
        self.handle = handle
        self.sink: Optional[Sink] = sink
        self.sequences: list[Sequence] = prepared.sequences
        self.obstacle: Optional[Obstacle] = prepared.obstacle
        for index, (sequence, text) in enumerate(zip(prepared.sequences, prepared.texts)):
            sequence.owner = Sample(self, index, prepared.top_logprobs, text)
        self.samples = self.unfinished = len(prepared.sequences)
        self.tokens = prepared.tokens  # of all samples, when it was made
        self.ended = False  # nothing more is computed for it
        self.done = threading.Event()  # its sink was told of its end
        self.status = GenerateRequestStatus.Init
        self.generated = 0
        self.reason: Optional[FinishReason] = None  # of the sample that ended last
        self.wall_arrival, self.arrival = time.time(), time.monotonic()
        self.first_step = self.first_token = self.last_token = 0.0  # on the monotonic clock, as `arrival`

    def deliver(
        self,
        sequence: Sequence,
        token: int,
        logprob: Optional[float],
        top: list[tuple[int, float]],
        reason: Optional[FinishReason],
        now: float,
    ) -> None:
        """Hands one token of a step that ended at `now` to the sink, and the statuses that it brings. `reason`: why it
        is the sequence's last; it may turn out to be, by a stop string."""
        sample: Sample = sequence.owner
        self.last_token = now
        self.generated += 1
        if self.generated <= 2:
            self._set_status(_STATUS_WITH_TOKEN[self.generated])
        if self.generated == 1:
            self.first_token = now
        text = end = None
        if sample.text is not None:
            text = sample.text.push((token,), reason is not None)
            if sample.text.found is not None:
                reason = FinishReason.STOP
        if reason is not None:
            self.reason = reason
            end = SampleEnd(reason.value, sample.text.found if sample.text is not None else None)
        self.sink.on_token(self.handle, sample.index, token, logprob, top, text, sequence.prefix_len or 0, end)

    def finish(
        self,
        status: GenerateRequestStatus,
        error: Optional[AllSparkError] = None,
        complete: Optional[FinishReason] = None,
    ) -> None:
        """The end; later calls change nothing. From now on only the handle and the status are of interest.

        `complete`: why, with GenerateFinished."""
        if self.done.is_set():
            return
        self.status = status
        if complete is not None:
            reason = (self.reason or complete).value    # a stop string may have come first
        else:
            reason = "interrupted" if status is GenerateRequestStatus.GenerateInterrupted else "error"
        try:
            self.sink.on_finish(self.handle, status, error, self.stat(), reason)
        except Exception:  # a sink's trouble must not keep other requests from ending
            logger.exception("the end of request %d cannot be delivered", self.handle)
        self.sink = self.obstacle = None  # callers may keep handles for long
        if self.ended:  # otherwise the engine's thread still has to cancel them
            self.sequences = []
        self.done.set()

    def stat(self) -> dict[str, float]:
        """Values of RequestStatInfo."""
        now = time.monotonic()
        prompt_len = self.sequences[0].prompt_len
        cached = self.sequences[0].prefix_len or 0
        values = {
            "arrival_time": self.wall_arrival,
            "finish_time": 1e3 * (now - self.arrival),
            "context_token_length": prompt_len,
            "generated_token_length": self.generated,
            "context_cached_length": min(cached, prompt_len),
        }
        if self.first_step:
            values["time_in_queue"] = 1e3 * (self.first_step - self.arrival)
        if self.first_token:
            values["first_token_time"] = self.wall_arrival + self.first_token - self.arrival
            values["last_token_time"] = self.wall_arrival + self.last_token - self.arrival
            values["time_to_first_token"] = 1e3 * (self.first_token - self.arrival)
            values["context_tps"] = prompt_len / max(self.first_token - self.first_step, 1e-9)
            if self.generated > 1:
                values["generate_tps"] = (self.generated - 1) / max(self.last_token - self.first_token, 1e-9)
        return values

    def _set_status(self, status: GenerateRequestStatus) -> None:
        self.status = status
        self.sink.on_status(self.handle, status)
