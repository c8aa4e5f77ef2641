"""How tasks of event loops wait for what other threads do."""
from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

_together = threading.local()


@contextlib.contextmanager
def waking_together() -> Iterator[None]:
    """Tasks that this thread wakes meanwhile are woken at the end, all of an event loop with one call: that call costs
    more than what a task is woken for, a token.
    """
    _together.futures = futures = []
    try:
        yield
    finally:
        _together.futures = None
        _resolve_in_loops(futures)


class LoopWaiters:
    """Tasks that wait for one thing. All calls are guarded by the lock that guards the thing."""

    def __init__(self) -> None:
        self._futures: list[asyncio.Future] = []

    def add(self) -> asyncio.Future:
        """A future of the running event loop that `wake` resolves."""
        future = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        return future

    def discard(self, future: asyncio.Future) -> None:
        """Forget a future that nobody awaits any more."""
        if future in self._futures:
            self._futures.remove(future)

    def wake(self) -> None:
        """Resolve all futures; on any thread."""
        if not self._futures:
            return
        futures, self._futures = self._futures, []
        together = getattr(_together, "futures", None)
        if together is None:
            _resolve_in_loops(futures)
        else:
            together.extend(futures)


class Event(threading.Event):
    """An event that tasks can await, too."""

    def __init__(self) -> None:
        super().__init__()
        self._guard = threading.Lock()
        self._waiters = LoopWaiters()

    def set(self) -> None:
        with self._guard:
            super().set()
            self._waiters.wake()

    async def wait_async(self, timeout: float) -> bool:
        """As wait, in an event loop."""
        with self._guard:
            if self.is_set():
                return True
            future = self._waiters.add()
        try:
            await resolved(future, timeout)
        finally:
            with self._guard:
                self._waiters.discard(future)
        return self.is_set()


async def resolved(future: asyncio.Future, timeout: float) -> bool:
    """Whether a future gets its result in time. `asyncio.wait_for` would do, but before Python 3.12 it takes no notice
    of a cancellation that comes together with the result: then a request whose client has gone would run on.
    """
    return bool((await asyncio.wait((future,), timeout=timeout))[0])


def _resolve_in_loops(futures: list[asyncio.Future]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future]] = {}
    for future in futures:
        by_loop.setdefault(future.get_loop(), []).append(future)
    for loop, own in by_loop.items():
        with contextlib.suppress(RuntimeError):     # that loop was closed with the task unfinished: nobody waits
            loop.call_soon_threadsafe(_resolve, own)


def _resolve(futures: list[asyncio.Future]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
