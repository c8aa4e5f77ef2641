"""Reads bodies of requests, with limits of size, time and total memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from .errors import ApiError

Receive = Callable[[], Awaitable[dict[str, Any]]]
#: how long a client may send nothing of a body, and how long a whole body may take, s
CHUNK_SECONDS, WHOLE_SECONDS = 20.0, 300.0


class ClientDisconnected(Exception):
    """The client has closed the connection."""


class BodyReader:
    """Reads bodies of at most `limit` bytes each, and `all_together` bytes being read at the same time."""

    def __init__(self, limit: int, all_together: int):
        self.limit, self._left = limit, max(limit, all_together)

    async def read(self, scope: dict[str, Any], receive: Receive) -> bytes:
        """The body of a request. Raises ApiError (413, 415, 408, 503) or ClientDisconnected."""
        headers = dict(scope["headers"])
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != b"application/json":
            # A web page could send other types from a user's browser without a CORS preflight.
            raise ApiError(415, "The body must be JSON, with the header 'Content-Type: application/json'")
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise ApiError(415, "The body must not be compressed")
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self.limit:
            raise self._too_large()
        chunks: list[bytes] = []
        size = 0
        deadline = time.monotonic() + WHOLE_SECONDS
        try:
            while True:
                message = await asyncio.wait_for(receive(), min(CHUNK_SECONDS, max(0.0, deadline - time.monotonic())))
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                chunk = message.get("body", b"")
                size += len(chunk)
                self._left -= len(chunk)
                if size > self.limit:
                    raise self._too_large()
                if self._left < 0:
                    raise ApiError(503, "Too many large requests are being read; try again later", retry_after=1)
                chunks.append(chunk)
                if not message.get("more_body"):
                    return b"".join(chunks)
        except asyncio.TimeoutError:
            raise ApiError(408, "The body did not arrive in time") from None
        finally:
            self._left += size

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is larger than the {self.limit} bytes that this server takes",
                        code="request_too_large")
