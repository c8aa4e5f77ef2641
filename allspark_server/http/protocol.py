"""The server's side of a connection: uvicorn's, with bounds on what a peer may leave unsaid."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

#: s for the head of a request, from the connection's or the head's beginning
HEAD_SECONDS = 20.0
MAX_HEAD = 64 << 10     # bytes: request line and headers; of chunked bodies also what is around the chunks
_FRAMING = 8            # bytes around a chunk of one byte, for each of which so many more are allowed


class Connection(HttpToolsProtocol):
    """Ends connections whose requests do not come, and the oldest idle one where there are too many."""

    #: connections of a process; one more ends an idle one
    limit = 1 << 30
    #: those that wait for a request, the oldest first
    idle: dict[Connection, None] = {}

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._late: asyncio.TimerHandle | None = None
        self._overhead = 0      # bytes that were no body, of this request

    def connection_made(self, transport: Any) -> None:
        """As uvicorn's; the clock begins to run."""
        super().connection_made(transport)
        self.idle[self] = None
        self._expect_head()
        if len(self.connections) > self.limit:
            next(iter(self.idle)).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """As uvicorn's."""
        self.idle.pop(self, None)
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """As uvicorn's; too long a head is answered with 431."""
        self._overhead += len(data)
        super().data_received(data)
        if self._overhead > MAX_HEAD and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n"
                                 b"content-length: 0\r\n\r\n")
            self.transport.close()

    def on_message_begin(self) -> None:
        """As uvicorn's."""
        super().on_message_begin()
        self.scope["extensions"] = {"allspark.abort": self.transport.abort,
                                    "allspark.certificate": _names(self.transport.get_extra_info("peercert"))}
        if self._late is None:
            self._expect_head()

    def on_headers_complete(self) -> None:
        """As uvicorn's."""
        self._overhead = 0
        self._stop_clock()
        self.idle.pop(self, None)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """As uvicorn's."""
        self._overhead -= (1 + _FRAMING) * len(body)
        super().on_body(body)

    def on_response_complete(self) -> None:
        """As uvicorn's."""
        super().on_response_complete()
        if not self.transport.is_closing() and self.cycle.response_complete:
            self._overhead = 0
            self.idle[self] = None

    def _expect_head(self) -> None:
        self._late = self.loop.call_later(HEAD_SECONDS, self._end)

    def _stop_clock(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _end(self) -> None:
        self._late = None
        self.transport.abort()


def _names(certificate: dict[str, Any] | None) -> str:
    """Of whom a client's certificate is: its alternative names, or the common one."""
    if not certificate:
        return ""
    names = [name for _, name in certificate.get("subjectAltName", ())]
    common = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return ",".join(names or common)
