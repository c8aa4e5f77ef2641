"""A request inside the engine, from the moment it is accepted to its end."""

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
from ..scheduler import FinishReason, PromptOutputRows, Sequence
from ..tracing import trace_request
from .input_stage import Dependency, PreparedRequest
from .results import SampleEnd, Sink
from .threads import output_only

if TYPE_CHECKING:
    from ..tokenizer.detokenizer import OutputText
    from .statistics import Timings

logger = logging.getLogger(__name__)

_STATUS_WITH_TOKEN = {1: GenerateRequestStatus.ContextFinished, 2: GenerateRequestStatus.Generating}


class PromptResults:
    """Collects the results of one prompt's rows."""

    def __init__(self, sequence: Sequence, top: int, pooling: str | None):
        """`top`: how many top log probabilities are requested besides that of each prompt token."""
        self._follows = sequence.tokens[1 : sequence.prompt_len]
        self._top, self._pooling = top, pooling
        self._sum: np.ndarray | None = None  # of hidden states in order of positions, or the last one
        self._rows = 0
        #: for each token but the first: pairs of id and log probability, its own first, then the top ones
        self.logprobs: list[list[tuple[int, float]]] = []

    def add(self, prompt_rows: PromptOutputRows) -> None:
        """Takes the results of further rows, in order."""
        if prompt_rows.logprobs is not None:
            assert prompt_rows.top_ids is not None and prompt_rows.top_logprobs is not None
            top = zip(prompt_rows.top_ids[:, : self._top].tolist(), prompt_rows.top_logprobs[:, : self._top].tolist())
            for value, (ids, values) in zip(prompt_rows.logprobs.tolist(), top):
                own = self._follows[len(self.logprobs)]
                self.logprobs.append([(own, value), *((i, v) for i, v in zip(ids, values) if i >= 0)])
        if prompt_rows.hidden is not None:
            if self._pooling == "last":
                self._sum, self._rows = prompt_rows.hidden[-1].astype(np.float64), 1
                return
            for row in prompt_rows.hidden:  # one by one, so that the sum does not depend on how the prompt was chunked
                self._sum = row.astype(np.float64) if self._sum is None else self._sum + row
                self._rows += 1

    def embedding(self) -> np.ndarray | None:
        """The embedding, float32 [hidden size]; None if none is wanted."""
        return None if self._sum is None else (self._sum / self._rows).astype(np.float32)


@dataclass
class Sample:
    """The owner of a request's sequence: what its output needs. `top_logprobs`: -1 without log probabilities."""

    request: Request
    index: int
    top_logprobs: int
    text: OutputText | None
    prompt: PromptResults | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended it. The engine's thread may not know that yet."""
        return self.text is not None and self.text.found is not None


