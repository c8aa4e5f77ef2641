"""Reads bodies of requests, with limits of size, structure, time and total memory."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from allspark_server.allowances import Allowances
from allspark_server.json_structure import JsonStructure

from .errors import ApiError

Receive = Callable[[], Awaitable[dict[str, Any]]]
#: how long a client may send nothing of a body, and how long a whole body may take, s
CHUNK_SECONDS, WHOLE_SECONDS = 20.0, 300.0
#: bytes of bodies that one client may send at once, and per second
_BURST, _RATE = 16 << 20, 4 << 20
#: the memory that a body and what is made of it take, in multiples of its length: the body, its text, the message for
#: the pool, and this as it is sent. Where not all of it is ASCII, each character of the text may take 4 bytes
_ASCII_COST, _WIDE_COST = 5, 9
#: the part of the memory for bodies that one client may take
_CLIENT_PART = 0.75


class ClientDisconnected(Exception):
    """The client has closed the connection."""


class BodyReader:
    """Reads bodies of at most `limit` bytes each. All bodies of live requests take at most `all_together` bytes."""

    def __init__(self, limit: int, all_together: int):
        self.limit, self._most = limit, max(limit * _WIDE_COST, all_together)
        #: how many bytes each client may send
        self.allowances = Allowances(_BURST, _RATE)
        self._held = 0
        self._held_by: Counter[str] = Counter()

    def share(self, client: str) -> Share:
        """The memory that a client's request takes for its body, for a with statement."""
        return Share(self, client)

    def hold(self, client: str, size: int) -> None:
        """Counts `size` further bytes of memory. Raises ApiError (503) if there are too many."""
        self._held += size
        self._held_by[client] += size
        if self._held > self._most:
            raise ApiError(503, "Too many large requests are being served; try again later", retry_after=1)
        if self._held_by[client] > max(self._most * _CLIENT_PART, self.limit * _WIDE_COST):
            raise ApiError(503, "Too many large requests of this client are being served; send fewer at a time, or "
                                "try again later", retry_after=1)

    def release(self, client: str, size: int) -> None:
        """Gives memory back."""
        self._held -= size
        self._held_by[client] -= size
        if not self._held_by[client]:
            del self._held_by[client]


class Share:
    """The memory that one request takes for its body. It counts until the with block ends."""

    def __init__(self, bodies: BodyReader, client: str):
        self._bodies, self._client, self._size = bodies, client, 0

    def __enter__(self) -> Share:
        return self

    def __exit__(self, *_: object) -> None:
        self._bodies.release(self._client, self._size)

    def take(self, size: int) -> None:
        """Counts `size` further bytes. Raises ApiError (503) if there are too many."""
        self._size += size
        self._bodies.hold(self._client, size)

    async def read(self, scope: dict[str, Any], receive: Receive) -> bytes:
        """The body of a request. Raises ApiError (413, 415, 408, 503) or ClientDisconnected."""
        headers = dict(scope["headers"])
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != b"application/json":
            # A web page could send other types from a user's browser without a CORS preflight.
            raise ApiError(415, "The body must be JSON, with the header 'Content-Type: application/json'")
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise ApiError(415, "The body must not be compressed")
        limit = self._bodies.limit
        length = headers.get(b"content-length", b"")
        if length.isdigit() and (len(length) > 18 or int(length) > limit):
            raise _too_large(f"is larger than the {limit} bytes")
        chunks: list[bytes] = []
        size = 0
        structure = JsonStructure()
        deadline = time.monotonic() + WHOLE_SECONDS
        try:
            while True:
                message = await asyncio.wait_for(receive(), min(CHUNK_SECONDS, max(0.0, deadline - time.monotonic())))
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                chunk = message.get("body", b"")
                size += len(chunk)
                if size > limit:
                    raise _too_large(f"is larger than the {limit} bytes")
                pause = self._bodies.allowances.take(self._client, len(chunk))
                self.take(len(chunk) * (_ASCII_COST if chunk.isascii() and b"\\u" not in chunk else _WIDE_COST))
                try:
                    structure.take(chunk)
                except ValueError as error:
                    raise _too_large(f"has {error}") from None
                chunks.append(chunk)
                if not message.get("more_body"):
                    break
        except asyncio.TimeoutError:
            raise ApiError(408, "The body did not arrive in time") from None
        await asyncio.sleep(pause)
        return b"".join(chunks)


def _too_large(what: str) -> ApiError:
    return ApiError(413, f"The body {what} that this server takes", code="request_too_large")
