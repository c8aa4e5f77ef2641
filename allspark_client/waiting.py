"""How tasks of event loops wait for other threads."""
from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

_together = threading.local()


@contextlib.contextmanager
def waking_together() -> Iterator[None]:
    """Delay the waking of tasks by this thread to the end of the block, with one call per event loop.

    The call that wakes an event loop costs more than the handling of a token.
    """
    futures: list[asyncio.Future[None]] = []
    _together.futures = futures
    try:
        yield
    finally:
        _together.futures = None
        _resolve_in_loops(futures)


class LoopWaiters:
    """The tasks that wait for a change of some object. Callers hold the lock of that object."""

    def __init__(self) -> None:
        self._futures: list[asyncio.Future[None]] = []

    def add(self) -> asyncio.Future[None]:
        """A new future of the running event loop, which `wake` resolves."""
        future = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        return future

    def discard(self, future: asyncio.Future[None]) -> None:
        """Forget a future that no task awaits any more."""
        if future in self._futures:
            self._futures.remove(future)

    def wake(self) -> None:
        """Resolve all futures. Any thread may call this."""
        if not self._futures:
            return
        futures, self._futures = self._futures, []
        together = getattr(_together, "futures", None)
        if together is None:
            _resolve_in_loops(futures)
        else:
            together.extend(futures)


class Event(threading.Event):
    """A threading.Event that tasks can await, too."""

    def __init__(self) -> None:
        super().__init__()
        self._guard = threading.Lock()
        self._waiters = LoopWaiters()

    def set(self) -> None:
        """As threading.Event.set; also wakes the tasks."""
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


async def resolved(future: asyncio.Future[None], timeout: float) -> bool:
    """Whether a future gets its result within `timeout` seconds.

    `asyncio.wait_for` is not used: before Python 3.12 it ignores a cancellation that arrives together with the result,
    and a request whose client has disconnected would continue.
    """
    return bool((await asyncio.wait((future,), timeout=timeout))[0])


def _resolve_in_loops(futures: list[asyncio.Future[None]]) -> None:
    if not futures:
        return
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for future in futures:
        by_loop.setdefault(future.get_loop(), []).append(future)
    for loop, own in by_loop.items():
        with contextlib.suppress(RuntimeError):     # the loop was closed before its task had ended
            loop.call_soon_threadsafe(_resolve, own)


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
