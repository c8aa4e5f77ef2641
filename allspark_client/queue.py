"""ResultQueue: where an engine leaves a request's tokens and its caller picks them up. Any thread may use it."""
from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator

from .errors import AllSparkError
from .types import GeneratedElements, GenerateRequestStatus, RequestStatInfo as StatInfo
from .waiting import LoopWaiters, resolved

_REASONS = {
    GenerateRequestStatus.GenerateFinished: "stop",
    GenerateRequestStatus.GenerateInterrupted: "interrupted",
    GenerateRequestStatus.InternalError: "error",
}


class ResultQueue:
    """Tokens and status of one request.

    Whatever has arrived is handed out once, merged into one GeneratedElements (of one sample). After the end, the
    getters return None; for a request that failed (InternalError) they raise its AllSparkError instead. Iterating
    raises also for one that was interrupted by others than its caller: what came is not the whole answer.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()     # a signal's handler may end what it has interrupted
        self._changed = threading.Condition(self._lock)
        self._elements: deque[GeneratedElements] = deque()
        self._status = GenerateRequestStatus.Init
        self._error: AllSparkError | None = None
        self._reason: str | None = None
        self._length = 0
        self._tasks = LoopWaiters()
        self.stat = StatInfo()
        #: what the chat's template has begun of the answer, such as "<think>\n"; known once the request is started
        self.opened = ""

    # --- the consumer's side -------------------------------------------------------------------------------------

    def Get(self, timeout_ms: float | None = None) -> GeneratedElements | None:
        """All new tokens; blocks until there are some. None: ended and all read, or `timeout_ms` is over."""
        deadline = None if timeout_ms is None else time.monotonic() + _seconds(timeout_ms)
        with self._changed:
            while not self._elements and not self._status.final:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._changed.wait(left)
            return self._take()

    def GetWithTimeout(self, timeout_ms: float) -> GeneratedElements | None:
        """As Get, but waits at most `timeout_ms` milliseconds."""
        return self.Get(timeout_ms)

    def GetNoWait(self) -> GeneratedElements | None:
        """What is there now; None if nothing is."""
        with self._lock:
            return self._take()

    def GenerateStatus(self) -> GenerateRequestStatus:
        """Where the request is; tokens may remain to be read when the status is already final."""
        with self._lock:
            return self._status

    def FinishReason(self) -> str | None:
        """Why the request ended: stop (end of sequence, or a stop string), length, stop_word, interrupted, error or tool_calls; None
        while it has not.
        """
        with self._lock:
            return self._reason

    def GeneratedLength(self) -> int:
        """Tokens generated so far, read or not, over all samples."""
        with self._lock:
            return self._length

    def RequestStatInfo(self) -> StatInfo:
        """Times and lengths of the request, a copy."""
        with self._lock:
            return copy.copy(self.stat)

    def wait_final(self, timeout: float | None = None) -> bool:
        """Block until the request has ended, at most `timeout` seconds; whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: self._status.final, timeout)

    def __iter__(self) -> Iterator[GeneratedElements]:
        while (elements := self.Get()) is not None:
            yield elements
        self._raise_error()

    async def __aiter__(self) -> AsyncIterator[GeneratedElements]:
        while (elements := await self.GetAsync()) is not None:
            yield elements
        self._raise_error()

    async def GetAsync(self, timeout_ms: float | None = None) -> GeneratedElements | None:
        """As Get, in an event loop."""
        deadline = None if timeout_ms is None else time.monotonic() + _seconds(timeout_ms)
        while True:
            with self._lock:
                if self._elements or self._status.final:
                    return self._take()
                news = self._tasks.add()
            if not await self._awaited(news, deadline):
                return self.GetNoWait()

    async def wait_final_async(self, timeout: float | None = None) -> bool:
        """As wait_final, in an event loop."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                if self._status.final:
                    return True
                news = self._tasks.add()
            if not await self._awaited(news, deadline):
                return self.GenerateStatus().final

    async def _awaited(self, news: asyncio.Future, deadline: float | None) -> bool:
        """Waits for a future of the queue's; whether it was resolved in time."""
        came = False
        try:
            if deadline is None:
                await news
                came = True
            else:
                came = await resolved(news, max(0.0, deadline - time.monotonic()))
        finally:
            if not came:
                with self._lock:
                    self._tasks.discard(news)
        return came

    def _take(self) -> GeneratedElements | None:
        if self._elements:
            return self._elements.popleft()
        if self._status is GenerateRequestStatus.InternalError:
            self._raise_error()
        return None

    def _raise_error(self) -> None:
        if self._error is not None:
            raise AllSparkError(self._error.status, self._error.message, self._error.retryable)

    # --- the engine's side ---------------------------------------------------------------------------------------

    def put(self, elements: GeneratedElements) -> None:
        """Hand over new tokens. The queue owns `elements` from now on."""
        with self._lock:
            if self._status.final:
                return
            self._length += len(elements.ids_from_generate)
            if self._elements and self._elements[-1].sample_index == elements.sample_index:
                self._elements[-1].extend(elements)
            else:
                self._elements.append(elements)
            self._wake()

    def set_status(self, status: GenerateRequestStatus) -> None:
        """Note progress, which never goes back; a final status goes through finish()."""
        with self._lock:
            if self._status < status <= GenerateRequestStatus.Generating:
                self._status = GenerateRequestStatus(status)

    def update_stat(self, values: dict[str, float]) -> None:
        """Take over fields of RequestStatInfo."""
        with self._lock:
            self.stat.update(values)

    def finish(self, status: GenerateRequestStatus, error: AllSparkError | None = None,
               reason: str | None = None) -> None:
        """End the request; the first call counts, tokens put afterwards are dropped.

        `error`: with InternalError, what went wrong; with GenerateInterrupted, who did that, unless the caller did.
        `reason`: what FinishReason() says, where the status does not tell.
        """
        with self._lock:
            if self._status.final:
                return
            self._status, self._error = GenerateRequestStatus(status), error
            self._reason = reason or _REASONS[self._status]
            self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        self._tasks.wake()


def _seconds(timeout_ms: float) -> float:
    if isinstance(timeout_ms, bool) or not isinstance(timeout_ms, (int, float)):
        raise TypeError(f"timeout_ms must be a number of milliseconds, not {type(timeout_ms).__name__}")
    if timeout_ms < 0:
        raise ValueError(f"timeout_ms={timeout_ms} is negative")
    return timeout_ms / 1000.0
