"""Where the results of requests go: the interface of sinks, and the sink that feeds a ResultQueue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from allspark_client.errors import AllSparkError
from allspark_client.queue import ResultQueue
from allspark_client.types import GeneratedElements, GenerateRequestStatus


class SampleEnd(NamedTuple):
    """Why a sample has ended: "stop" (end of sequence, or `stop_string`), "length" or "stop_word"."""

    reason: str
    stop_string: str | None = None


class Sink(Protocol):
    """Receives a request's results, on the output stage's thread. It must neither block nor wait for the engine."""

    def on_token(
        self, handle: int, sample: int, token: int, logprob: float | None, top: list[tuple[int, float]],
        text: str | None, cached: int, end: SampleEnd | None,
    ) -> None:
        """A new token of one sample. `logprob`: None unless wanted. `text`: text that is final now, None unless
        requested. `cached`: prompt tokens that came from the prefix cache. `end`: with the sample's last token.
        """

    def on_prompt(
        self, handle: int, sample: int, logprobs: list[list[tuple[int, float]]], embedding: np.ndarray | None
    ) -> None:
        """Results of the prompt itself, before any token. `logprobs`: of its tokens except the first, with the top
        ones; empty unless wanted. `embedding`: float32 [hidden size], None unless wanted.
        """

    def on_status(self, handle: int, status: GenerateRequestStatus) -> None:
        """Progress before the end: ContextFinished with the first token, Generating with the second."""

    def on_begun(self, handle: int) -> None:
        """A step is about to run this request alone, because servers crashed while they ran it."""

    def on_finish(
        self, handle: int, status: GenerateRequestStatus, error: AllSparkError | None, stat: dict[str, float],
        reason: str,
    ) -> None:
        """The last call for this request. `reason`: that of the last sample to end, as in SampleEnd, or "interrupted"
        or "error".
        """


def prompt_elements(
    sample: int, logprobs: list[list[tuple[int, float]]], embedding: np.ndarray | None
) -> GeneratedElements:
    """The arguments of `on_prompt` in the API's form."""
    tensors = [] if embedding is None else [{"embedding": embedding}]
    return GeneratedElements(sample_index=sample, prompt_logprobs_list=logprobs, tensors_from_model_inference=tensors)


@dataclass
class QueueSink:
    """Feeds a ResultQueue."""

    results: ResultQueue

    def on_token(
        self, handle: int, sample: int, token: int, logprob: float | None, top: list[tuple[int, float]],
        text: str | None, cached: int, end: SampleEnd | None,
    ) -> None:
        """See Sink."""
        elements = GeneratedElements([token], prefix_cache_len=cached, prefix_len_cpu=cached, sample_index=sample)
        if logprob is not None:
            elements.token_logprobs_list = [logprob]
            elements.log_probs_list = [top]
        if text is not None:
            elements.text = text
        if end is not None:
            elements.finish_reason, elements.stop_string = end
        self.results.put(elements)

    def on_prompt(
        self, handle: int, sample: int, logprobs: list[list[tuple[int, float]]], embedding: np.ndarray | None
    ) -> None:
        """See Sink."""
        self.results.put(prompt_elements(sample, logprobs, embedding))

    def on_status(self, handle: int, status: GenerateRequestStatus) -> None:
        """See Sink."""
        self.results.set_status(status)

    def on_begun(self, handle: int) -> None:
        """Nothing to do: in one process, the caller crashes with the engine."""

    def on_finish(
        self, handle: int, status: GenerateRequestStatus, error: AllSparkError | None, stat: dict[str, float],
        reason: str,
    ) -> None:
        """See Sink."""
        self.results.update_stat(stat)
        self.results.finish(status, error, reason)
