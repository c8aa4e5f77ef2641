"""Where the results of requests go."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from allspark_client.errors import AllSparkError
from allspark_client.queue import ResultQueue
from allspark_client.types import GeneratedElements, GenerateRequestStatus


class SampleEnd(NamedTuple):
    """Why a sample has ended: "stop" (end of sequence, or the stop string that is named), "length" or "stop_word"."""

    reason: str
    stop_string: str | None = None


class Sink(Protocol):
    """Where a request's results go. Called on the output stage's thread; must not block, nor wait for the engine."""

    def on_token(
        self,
        handle: int,
        sample: int,
        token: int,
        logprob: float | None,
        top: list[tuple[int, float]],
        text: str | None,
        cached: int,
        end: SampleEnd | None,
    ) -> None:
        """A new token of one sample; `logprob` is None unless they are wanted, `text` what became certain, None
        unless the spec wants text. `cached`: prompt tokens that came from the prefix cache. `end`: with its last.
        """

    def on_prompt(
        self, handle: int, sample: int, logprobs: list[list[tuple[int, float]]], embedding: np.ndarray | None
    ) -> None:
        """What was wanted of the prompt itself, before any token: the log probabilities of its tokens but the first,
        with the likeliest ones (empty if they are not wanted); its embedding.
        """

    def on_status(self, handle: int, status: GenerateRequestStatus) -> None:
        """Progress short of the end: ContextFinished with the first token, Generating with the second."""

    def on_begun(self, handle: int) -> None:
        """A step is about to compute this request alone, since servers were lost while they ran it."""

    def on_finish(
        self,
        handle: int,
        status: GenerateRequestStatus,
        error: AllSparkError | None,
        stat: dict[str, float],
        reason: str,
    ) -> None:
        """The last call for this request. `reason`: of the sample that ended last, as SampleEnd has it; "interrupted"
        or "error".
        """


def prompt_elements(
    sample: int, logprobs: list[list[tuple[int, float]]], embedding: np.ndarray | None
) -> GeneratedElements:
    """What `on_prompt` was told, as the API has it."""
    tensors = [] if embedding is None else [{"embedding": embedding}]
    return GeneratedElements(sample_index=sample, prompt_logprobs_list=logprobs, tensors_from_model_inference=tensors)


class QueueSink:
    """Feeds a ResultQueue."""

    def __init__(self, results: ResultQueue):
        self._results = results

    def on_token(
        self,
        handle: int,
        sample: int,
        token: int,
        logprob: float | None,
        top: list[tuple[int, float]],
        text: str | None,
        cached: int,
        end: SampleEnd | None,
    ) -> None:
        elements = GeneratedElements([token], prefix_cache_len=cached, prefix_len_cpu=cached, sample_index=sample)
        if logprob is not None:
            elements.token_logprobs_list = [logprob]
            elements.log_probs_list = [top]
        if text is not None:
            elements.text = text
        if end is not None:
            elements.finish_reason, elements.stop_string = end
        self._results.put(elements)

    def on_prompt(
        self, handle: int, sample: int, logprobs: list[list[tuple[int, float]]], embedding: np.ndarray | None
    ) -> None:
        self._results.put(prompt_elements(sample, logprobs, embedding))

    def on_status(self, handle: int, status: GenerateRequestStatus) -> None:
        self._results.set_status(status)

    def on_begun(self, handle: int) -> None:
        pass  # who runs an engine in its own process ends with it

    def on_finish(
        self,
        handle: int,
        status: GenerateRequestStatus,
        error: AllSparkError | None,
        stat: dict[str, float],
        reason: str,
    ) -> None:
        self._results.update_stat(stat)
        self._results.finish(status, error, reason)
