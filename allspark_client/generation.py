"""A request as a context manager, which gathers what comes of it."""
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
    """Tokens of a request, of all its samples together."""

    prompt_tokens: int = 0
    cached_tokens: int = 0          #: of the prompt's, those that came from the prefix cache
    generated_tokens: int = 0


class _Output:
    """What has been read of a request so far."""

    def __init__(self, spec: RequestSpec):
        self._spec = spec
        self._handle = 0
        self._queue: ResultQueue | None = None
        #: each sample's output as far as it has been read; log probabilities too
        self.samples = [GeneratedElements(sample_index=i) for i in range(spec.config.n)]

    @property
    def text(self) -> str:
        """The text of what has been read; with n > 1 the first sample's."""
        return self.samples[0].text

    @property
    def ids(self) -> list[int]:
        """The ids that have been read; with n > 1 the first sample's."""
        return self.samples[0].ids_from_generate

    @property
    def finish_reason(self) -> str | None:
        """As ResultQueue.FinishReason: None while the request goes on."""
        return self.queue.FinishReason()

    @property
    def status(self) -> GenerateRequestStatus:
        """Where the request is."""
        return self.queue.GenerateStatus()

    @property
    def usage(self) -> Usage:
        """Tokens so far, read or not."""
        prompt = self._spec.prompt_len
        cached = max(sample.prefix_cache_len for sample in self.samples)
        return Usage(prompt, min(cached, prompt), self.queue.GeneratedLength())

    @property
    def queue(self) -> ResultQueue:
        """Where the request's output arrives. RuntimeError before it is started."""
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
        """The engine was closed, or the model released, meanwhile: nothing is left to free."""
        logger.debug("releasing request %d: %s", self._handle, error)


class Generation(_Output):
    """engine.generate(…) of an Engine or a ClientEngine."""

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
        """New tokens as they come. Raises AllSparkError if the request fails, or is ended by others than its caller."""
        for elements in self.queue:
            yield self._take(elements)

    def read(self) -> Generation:
        """Read to the end; returns self."""
        for _ in self:
            pass
        return self

    def cancel(self) -> None:
        """End the request: status GenerateInterrupted. What was generated can still be read."""
        self._engine.stop_request(self._spec.model, self._handle)


class AsyncGeneration(_Output):
    """engine.generate(…) of an AsyncClientEngine."""

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
        """As Generation's."""
        async for elements in self.queue:
            yield self._take(elements)

    async def read(self) -> AsyncGeneration:
        """Read to the end; returns self."""
        async for _ in self:
            pass
        return self

    async def cancel(self) -> None:
        """End the request: status GenerateInterrupted. What was generated can still be read."""
        await self._engine.stop_request(self._spec.model, self._handle)
