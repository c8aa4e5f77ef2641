"""ResultQueue: the engine puts a request's tokens into it, and the caller takes them out."""
from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from .errors import AllSparkError
from .types import GeneratedElements, GenerateRequestStatus, RequestStatInfo as StatInfo
from .waiting import LoopWaiters, resolved

_REASONS = {
    GenerateRequestStatus.GenerateFinished: "stop",
    GenerateRequestStatus.GenerateInterrupted: "interrupted",
    GenerateRequestStatus.InternalError: "error",
}


class ResultQueue:
    """The tokens and the status of one request. Any thread may call the methods; coroutines end in Async.

    The getters return each token once. Tokens of one sample that have arrived together are merged into one
    GeneratedElements. After the end, once all tokens are read, getters return None; if the request has failed
    (InternalError) they raise its AllSparkError instead. Iteration, `for elements in queue` or `async for` in an event
    loop, also raises if the request was interrupted by anything but its caller, since the output is then incomplete.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()     # re-entrant: a signal handler may end the request whose getter it interrupts
        self._changed = threading.Condition(self._lock)
        self._elements: deque[GeneratedElements] = deque()
        self._status = GenerateRequestStatus.Init
        self._ended = False                # the status is final
        self._waiting = 0                  # threads that wait for a change
        self._error: AllSparkError | None = None
        self._reason: str | None = None
        self._length = 0
        self._tasks = LoopWaiters()
        self.stat = StatInfo()
        #: the start of the answer that the chat template wrote, such as "<think>\n"; known once the request is accepted
        self.opened = ""

    # --- the consumer's side -------------------------------------------------------------------------------------

    def Get(self, timeout_ms: float | None = None) -> GeneratedElements | None:
        """Wait for new tokens and return them.

        Returns None once the request has ended and all tokens are read, or when `timeout_ms` milliseconds are over.
        Raises AllSparkError if the request has failed.
        """
        timeout = None if timeout_ms is None else _seconds(timeout_ms)
        with self._changed:
            if not self._wait_for(lambda: bool(self._elements) or self._ended, timeout):
                return None
            return self._take()

    def GetWithTimeout(self, timeout_ms: float) -> GeneratedElements | None:
        """As Get, waiting at most `timeout_ms` milliseconds."""
        return self.Get(timeout_ms)

    def GetNoWait(self) -> GeneratedElements | None:
        """New tokens that have already arrived, or None. Raises AllSparkError if the request has failed."""
        with self._lock:
            return self._take()

    def GenerateStatus(self) -> GenerateRequestStatus:
        """The request's status. Tokens may remain to be read when the status is already final."""
        with self._lock:
            return self._status

    def FinishReason(self) -> str | None:
        """Why the request ended; None while it has not.

        "stop": an end-of-sequence token or a stop string; "length": the maximum length; "stop_word": an entry of
        stop_words_ids; "tool_calls": the answer ended with tool calls; "interrupted", "error".
        """
        with self._lock:
            return self._reason

    def GeneratedLength(self) -> int:
        """The number of tokens generated so far, read or not, over all samples."""
        with self._lock:
            return self._length

    def RequestStatInfo(self) -> StatInfo:
        """The times and lengths of the request, as a copy."""
        with self._lock:
            return copy.copy(self.stat)

    def wait_final(self, timeout: float | None = None) -> bool:
        """Wait until the request has ended, at most `timeout` seconds; returns whether it has."""
        with self._changed:
            return self._wait_for(lambda: self._ended, timeout)

    def __iter__(self) -> Iterator[GeneratedElements]:
        while (elements := self.Get()) is not None:
            yield elements
        self._raise_error()

    async def __aiter__(self) -> AsyncIterator[GeneratedElements]:
        while (found := self._take_or_wait()) is not None:
            if isinstance(found, GeneratedElements):
                yield found
            else:
                await self._arrival(found)
        self._raise_error()

    async def GetAsync(self, timeout_ms: float | None = None) -> GeneratedElements | None:
        """As Get, in an event loop."""
        deadline = None if timeout_ms is None else time.monotonic() + _seconds(timeout_ms)
        while True:
            with self._lock:
                if self._elements or self._ended:
                    return self._take()
                news = self._tasks.add()
            if not await self._awaited(news, deadline):
                return self.GetNoWait()

    async def wait_final_async(self, timeout: float | None = None) -> bool:
        """As wait_final, in an event loop."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                if self._ended:
                    return True
                news = self._tasks.add()
            if not await self._awaited(news, deadline):
                return self.GenerateStatus().final

    def _take_or_wait(self) -> GeneratedElements | asyncio.Future[None] | None:
        """New tokens; a future for `_arrival` if there are none yet; None after the end. As GetAsync, but iteration
        needs no coroutine a token, nor the HTTP server, which reads with this method.
        """
        with self._lock:
            if self._elements:
                return self._elements.popleft()
            return self._take() if self._ended else self._tasks.add()

    async def _arrival(self, news: asyncio.Future[None]) -> None:
        try:
            await news
        except BaseException:
            with self._lock:
                self._tasks.discard(news)
            raise

    async def _awaited(self, news: asyncio.Future[None], deadline: float | None) -> bool:
        """Wait for a future of `_tasks`; returns whether it was resolved in time."""
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

    def _wait_for(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Wait for a condition, at most `timeout` seconds; returns whether it holds. The caller holds the lock."""
        self._waiting += 1
        try:
            return self._changed.wait_for(condition, timeout)
        finally:
            self._waiting -= 1

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
        """Add new tokens. The queue owns `elements` from now on."""
        with self._lock:
            if self._ended:
                return
            self._length += len(elements.ids_from_generate)
            if self._elements and self._elements[-1].sample_index == elements.sample_index:
                self._elements[-1].extend(elements)
            else:
                self._elements.append(elements)
            self._wake()

    def put_token(self, sample: int, token: int, text: str, logprob: float | None, top: list[tuple[int, float]],
                  cached: tuple[int, int, int]) -> None:
        """Add one token; the arguments are those of GeneratedElements.of_token."""
        with self._lock:
            if self._ended:
                return
            self._length += 1
            if self._elements and (last := self._elements[-1]).sample_index == sample:
                last.ids_from_generate.append(token)
                last._texts.append(text)
                if logprob is not None:
                    last.token_logprobs_list.append(logprob)
                    last.log_probs_list.append(top)
            else:
                self._elements.append(GeneratedElements.of_token(sample, token, text, logprob, top, cached))
            self._wake()

    def set_status(self, status: GenerateRequestStatus) -> None:
        """Advance the status to one that is not final; it never goes back. A final status is set by finish()."""
        with self._lock:
            if self._status < status <= GenerateRequestStatus.Generating:
                self._status = GenerateRequestStatus(status)

    def update_stat(self, values: dict[str, float]) -> None:
        """Set these fields of RequestStatInfo."""
        with self._lock:
            self.stat.update(values)

    def finish(self, status: GenerateRequestStatus, error: AllSparkError | None = None,
               reason: str | None = None) -> None:
        """End the request. Later calls have no effect, and tokens that are put afterwards are dropped.

        `error`: for InternalError, what went wrong; for GenerateInterrupted, why, unless the caller asked for it.
        `reason`: the value of FinishReason(), if the status does not imply it.
        """
        with self._lock:
            if self._ended:
                return
            self._status, self._error = GenerateRequestStatus(status), error
            self._ended = self._status.final
            self._reason = reason or _REASONS[self._status]
            self._wake()

    def _wake(self) -> None:
        if self._waiting:
            self._changed.notify_all()
        self._tasks.wake()


def _seconds(timeout_ms: float) -> float:
    if isinstance(timeout_ms, bool) or not isinstance(timeout_ms, (int, float)):
        raise TypeError(f"timeout_ms must be a number of milliseconds, not {type(timeout_ms).__name__}")
    if timeout_ms < 0:
        raise ValueError(f"timeout_ms={timeout_ms} is negative")
    return timeout_ms / 1000.0
