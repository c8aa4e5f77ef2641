"""An AbstractEngine that calls an AsyncClientEngine, so that one suite tests both kinds of client."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

from allspark_client import AbstractEngine, AsyncClientEngine, GeneratedElements


class Loop:
    """An event loop in a separate thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class BlockingGeneration:
    def __init__(self, loop: Loop, generation: Any):
        self._loop, self._generation = loop, generation

    def __enter__(self) -> BlockingGeneration:
        self._loop.run(self._generation.__aenter__())
        return self

    def __exit__(self, *raised: Any) -> None:
        self._loop.run(self._generation.__aexit__(*raised))

    def __iter__(self) -> Iterator[GeneratedElements]:
        iterator = self._generation.__aiter__()
        while True:
            try:
                yield self._loop.run(iterator.__anext__())
            except StopAsyncIteration:
                return

    def read(self) -> BlockingGeneration:
        self._loop.run(self._generation.read())
        return self

    def cancel(self) -> None:
        self._loop.run(self._generation.cancel())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generation, name)


def _blocking(name: str) -> Any:
    return lambda self, *args, **keywords: self._loop.run(getattr(self._engine, name)(*args, **keywords))


class BlockingEngine(AbstractEngine):
    def __init__(self, *args: Any, **keywords: Any):
        self._loop = Loop()
        self._engine = AsyncClientEngine(*args, **keywords)

    def generate(self, *args: Any, **keywords: Any) -> BlockingGeneration:
        return BlockingGeneration(self._loop, self._engine.generate(*args, **keywords))

    def close(self) -> None:
        self._loop.run(self._engine.close())
        self._loop.stop()

    def _tokenize(self, *args: Any) -> list[int]:
        raise NotImplementedError("tokenize() is the engine's own")

    for _name, _method in inspect.getmembers(AsyncClientEngine, inspect.iscoroutinefunction):
        if _name not in ("close",) and not _name.startswith("__"):
            locals()[_name] = _blocking(_name)
