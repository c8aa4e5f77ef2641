"""The socket that the workers of an HTTP server share, with its connections divided evenly among them.

All workers wait for the socket, and whichever woke first would take the connections of a burst: with clients that keep
connections open, one worker would go on computing what eight could. So a worker holds back for a moment for each worker
that has fewer connections, and one of these takes the next. (Envoy calls this exact balance.)
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any

import uvicorn

from .counts import ConnectionCounts
from .protocol import Connection

#: how long a worker leaves a connection to each of those that have fewer, s, and for how many at most. Then it takes
#: the connection, since they may be busy.
PATIENCE_SECONDS, _MOST_AHEAD = 0.005, 4
#: how often it looks meanwhile whether it has the fewest now, s
_LOOK_SECONDS = 0.0005
#: how long no connection is accepted after the system had no descriptor or memory for one, s
_PAUSE_SECONDS = 1.0


class SharedListener:
    """Accepts connections of a listening socket. It has the methods of an asyncio.Server that uvicorn calls."""

    def __init__(self, listener: socket.socket, counts: ConnectionCounts, worker: int,
                 protocol: Callable[[], Connection], tls: ssl.SSLContext | None):
        """Begins to accept. `worker`: this one's number. `protocol` makes the protocol of each connection. Called in a
        running event loop.
        """
        self._socket, self._counts, self._worker = listener, counts, worker
        self._protocol, self._tls = protocol, tls
        self._loop = asyncio.get_running_loop()
        self._later: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[Any]] = set()
        counts.join(worker)
        listener.setblocking(False)
        self._loop.add_reader(listener, self._arrived)

    def close(self) -> None:
        """Accepts no more. What was accepted goes on."""
        self._counts.leave(self._worker)
        if self._later is not None:
            self._later.cancel()
        self._loop.remove_reader(self._socket)

    async def wait_closed(self) -> None:
        """Waits for what close() has begun: nothing."""

    def _arrived(self) -> None:
        """A connection waits, unless another worker has taken it."""
        ahead = self._counts.ahead_of(self._worker)
        if ahead:
            self._loop.remove_reader(self._socket)
            self._hold_back(self._loop.time() + PATIENCE_SECONDS * min(ahead, _MOST_AHEAD))
        else:
            self._accept()

    def _hold_back(self, until: float) -> None:
        if self._loop.time() < until and self._counts.ahead_of(self._worker):
            self._later = self._loop.call_later(_LOOK_SECONDS, self._hold_back, until)
        else:
            self._resume()

    def _resume(self) -> None:
        self._later = None
        self._loop.add_reader(self._socket, self._arrived)
        self._accept()

    def _accept(self) -> None:
        """Takes one connection, if one is still there: others may have fewer then."""
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:     # the system is short of descriptors or memory
            self._loop.remove_reader(self._socket)
            self._later = self._loop.call_later(_PAUSE_SECONDS, self._resume)
            return
        self._counts.add(self._worker, 1)
        task = self._loop.create_task(self._open(connection))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        protocol = self._protocol()
        protocol.at_end = self._ended
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, accepted, ssl=self._tls)
        except (OSError, asyncio.TimeoutError):     # the client left, or its handshake failed
            protocol.end()
            accepted.close()

    def _ended(self) -> None:
        self._counts.add(self._worker, -1)


class Server(uvicorn.Server):
    """uvicorn's server on a socket that several workers share."""

    def __init__(self, config: uvicorn.Config, counts: ConnectionCounts, worker: int):
        """`worker`: this one's number among them."""
        super().__init__(config)
        self._counts, self._worker = counts, worker

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to accept connections of the sockets."""
        await super().startup(sockets=[])
        for listener in sockets or []:
            shared = SharedListener(listener, self._counts, self._worker, self._protocol, self.config.ssl)
            self.servers.append(shared)     # type: ignore[arg-type]

    def _protocol(self) -> Connection:
        return Connection(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
