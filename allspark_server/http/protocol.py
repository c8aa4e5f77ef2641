"""The server's side of a connection: uvicorn's, with limits for slow and silent clients."""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

#: how long the head of a request may take, s, from the begin of the connection or of the head
HEAD_SECONDS = 20.0
MAX_HEAD = 64 << 10     # bytes of request line and headers, and of the framing of chunked bodies
_FRAMING = 8            # bytes of framing that are allowed for each byte of a chunked body


class Connection(HttpToolsProtocol):
    """Closes connections whose requests do not arrive in time, and the oldest idle one if there are too many."""

    #: most connections of a process; one more closes an idle one
    limit = 1 << 30
    #: connections that wait for a request, the oldest first
    idle: ClassVar[dict[Connection, None]] = {}

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        #: called once, when the connection has ended
        self.at_end: Callable[[], None] | None = None
        self._late: asyncio.TimerHandle | None = None
        self._overhead = 0      # bytes of this request that are not body

    def connection_made(self, transport: Any) -> None:
        """As uvicorn's; starts the time limit of the head."""
        super().connection_made(transport)
        self.idle[self] = None
        self._expect_head()
        if len(self.connections) > self.limit:
            next(iter(self.idle)).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """As uvicorn's; stops the time limit."""
        self.idle.pop(self, None)
        self._stop_clock()
        self.end()
        super().connection_lost(exc)

    def end(self) -> None:
        """Says that the connection has ended, also if it never began."""
        at_end, self.at_end = self.at_end, None
        if at_end is not None:
            at_end()

    def data_received(self, data: bytes) -> None:
        """As uvicorn's; answers 431 if the head is too long."""
        self._overhead += len(data)
        super().data_received(data)
        if self._overhead > MAX_HEAD and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n"
                                 b"content-length: 0\r\n\r\n")
            self.transport.close()

    def on_message_begin(self) -> None:
        """As uvicorn's; adds extensions that endpoints use."""
        super().on_message_begin()
        extensions: dict[str, Any] = {"allspark.abort": self.transport.abort,
                                      "allspark.certificate": _names(self.transport.get_extra_info("peercert"))}
        self.scope["extensions"] = extensions
        if self._late is None:
            self._expect_head()

    def on_headers_complete(self) -> None:
        """As uvicorn's; stops the time limit of the head, and adds the extension that sends parts of the answer."""
        self._overhead = 0
        self._stop_clock()
        self.idle.pop(self, None)
        super().on_headers_complete()
        # The cycle refers to the scope. Without a weak reference only the collector would free closed connections.
        extensions: dict[str, Any] = self.scope["extensions"]
        extensions["allspark.chunk"] = functools.partial(_send_chunk, weakref.ref(self.cycle))

    def on_body(self, body: bytes) -> None:
        """As uvicorn's; does not count the body as head."""
        self._overhead -= (1 + _FRAMING) * len(body)
        super().on_body(body)

    def on_response_complete(self) -> None:
        """As uvicorn's; the connection is then idle."""
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


def _send_chunk(reference: weakref.ref[Any], data: bytes) -> bool:
    """Send a part of the answer of a request's cycle, as `send` of ASGI would; False if `send` must do that, since the
    client does not read as fast, or the answer has not begun, has ended or is not chunked.
    """
    cycle = reference()
    if cycle is None or cycle.flow.write_paused or not cycle.response_started or not cycle.chunked_encoding or \
            cycle.response_complete or cycle.disconnected or cycle.scope["method"] == "HEAD":
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
    return True


def _names(certificate: dict[str, Any] | None) -> str:
    """The alternative names in a client's certificate, or its common name."""
    if not certificate:
        return ""
    names = [name for _, name in certificate.get("subjectAltName", ())]
    common = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return ",".join(names or common)
