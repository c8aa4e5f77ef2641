"""Helpers of calls: limits of what clients send, the first message, errors, and log lines about clients."""
from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import Message

from allspark_client import convert
from allspark_client._proto import allspark_pb2 as pb
from allspark_client.errors import AllSparkError, AsStatus

logger = logging.getLogger(__name__)

EOF: Any = grpc.aio.EOF     # type: ignore[attr-defined]    # missing in grpc-stubs

#: how long a session may take to send its first message, s; and other calls, whose message may be large
HELLO_SECONDS, RECEIVE_SECONDS = 10.0, 60.0
_TINY_MESSAGE = 2 << 10
_QUIET_SECONDS = 10.0       # between two log lines about wrong calls
_CODES = {
    AsStatus.ALLSPARK_PARAM_ERROR: grpc.StatusCode.INVALID_ARGUMENT,
    AsStatus.ALLSPARK_MEMORY_ERROR: grpc.StatusCode.RESOURCE_EXHAUSTED,
    AsStatus.ALLSPARK_CACHE_MEMORY_OUT: grpc.StatusCode.RESOURCE_EXHAUSTED,
    AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR: grpc.StatusCode.RESOURCE_EXHAUSTED,
    AsStatus.ALLSPARK_INVALID_CALL_ERROR: grpc.StatusCode.FAILED_PRECONDITION,
    AsStatus.ALLSPARK_REQUEST_DENIED: grpc.StatusCode.PERMISSION_DENIED,
}


class Writer:
    """The context of a call, for servicers that write messages instead of bytes."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]):
        self._context = context

    async def write(self, message: Message) -> None:
        """Send a message."""
        await self._context.write(message.SerializeToString())


class RareLog:
    """Logs a warning about clients at most every ten seconds: clients could cause any number of them."""

    def __init__(self, text: str):
        self._text, self._next, self._more = text, 0.0, 0

    def __call__(self, peer: str) -> None:
        """Warn about a client."""
        if (now := time.monotonic()) < self._next:
            self._more += 1
            return
        self._next = now + _QUIET_SECONDS
        logger.warning(self._text + "; %d more before", peer, self._more)
        self._more = 0


class Allowance:
    """A token bucket that limits what a stream may send: `burst` bytes at once, `rate` bytes per second in the long
    run.

    Messages are copied and decoded under the interpreter lock, which the threads of all other clients need, too.
    """

    def __init__(self, burst: int, rate: int):
        self._burst, self._rate = burst, rate
        self._left, self._at = float(burst), time.monotonic()

    def take(self, size: int) -> float:
        """Count a message of `size` bytes; returns the seconds until the next message may be read."""
        now = time.monotonic()
        self._left = min(self._burst, self._left + self._rate * (now - self._at)) - size
        self._at = now
        return max(0.0, -self._left / self._rate)


class ConcurrencyLimits:
    """Limits how many calls of each client are handled at the same time. Used on one event loop."""

    def __init__(self, most: int):
        self._most = most
        self._semaphores: dict[str, asyncio.Semaphore] = {}
        self._users: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def enter(self, client: str) -> AsyncIterator[None]:
        """A context manager around a call. Raises AllSparkError if the client's other calls do not finish in time."""
        semaphore = self._semaphores.setdefault(client, asyncio.Semaphore(self._most))
        self._users[client] += 1
        try:
            try:
                await asyncio.wait_for(semaphore.acquire(), RECEIVE_SECONDS)
            except asyncio.TimeoutError:
                raise AllSparkError(AsStatus.ALLSPARK_REQUEST_DENIED,
                                    f"{self._most} other calls of this client were still pending after "
                                    f"{RECEIVE_SECONDS:g} s", retryable=True) from None
            try:
                yield
            finally:
                semaphore.release()
        finally:
            self._users[client] -= 1
            if not self._users[client]:
                del self._semaphores[client], self._users[client]


def is_tiny(data: bytes, request: pb.GenerateRequest) -> bool:
    """Whether the event loop may start a request itself, which costs less than two changes of threads.

    The request is small, has ids instead of text, and asks for one sample.
    """
    return len(data) <= _TINY_MESSAGE and request.HasField("input_ids") and request.config.n <= 1


def is_guided(request: pb.GenerateRequest) -> bool:
    """Whether a request has a grammar, which may take a second to compile."""
    forced = request.chat_options.tool_choice_json not in ("", '"auto"', '"none"')
    return forced or '"strict"' in request.chat_options.tools_json or request.config.HasField("response_format_json")


async def receive(context: grpc.aio.ServicerContext[Any, Any], seconds: float = RECEIVE_SECONDS) -> bytes:
    """The first message of a call. Raises ValueError or AllSparkError if none arrives within `seconds`."""
    try:
        data: bytes = await asyncio.wait_for(context.read(), seconds)
    except asyncio.TimeoutError:
        raise AllSparkError(AsStatus.ALLSPARK_REQUEST_DENIED,
                            f"a call's first message must come within {seconds:g} s") from None
    if data is EOF:
        raise ValueError("the call ended before its first message")
    return data


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> NoReturn:
    """End a call with an error, which the client raises again. Never returns."""
    message = convert.error_to_pb(error)
    if message.elsewhere:
        code = grpc.StatusCode.UNAVAILABLE
    elif message.kind == pb.ALLSPARK_ERROR:
        code = _CODES.get(AsStatus(message.status), grpc.StatusCode.INTERNAL)
    else:
        code = grpc.StatusCode.INVALID_ARGUMENT
    await context.abort(code, message.message[:1000],
                        trailing_metadata=((convert.ERROR_KEY, message.SerializeToString()),))
