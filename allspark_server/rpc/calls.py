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
#: bytes of one tenant's requests that may wait to be read; a request takes some beside its message
_MAX_INCOMING, _REQUEST_BYTES = 32 << 20, 4096
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


class Incoming:
    """The bytes of each tenant's requests that wait for a thread, or that a thread reads. Used on one event loop."""

    def __init__(self) -> None:
        self._sizes: Counter[str] = Counter()
        self._less = asyncio.Event()    # there is less of some tenant's

    def add(self, tenant: str, size: int) -> None:
        """Count a request whose message has `size` bytes."""
        self._sizes[tenant] += size + _REQUEST_BYTES

    def remove(self, tenant: str, size: int) -> None:
        """A request has been read."""
        self._sizes[tenant] -= size + _REQUEST_BYTES
        if not self._sizes[tenant]:
            del self._sizes[tenant]
        self._less.set()

    def full(self, tenant: str) -> bool:
        """Whether the tenant has to wait."""
        return self._sizes[tenant] > _MAX_INCOMING

    async def room(self, tenant: str) -> None:
        """Wait until the tenant has room."""
        while self.full(tenant):
            self._less.clear()
            await self._less.wait()


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


def is_tiny(size: int, request: pb.GenerateRequest) -> bool:
    """Whether the event loop may start a request itself, which costs less than two changes of threads.

    The request is small (`size` bytes), has ids instead of text, has no grammar, and asks for one sample.
    """
    return (size <= _TINY_MESSAGE and request.HasField("input_ids") and request.config.n <= 1
            and grammar_of(request) is None)


def grammar_of(request: pb.GenerateRequest) -> int | None:
    """A hash of what a request's grammar depends on; None for a request without. To compile one may take a second."""
    chat = request.chat_options
    forced = chat.tool_choice_json not in ("", '"auto"', '"none"')
    if not (forced or '"strict"' in chat.tools_json or request.config.HasField("response_format_json")):
        return None
    return hash((request.model, request.config.response_format_json, chat.tools_json, chat.tool_choice_json,
                 chat.chat_format, chat.parallel_tool_calls))


def known_error(error: BaseException) -> Exception:
    """The error itself if it is one of those that a request may cause; another one, such as a panic in a library, is
    logged, and the client gets an AllSparkError.
    """
    if isinstance(error, (AllSparkError, ValueError, TypeError)):
        return error
    logger.error("a request failed", exc_info=error)
    if isinstance(error, Exception):
        return error
    return AllSparkError(AsStatus.ALLSPARK_UNKNOWN_ERROR, f"the request ended with {type(error).__name__}")


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