class Request:
    """The engine's thread changes `sequences`, `unfinished`, `ended` and `first_step`; the output stage changes the
    rest and calls the sink. Any thread may read `done` and `status`.

    `ended`: no further step computes it. `done`: its sink has received the end. `size`: its bytes in the queue when it
    was accepted. `first_step`, `first_token`, `last_token`, `arrival` and `deadline` are on the monotonic clock.
    """

    def __init__(self, handle: int, sink: Sink, prepared: PreparedRequest, timings: Timings | None = None):
        """`timings`: the histograms of its model."""
        self._timings = timings
        self.handle, self.name, self.model, self.trace = handle, prepared.name, prepared.model, prepared.trace
        self.sink: Sink | None = sink
        self.sequences: list[Sequence] = prepared.sequences
        self.dependency: Dependency | None = prepared.dependency
        self.adapter = prepared.adapter
        self.deaths = prepared.deaths  # servers that it may have crashed; above 0: in quarantine until its first token
        self.proven = prepared.proven
        self.announced = 0.0  # when the client was told that it runs alone, on the monotonic clock
        for index, (sequence, text) in enumerate(zip(prepared.sequences, prepared.texts)):
            sequence.owner = Sample(self, index, prepared.top_logprobs, text)
            if sequence.prompt_outputs is not None:
                sequence.owner.prompt = PromptResults(sequence, prepared.prompt_logprobs, prepared.pooling)
        self.samples = self.unfinished = len(prepared.sequences)
        self.tenant, self.size = prepared.tenant, prepared.size
        self.deadline = prepared.deadline
        self._interest = prepared.interest
        self.done = threading.Event()
        self.status = GenerateRequestStatus.Init
        self.generated = 0
        self.reason: FinishReason | None = None  # of the last sample to end
        self.wall_arrival, self.arrival = time.time(), time.monotonic()
        self.first_step = self.first_token = self.last_token = 0.0

    def deliver_prompt(self, prompt_rows: PromptOutputRows) -> None:
        """Collects results of the prompt's rows, and passes them to the sink once they are complete."""
        sample: Sample = prompt_rows.sequence.owner
        assert sample.prompt is not None and self.sink is not None
        sample.prompt.add(prompt_rows)
        if prompt_rows.complete:
            self.sink.on_prompt(self.handle, sample.index, sample.prompt.logprobs, sample.prompt.embedding())
            sample.prompt = None

    def announce(self) -> None:
        """Tells the sink that a step is about to run it alone."""
        if self.sink is not None:
            self.sink.on_begun(self.handle)

    @property
    def ended(self) -> bool:
        """Whether no further step computes it."""
        return self._interest.ended

    @ended.setter
    def ended(self, value: bool) -> None:
        self._interest.ended = value

    @property
    def begun(self) -> bool:
        """Whether anything was computed for it, or it has ended."""
        return self.ended or self.first_step > 0

    @output_only
    def deliver(
        self, sequence: Sequence, token: int, logprob: float | None, top: list[tuple[int, float]],
        reason: FinishReason | None, now: float,
    ) -> None:
        """Gives one token of a step that ended at `now` to the sink, with the changes of status. `reason`: why it is
        the sequence's last token; a stop string may make it the last one as well.
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
        assert self.sink is not None
        self.sink.on_token(self.handle, sample.index, token, logprob, top, text, sequence.prefix_len or 0, end)

    @output_only
    def finish(
        self, status: GenerateRequestStatus, error: AllSparkError | None = None, complete: FinishReason | None = None,
    ) -> None:
        """Ends the request; later calls do nothing. `complete`: the reason, with GenerateFinished."""
        if self.done.is_set():
            return
        self.status = status
        if complete is not None:
            reason = (self.reason or complete).value  # a stop string may have come first
        else:
            reason = "interrupted" if status is GenerateRequestStatus.GenerateInterrupted else "error"
        stat = self.stat()
        name = self.name or str(self.handle)
        log_request(name, self.model, self.tenant, stat, reason)
        if self._timings is not None:
            self._timings.add_request(stat, reason)
        trace_request(name, self.model, self.tenant, self.trace, stat, reason, error)
        try:
            assert self.sink is not None
            self.sink.on_finish(self.handle, status, error, stat, reason)
        except Exception:  # a failing sink must not keep other requests from ending
            logger.exception("the end of request %d cannot be delivered", self.handle)
        self.sink = self.dependency = None  # callers may keep handles for long
        if self.ended:  # otherwise the engine's thread must still cancel them
            self.sequences = []
        self.done.set()

    def stat(self) -> dict[str, float]:
        """The values of RequestStatInfo."""
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
        if predictions := [sequence.prediction for sequence in self.sequences if sequence.prediction is not None]:
            values["accepted_prediction_tokens"] = sum(prediction.accepted for prediction in predictions)
            values["rejected_prediction_tokens"] = sum(prediction.rejected for prediction in predictions)
        return values

    def _set_status(self, status: GenerateRequestStatus) -> None:
        self.status = status
        assert self.sink is not None
        self.sink.on_status(self.handle, status)
