"""The calls that generate: Session, which carries all requests of a client, and Generate, which carries one.

Requests are prepared in threads, since that tokenizes and compiles grammars. The engine's output stage queues results
in the streams of their clients and wakes the event loop once after each step. The loop then sends each client at most
one message.
"""
from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import grpc.aio

from allspark_client import convert
from allspark_client._proto import allspark_pb2 as pb
from allspark_client.errors import AllSparkError, AsStatus, Draining
from allspark_client.request import RequestSpec

from ..access import Access, Client, Role
from .calls import EOF, HELLO_SECONDS, Allowance, abort, is_guided, is_tiny, receive
from .client_limits import ClientLimits
from .client_stream import Backlog, ClientStream, generate_response, overflow_error
from .methods import REQUESTS, Methods, Workers, denied

if TYPE_CHECKING:
    from ..engine.engine import Engine

logger = logging.getLogger(__name__)

#: requests of one stream whose grammars are compiled at the same time; further ones wait
_MAX_COMPILING = 1024
#: bytes that one stream may send at once, and per second: a million tokens of text, more than any model reads
_BURST, _RATE = 8 << 20, 4 << 20
_NO_ROLE = Client(Role.READ)    # a client whose token has become invalid: its requests continue, new ones are rejected


class Streams:
    """The streams of all clients. Except where a method says otherwise, it runs on the service's event loop."""

    def __init__(self, engine: Engine, access: Access, workers: Workers, methods: Methods, limits: ClientLimits,
                 max_pending: int, info: Callable[[], pb.ServerInfo]):
        """`max_pending`: tokens that a client may leave unread; `info`: the first message of a session."""
        self._engine, self._access, self._workers, self._methods = engine, access, workers, methods
        self._limits, self._max_pending, self._info = limits, max_pending, info
        self._backlog = Backlog()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed: set[ClientStream] = set()        # streams with results to send
        self._changed_lock = threading.Lock()
        self._live: set[ClientStream] = set()
        self._sessions = itertools.count(1)
        self._ending = False
        self.draining = False

    def begin(self) -> None:
        """Take results on the running event loop."""
        self._loop = asyncio.get_running_loop()

    def end(self) -> None:
        """End sessions as soon as they have no live requests."""
        self._ending = True
        for stream in self._live:
            stream.ready.set()

    @property
    def requests(self) -> int:
        """The number of requests whose end has not been sent yet. Any thread may read it."""
        return sum(stream.requests for stream in list(self._live))

    # --- from the engine's threads -------------------------------------------------------------------------------

    def _note_results(self, stream: ClientStream, now: bool) -> None:
        with self._changed_lock:
            self._changed.add(stream)
        if now:
            self.flush()

    def flush(self) -> None:
        """Wake the event loop if there are results. Any thread may call this; the output stage does after a step."""
        if self._changed and self._loop is not None and not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:    # the loop was closed meanwhile
                logger.debug("results are dropped: the service has ended")

    def _wake(self) -> None:
        with self._changed_lock:
            changed, self._changed = self._changed, set()
        for stream in changed:
            stream.ready.set()
            if stream.overflow and stream.task is not None:
                stream.task.cancel()   # it waits for a client that does not read
                stream.task = None

    # --- Session -------------------------------------------------------------------------------------------------

    async def session(self, context: grpc.aio.ServicerContext[Any, Any], client: Client) -> None:
        """A session: reads requests in a task of its own, and sends events until both sides have ended."""
        async with self._opened(context) as stream:
            try:
                first = self._methods.parse(pb.SessionRequest, await receive(context, HELLO_SECONDS), context)
                version = self._version(first)
            except (ValueError, AllSparkError) as error:
                await abort(context, error)
            info = self._info()
            info.protocol = version
            await context.write(pb.SessionResponse(info=info).SerializeToString())
            reader = asyncio.create_task(self._read(context, stream, client))
            reader.add_done_callback(lambda _: stream.ready.set())
            try:
                while True:
                    await stream.ready.wait()
                    stream.ready.clear()
                    events = stream.take()
                    if events:
                        await context.write(pb.SessionResponse(events=events).SerializeToString())
                    if reader.done() and not reader.cancelled() and (failure := reader.exception()) is not None:
                        await abort(context, failure)
                    if stream.idle and (reader.done() or self._ending):
                        return
            finally:
                reader.cancel()

    def _version(self, first: pb.SessionRequest) -> int:
        """The version of the protocol for a session with this first message. Raises AllSparkError."""
        hello = first.hello
        if not first.HasField("hello"):
            raise AllSparkError(AsStatus.ALLSPARK_REQUEST_DENIED,
                                "a session's first message is hello, with the versions of the protocol that the client "
                                "speaks")
        version = convert.common_protocol(
            hello.protocol, hello.newest_protocol or hello.protocol, f"the client ({hello.client[:100]!r})",
            f"this server ({self._engine.get_version_full()})")
        if version < convert.PROTOCOL:
            logger.info("the client %.100r speaks version %d of the protocol, this server %d: it should be upgraded "
                        "before this server is upgraded again", hello.client, version, convert.PROTOCOL)
        return version

    async def _read(self, context: grpc.aio.ServicerContext[Any, Any], stream: ClientStream, client: Client) -> None:
        """Carry out a session's messages in order. Raises ValueError for a wrong message."""
        loop, workers, parse = asyncio.get_running_loop(), self._workers, self._methods.parse
        connection = f"session {next(self._sessions)}"
        compiling = asyncio.Semaphore(_MAX_COMPILING)
        changes, allowance = self._access.look(), Allowance(_BURST, _RATE)
        while (data := await context.read()) is not EOF:
            pause = allowance.take(len(data))
            pool = workers.of_message(data)
            if pool is workers.input:
                message = parse(pb.SessionRequest, data, context)
            else:
                message = await loop.run_in_executor(pool, parse, pb.SessionRequest, data, context)
            action = message.WhichOneof("action")
            if action == "start":
                stream.register(message.start.id)
                if changes != self._access.look():  # the client's token may have become invalid, or changed its role
                    changes, client = self._access.changes, self._access.client(context) or _NO_ROLE
                start = functools.partial(self._start, stream, message.start, client, connection)
                if client.role not in REQUESTS:
                    stream.refuse(message.start.id, denied("a request", REQUESTS, client.role))
                elif is_guided(message.start.request):
                    # Not awaited: the next messages do not wait until the grammar is compiled.
                    await compiling.acquire()
                    loop.run_in_executor(workers.guided_input, start).add_done_callback(lambda _: compiling.release())
                elif is_tiny(data, message.start.request):
                    start()
                else:
                    await loop.run_in_executor(pool, start)
            elif action == "stop":
                stream.stop(message.stop)
            elif action == "release":
                stream.release(message.release)
            else:
                raise ValueError("a session's messages after the first are start, stop and release")
            if pause:
                del data, message       # which may be large
                await asyncio.sleep(pause)

    def _start(self, stream: ClientStream, message: pb.StartRequest, client: Client, connection: str) -> None:
        """Any thread."""
        try:
            spec = self._spec(message.request, client, connection)
        except (ValueError, TypeError, AllSparkError) as error:
            stream.refuse(message.id, error)
            return
        stream.start(message.id, spec)

    # --- Generate ------------------------------------------------------------------------------------------------

    async def generate(self, context: grpc.aio.ServicerContext[Any, Any], client: Client) -> None:
        """One request, whose results are streamed."""
        async with self._opened(context) as stream:
            try:
                async with self._methods.concurrency.enter(client.tenant or context.peer()):
                    loop, data = asyncio.get_running_loop(), await receive(context)
                    pool = self._workers.of_message(data)
                    request = await loop.run_in_executor(pool, self._methods.parse, pb.GenerateRequest, data, context)
                    pool = self._workers.guided_input if is_guided(request) else pool
                    await loop.run_in_executor(pool, self._start_only, stream, request, client, context.peer())
                    del data, request
            except (ValueError, TypeError, AllSparkError) as error:
                await abort(context, error)
            while not stream.idle:
                await stream.ready.wait()
                stream.ready.clear()
                for event in stream.take():
                    if event.HasField("refused"):
                        await abort(context, convert.error_from_pb(event.refused))
                    await context.write(generate_response(event).SerializeToString())

    def _start_only(self, stream: ClientStream, request: pb.GenerateRequest, client: Client, peer: str) -> None:
        """Any thread."""
        spec = self._spec(request, client, peer)
        stream.register(0)
        stream.start(0, spec)

    def _spec(self, request: pb.GenerateRequest, client: Client, connection: str) -> RequestSpec:
        spec = convert.request_from_pb(request)
        spec.tenant = client.tenant_of(spec.tenant, connection)
        if self.draining and not spec.resumed:
            raise Draining
        return spec

    @contextlib.asynccontextmanager
    async def _opened(self, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[ClientStream]:
        """The stream of a call, until it ends. Aborts the call if the client leaves too many tokens unread."""
        stream = ClientStream(self._engine, self._note_results, self._max_pending, self._backlog, self._limits)
        stream.task = asyncio.current_task()
        self._live.add(stream)
        try:
            yield stream
        except asyncio.CancelledError:
            if not stream.overflow:
                raise
            stream.close()
            await abort(context, overflow_error(self._max_pending))
        finally:
            self._live.discard(stream)
            with self._changed_lock:
                self._changed.discard(stream)
            # Not awaited: the call may be being cancelled. Not on the loop: thousands of requests may be live.
            try:
                self._workers.ends.submit(stream.close)
            except RuntimeError:    # the service has ended and has no threads any more
                stream.close()
