"""A request inside the engine, from its taking to its end."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from allspark_client.errors import AllSparkError
from allspark_client.types import GenerateRequestStatus

from ..logs import log_request
from ..scheduler import FinishReason, Probed, Sequence
from ..tracing import trace_request
from .prepare import Obstacle, PreparedRequest
from .sinks import SampleEnd, Sink

if TYPE_CHECKING:
    from ..tokenizer.stop_strings import OutputText

logger = logging.getLogger(__name__)

_STATUS_WITH_TOKEN = {1: GenerateRequestStatus.ContextFinished, 2: GenerateRequestStatus.Generating}


class PromptResults:
    """What rows of one prompt gave, as it comes."""

    def __init__(self, sequence: Sequence, top: int, pooling: str | None):
        """top: how many of the likeliest tokens are wanted beside each of the prompt's own."""
        self._follows = sequence.tokens[1 : sequence.prompt_len]
        self._top, self._pooling = top, pooling
        self._sum: np.ndarray | None = None  # of hidden states, in the order of the positions; or the last one
        self._rows = 0
        #: of each token but the first: its own and the likeliest, as pairs of id and log probability
        self.logprobs: list[list[tuple[int, float]]] = []

    def add(self, probed: Probed) -> None:
        if probed.logprobs is not None:
            top = zip(probed.top_ids[:, : self._top].tolist(), probed.top_logprobs[:, : self._top].tolist())
            for value, (ids, values) in zip(probed.logprobs.tolist(), top):
                own = self._follows[len(self.logprobs)]
                self.logprobs.append([(own, value), *((i, v) for i, v in zip(ids, values) if i >= 0)])
        if probed.hidden is not None:
            if self._pooling == "last":
                self._sum, self._rows = probed.hidden[-1].astype(np.float64), 1
                return
            for row in probed.hidden:  # one by one: the sum does not depend on where the prompt was cut
                self._sum = row.astype(np.float64) if self._sum is None else self._sum + row
                self._rows += 1

    def embedding(self) -> np.ndarray | None:
        """float32 [hidden size]; None if none is wanted."""
        return None if self._sum is None else (self._sum / self._rows).astype(np.float32)


@dataclass
class Sample:
    """One of a request's sequences, with what its output needs: the owner of the `Sequence`."""

    request: Request
    index: int
    top_logprobs: int  # -1: no logprobs wanted
    text: OutputText | None
    prompt: PromptResults | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended it; the engine's thread may not know that yet."""
        return self.text is not None and self.text.found is not None


class Request:
    """The engine's thread decides of it (`sequences`, `unfinished`, `ended`, `first_step`), the output stage tells its
    sink (`status`, `done` and the rest); `done` and `status` may be read by any thread.
    """

    def __init__(self, handle: int, sink: Sink, prepared: PreparedRequest):
        self.handle, self.name, self.model, self.trace = handle, prepared.name, prepared.model, prepared.trace
        self.sink: Sink | None = sink
        self.sequences: list[Sequence] = prepared.sequences
        self.obstacle: Obstacle | None = prepared.obstacle
        self.adapter = prepared.adapter
        self.deaths = prepared.deaths  # of servers: computed alone until its first tokens, for it may be what ends them
        for index, (sequence, text) in enumerate(zip(prepared.sequences, prepared.texts)):
            sequence.owner = Sample(self, index, prepared.top_logprobs, text)
            if sequence.probe is not None:
                sequence.owner.prompt = PromptResults(sequence, prepared.prompt_logprobs, prepared.pooling)
        self.samples = self.unfinished = len(prepared.sequences)
        self.tenant, self.size = prepared.tenant, prepared.size  # the size that it has in the queue at first
        self.deadline = prepared.deadline  # on the monotonic clock: if it has not begun by then it ends
        self.ended = False  # nothing more is computed for it
        self.done = threading.Event()  # its sink was told of its end
        self.status = GenerateRequestStatus.Init
        self.generated = 0
        self.reason: FinishReason | None = None  # of the sample that ended last
        self.wall_arrival, self.arrival = time.time(), time.monotonic()
        self.first_step = self.first_token = self.last_token = 0.0  # on the monotonic clock, as `arrival`

    def deliver_prompt(self, probed: Probed) -> None:
        """Takes results of rows of the prompt, and hands all to the sink when they are complete."""
        sample: Sample = probed.sequence.owner
        sample.prompt.add(probed)
        if probed.complete:
            self.sink.on_prompt(self.handle, sample.index, sample.prompt.logprobs, sample.prompt.embedding())
            sample.prompt = None

    def announce(self) -> None:
        """Tells the sink that a step is about to hold it, all alone."""
        if self.sink is not None:
            self.sink.on_begun(self.handle)

    @property
    def begun(self) -> bool:
        """Whether something was computed for it; and when nothing more will be."""
        return self.ended or self.first_step > 0

    def deliver(
        self,
        sequence: Sequence,
        token: int,
        logprob: float | None,
        top: list[tuple[int, float]],
        reason: FinishReason | None,
        now: float,
    ) -> None:
        """Hands one token of a step that ended at `now` to the sink, and the statuses that it brings. `reason`: why it
        is the sequence's last; it may turn out to be, by a stop string.
        """
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
        error: AllSparkError | None = None,
        complete: FinishReason | None = None,
    ) -> None:
        """The end; later calls change nothing. From now on only the handle and the status are of interest.

        `complete`: why, with GenerateFinished.
        """
        if self.done.is_set():
            return
        self.status = status
        if complete is not None:
            reason = (self.reason or complete).value    # a stop string may have come first
        else:
            reason = "interrupted" if status is GenerateRequestStatus.GenerateInterrupted else "error"
        stat = self.stat()
        name = self.name or str(self.handle)
        log_request(name, self.model, self.tenant, stat, reason)
        trace_request(name, self.model, self.tenant, self.trace, stat, reason, error)
        try:
            self.sink.on_finish(self.handle, status, error, stat, reason)
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
