"""A request as a context manager that collects its output."""
from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import AllSparkError
from .queue import ResultQueue
from .request import RequestSpec
from .types import GeneratedElements, GenerateRequestStatus

if TYPE_CHECKING:
    from .async_client import AsyncClientEngine
    from .engine import AbstractEngine

logger = logging.getLogger(__name__)


@dataclass
class Usage:
    """Token counts of a request, over all samples."""

    prompt_tokens: int = 0
    cached_tokens: int = 0          #: prompt tokens that came from the prefix cache
    generated_tokens: int = 0


class _Output:
    """The output of a request, as far as it has been read."""

    def __init__(self, spec: RequestSpec):
        self._spec = spec
        self._handle = 0
        self._queue: ResultQueue | None = None
        #: the output of each sample so far, with log probabilities
        self.samples = [GeneratedElements(sample_index=i) for i in range(spec.config.n)]

    @property
    def text(self) -> str:
        """The text read so far; with n > 1 that of the first sample."""
        return self.samples[0].text

    @property
    def ids(self) -> list[int]:
        """The token ids read so far; with n > 1 those of the first sample."""
        return self.samples[0].ids_from_generate

    @property
    def finish_reason(self) -> str | None:
        """As ResultQueue.FinishReason: None until the request has ended."""
        return self.queue.FinishReason()

    @property
    def status(self) -> GenerateRequestStatus:
        """The request's status."""
        return self.queue.GenerateStatus()

    @property
    def usage(self) -> Usage:
        """Token counts so far, including tokens that are not read yet."""
        prompt = self._spec.prompt_len
        cached = max(sample.prefix_cache_len for sample in self.samples)
        return Usage(prompt, min(cached, prompt), self.queue.GeneratedLength())

    @property
    def queue(self) -> ResultQueue:
        """The request's result queue. Raises RuntimeError before the block is entered."""
        if self._queue is None:
            raise RuntimeError("the request is started by entering it: with engine.generate(…) as generation")
        return self._queue

    def _begin(self) -> None:
        if self._queue is not None:
            raise RuntimeError("a generation is entered once; call engine.generate again for another")

    def _take(self, elements: GeneratedElements) -> GeneratedElements:
        self.samples[elements.sample_index].extend(elements)
        return elements

    def _release_failed(self, error: AllSparkError) -> None:
        """Ignore an error of the release: the engine was closed or the model released, and nothing is left to free."""
        logger.debug("releasing request %d: %s", self._handle, error)


class Generation(_Output):
    """A request of Engine.generate or ClientEngine.generate: started by entering, released by leaving the block."""

    def __init__(self, engine: AbstractEngine, spec: RequestSpec):
        super().__init__(spec)
        self._engine = engine

    def __enter__(self) -> Generation:
        self._begin()
        _, self._handle, self._queue = self._engine._start(self._spec)
        return self

    def __exit__(self, *_: Any) -> None:
        try:
            self._engine.release_request(self._spec.model, self._handle)
        except AllSparkError as error:
            self._release_failed(error)

    def __iter__(self) -> Iterator[GeneratedElements]:
        """Yield new tokens as they arrive.

        Raises AllSparkError if the request fails, or is interrupted by anything but its caller.
        """
        for elements in self.queue:
            yield self._take(elements)

    def read(self) -> Generation:
        """Read all tokens until the request ends; returns self. Raises as iteration does."""
        for _ in self:
            pass
        return self

    def cancel(self) -> None:
        """End the request with the status GenerateInterrupted. Its tokens so far can still be read."""
        self._engine.stop_request(self._spec.model, self._handle)


class AsyncGeneration(_Output):
    """A request of AsyncClientEngine.generate: started by entering, released by leaving the `async with` block."""

    def __init__(self, engine: AsyncClientEngine, spec: RequestSpec):
        super().__init__(spec)
        self._engine = engine

    async def __aenter__(self) -> AsyncGeneration:
        self._begin()
        _, self._handle, self._queue = await self._engine._start(self._spec)
        return self

    async def __aexit__(self, *_: Any) -> None:
        try:
            await self._engine.release_request(self._spec.model, self._handle)
        except AllSparkError as error:
            self._release_failed(error)

    async def __aiter__(self) -> AsyncIterator[GeneratedElements]:
        """As iteration of Generation."""
        async for elements in self.queue:
            yield self._take(elements)

    async def read(self) -> AsyncGeneration:
        """Read all tokens until the request ends; returns self. Raises as iteration does."""
        async for _ in self:
            pass
        return self

    async def cancel(self) -> None:
        """End the request with the status GenerateInterrupted. Its tokens so far can still be read."""
        await self._engine.stop_request(self._spec.model, self._handle)
