"""Reads bodies of requests, with limits of size, structure, time and total memory."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from .errors import ApiError

Receive = Callable[[], Awaitable[dict[str, Any]]]
#: how long a client may send nothing of a body, and how long a whole body may take, s
CHUNK_SECONDS, WHOLE_SECONDS = 20.0, 300.0
#: the most values in arrays, names in objects, and arrays and objects of a body. Parsing holds the event loop for about
#: 0.1 µs a value, 0.3 µs a name and 3 µs an object
MAX_VALUES, MAX_NAMES, MAX_CONTAINERS = 1 << 19, 1 << 16, 1 << 14
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

    def _take(self, size: int) -> None:
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
        structure = _Structure()
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
                self._take(len(chunk) * (_ASCII_COST if chunk.isascii() and b"\\u" not in chunk else _WIDE_COST))
                structure.take(chunk)
                chunks.append(chunk)
                if not message.get("more_body"):
                    return b"".join(chunks)
        except asyncio.TimeoutError:
            raise ApiError(408, "The body did not arrive in time") from None


class _Structure:
    """Counts the values, names and containers of a JSON text, piece by piece."""

    def __init__(self) -> None:
        self._values = self._names = self._containers = 0
        self._in_string = False
        self._escape = b""      # the begin of an escape at the end of the last piece

    def take(self, piece: bytes) -> None:
        """Counts those of a further piece. Raises ApiError if there are too many."""
        piece = (self._escape + piece).replace(b"\\\\", b"")
        self._escape = b"\\" if piece.endswith(b"\\") else b""
        parts = piece.removesuffix(b"\\").replace(b'\\"', b"").split(b'"')
        plain = b"".join(parts[self._in_string::2])
        self._in_string ^= not len(parts) % 2
        self._values += plain.count(b",")
        self._names += plain.count(b":")
        self._containers += plain.count(b"{") + plain.count(b"[")
        for found, most, kind in ((self._values, MAX_VALUES, "values (long prompts may be sent as text)"),
                                  (self._names, MAX_NAMES, "names"),
                                  (self._containers, MAX_CONTAINERS, "arrays and objects")):
            if found > most:
                raise _too_large(f"has more than the {most} {kind}")


def _too_large(what: str) -> ApiError:
    return ApiError(413, f"The body {what} that this server takes", code="request_too_large")
