"""Single calls of the service: when they are read, their first message, their refusal, and what is logged of them."""
from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator

import grpc
import grpc.aio
from google.protobuf.message import Message

from allspark_client import convert
from allspark_client._proto import allspark_pb2 as pb
from allspark_client.errors import AllSparkError, AsStatus

logger = logging.getLogger(__name__)

#: how long a stream may stay without its first message, and other calls, whose message may be large
HELLO_SECONDS, RECEIVE_SECONDS = 10.0, 60.0
_TINY_MESSAGE = 2 << 10
_QUIET_SECONDS = 10.0       # between two log lines on what clients do wrong
_CODES = {
    AsStatus.ALLSPARK_PARAM_ERROR: grpc.StatusCode.INVALID_ARGUMENT,
    AsStatus.ALLSPARK_MEMORY_ERROR: grpc.StatusCode.RESOURCE_EXHAUSTED,
    AsStatus.ALLSPARK_CACHE_MEMORY_OUT: grpc.StatusCode.RESOURCE_EXHAUSTED,
    AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR: grpc.StatusCode.RESOURCE_EXHAUSTED,
    AsStatus.ALLSPARK_INVALID_CALL_ERROR: grpc.StatusCode.FAILED_PRECONDITION,
    AsStatus.ALLSPARK_REQUEST_DENIED: grpc.StatusCode.PERMISSION_DENIED,
}


class Writer:
    """The context of a call to servicers that write messages."""

    def __init__(self, context: grpc.aio.ServicerContext):
        self._context = context

    async def write(self, message: Message) -> None:
        await self._context.write(message.SerializeToString())


class RareLog:
    """Warns of what clients can bring about as often as they like, but not as often."""

    def __init__(self, text: str):
        self._text, self._next, self._more = text, 0.0, 0

    def __call__(self, peer: str) -> None:
        if (now := time.monotonic()) < self._next:
            self._more += 1
            return
        self._next = now + _QUIET_SECONDS
        logger.warning(self._text + "; %d more before", peer, self._more)
        self._more = 0


class Allowance:
    """What a stream may send: `burst` bytes at once, `rate` bytes a second for long. Its messages are copied and
    decoded under the interpreter's lock, which those who make other clients' messages need as well.
    """

    def __init__(self, burst: int, rate: int):
        self._burst, self._rate = burst, rate
        self._left, self._at = float(burst), time.monotonic()

    def take(self, size: int) -> float:
        """Notes a message; returns the seconds until the next one may be read."""
        now = time.monotonic()
        self._left = min(self._burst, self._left + self._rate * (now - self._at)) - size
        self._at = now
        return max(0.0, -self._left / self._rate)


class Gates:
    """Lets so many calls of each client in at once. Used on one event loop."""

    def __init__(self, most: int):
        self._most = most
        self._gates: dict[str, asyncio.Semaphore] = {}
        self._users: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def enter(self, client: str) -> AsyncIterator[None]:
        """Raises AllSparkError if the others do not get on."""
        gate = self._gates.setdefault(client, asyncio.Semaphore(self._most))
        self._users[client] += 1
        try:
            try:
                await asyncio.wait_for(gate.acquire(), RECEIVE_SECONDS)
            except asyncio.TimeoutError:
                raise AllSparkError(AsStatus.ALLSPARK_REQUEST_DENIED,
                                    f"{self._most} other calls of this client were on their way for "
                                    f"{RECEIVE_SECONDS:g} s", retryable=True) from None
            try:
                yield
            finally:
                gate.release()
        finally:
            self._users[client] -= 1
            if not self._users[client]:
                del self._gates[client], self._users[client]


def is_tiny(data: bytes, request: pb.GenerateRequest) -> bool:
    """Whether the event loop may take a request itself, which is less work than two changes of threads: nothing is
    tokenized, and nothing multiplies.
    """
    return len(data) <= _TINY_MESSAGE and request.HasField("input_ids") and request.config.n <= 1


def is_guided(request: pb.GenerateRequest) -> bool:
    """Whether it has a grammar, which may take a second to compile."""
    forced = request.chat_options.tool_choice_json not in ("", '"auto"', '"none"')
    return forced or '"strict"' in request.chat_options.tools_json or request.config.HasField("response_format_json")


async def receive(context: grpc.aio.ServicerContext, seconds: float = RECEIVE_SECONDS) -> bytes:
    """The first message of a call. Raises ValueError or AllSparkError if none comes."""
    try:
        data = await asyncio.wait_for(context.read(), seconds)
    except asyncio.TimeoutError:
        raise AllSparkError(AsStatus.ALLSPARK_REQUEST_DENIED,
                            f"a call's first message must come within {seconds:g} s") from None
    if data is grpc.aio.EOF:
        raise ValueError("the call ended before its first message")
    return data


async def abort(context: grpc.aio.ServicerContext, error: BaseException) -> None:
    """End a call with an error that the client raises again as it was; never returns."""
    message = convert.error_to_pb(error)
    if message.elsewhere:
        code = grpc.StatusCode.UNAVAILABLE
    elif message.kind == pb.ALLSPARK_ERROR:
        code = _CODES.get(AsStatus(message.status), grpc.StatusCode.INTERNAL)
    else:
        code = grpc.StatusCode.INVALID_ARGUMENT
    await context.abort(code, message.message[:1000],
                        trailing_metadata=((convert.ERROR_KEY, message.SerializeToString()),))
