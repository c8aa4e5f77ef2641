"""Calls that a server makes to its own endpoints, without a connection: lines of batches, background responses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from allspark_server.access import Client

#: a temporarily refused request is sent again: at most so often, with pauses of at most so many seconds
_ATTEMPTS, _LONGEST_PAUSE = 12, 30.0
_PASSING = (429, 503)

Application = Callable[[dict[str, Any], Any, Any], Awaitable[None]]


def scope_of(path: str, client: Client | None = None, request_id: str = "", length: int = 0) -> dict[str, Any]:
    """The ASGI scope of a request. `client`: whose request it is; None: that of a connection without a key."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(length).encode())]
    if request_id:
        headers.append((b"x-request-id", request_id.encode()))
    return {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": headers,
            "client": ("internal", 0), "server": ("internal", None),
            **({"allspark.client": client} if client is not None else {})}


async def post(application: Application, path: str, body: bytes, client: Client | None = None,
               request_id: str = "") -> tuple[int, bytes]:
    """The status and the body of the answer to a request."""
    received = iter([{"type": "http.request", "body": body, "more_body": False}])
    status = 0
    chunks: list[bytes] = []

    async def receive() -> dict[str, Any]:
        message = next(received, None)
        return message if message is not None else await asyncio.get_running_loop().create_future()

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            chunks.append(message.get("body", b""))

    await application(scope_of(path, client, request_id, len(body)), receive, send)
    return status, b"".join(chunks)


async def post_until_taken(application: Application, path: str, body: bytes, client: Client | None = None,
                           request_id: str = "") -> tuple[int, bytes]:
    """As post, but sends the request again while it is refused for a time."""
    pause = 0.5
    for attempt in range(1, _ATTEMPTS + 1):
        answer = await post(application, path, body, client, request_id)
        if answer[0] not in _PASSING or attempt == _ATTEMPTS:
            break
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return answer
