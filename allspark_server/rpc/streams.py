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
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import grpc.aio

from allspark_client import convert
from allspark_client._proto import allspark_pb2 as pb
from allspark_client.errors import AllSparkError, AsStatus, Draining
from allspark_client.request import RequestSpec

from ..access import Access, Client, Role
from ..guided import CACHED_GRAMMARS
from .calls import EOF, HELLO_SECONDS, Incoming, abort, grammar_of, is_tiny, known_error, receive
from .client_limits import ClientLimits
from .client_stream import Backlog, ClientStream, generate_response, overflow_error
from .methods import REQUESTS, Methods, Workers, denied
from .prefix_log import PrefixLog
from .request_sizes import check_sizes
from .tickets import Tickets
from .token_columns import TokenColumns
from .wire_format import TooManyItems, find_number

if TYPE_CHECKING:
    from ..engine.engine import Engine

logger = logging.getLogger(__name__)

#: seconds that a request of a tenant that has sent too much may wait before it is read
_LONGEST_DELAY = 10.0
#: the fields that lead to the id of a SessionRequest that starts a request
_START_ID = (pb.SessionRequest.START_FIELD_NUMBER, pb.StartRequest.ID_FIELD_NUMBER)
_NO_ROLE = Client(Role.READ)    # a client whose token has become invalid: its requests continue, new ones are rejected


class Streams:
    """The streams of all clients. Except where a method says otherwise, it runs on the service's event loop."""

    def __init__(self, engine: Engine, access: Access, workers: Workers, methods: Methods, limits: ClientLimits,
                 max_pending: int, info: Callable[[], pb.ServerInfo], share_prefixes: bool):
        """`max_pending`: tokens that a client may leave unread; `info`: the first message of a session;
        `share_prefixes`: whether tenants share cached prefixes and grammars.
        """
        self._engine, self._access, self._workers, self._methods = engine, access, workers, methods
        self._limits, self._max_pending, self._info = limits, max_pending, info
        self._share_prefixes = share_prefixes
        self.prefixes = PrefixLog()
        self._backlog = Backlog()
        self._incoming = Incoming()
        self._tickets = Tickets(access)
        self._passed: set[bytes] = set()    # tickets of requests that have passed the drain, under `_passing`
        self._passing = threading.Lock()
        self._compiled: dict[tuple[int, str], None] = {}    # grammars, with scope, that were accepted; oldest first
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed: set[ClientStream] = set()        # streams with results to send
        self._changed_lock = threading.Lock()
        self._live: set[ClientStream] = set()
        self._sessions = itertools.count(1)
        self._ending = False
        self.stopping = False       # no new requests are taken any more
        self.drained_until = 0.0    # nor until then (monotonic clock, s)

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

    @property
    def draining(self) -> bool:
        """Whether no new requests are taken. Any thread may read it."""
        return self.stopping or time.monotonic() < self.drained_until

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
            columns = TokenColumns() if version >= convert.TOKENS_PROTOCOL else None
            reader = asyncio.create_task(self._read(context, stream, client))
            reader.add_done_callback(lambda _: stream.ready.set())
            try:
                while True:
                    await stream.ready.wait()
                    stream.ready.clear()
                    response = pb.SessionResponse(events=stream.take(columns))
                    if columns:
                        columns.move_to(response.tokens)
                    if response.events or response.HasField("tokens"):
                        await context.write(response.SerializeToString())
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
        connection = f"session {next(self._sessions)}"
        changes, allowances = self._access.look(), self._methods.allowances
        while (data := await context.read()) is not EOF:
            own, size = client.tenant or connection, len(data)
            try:
                message = await self._methods.parse_in_thread(pb.SessionRequest, data, context, client, own)
            except TooManyItems as error:   # of this request alone: a session may be an HTTP server's
                if (request_id := find_number(data, *_START_ID)) is None:
                    raise
                stream.register(request_id)
                stream.refuse(request_id, error)
                del data
                await asyncio.sleep(allowances.take(own, size))
                continue
            del data    # which may be large
            action = message.WhichOneof("action")
            if action == "start":
                stream.register(message.start.id)
                if changes != self._access.look():  # the client's token may have become invalid, or changed its role
                    changes, client = self._access.changes, self._access.client(context) or _NO_ROLE
                    own = client.tenant or connection
                self._accept(stream, message.start, size, client, own)
            elif action == "stop":
                stream.stop(message.stop)
            elif action == "release":
                stream.release(message.release)
            else:
                raise ValueError("a session's messages after the first are start, stop and release")
            if action != "start" or message.start.request.tenant in ("", own):
                # The session is this tenant's: it is read again once that tenant may send more.
                pause = allowances.take(own, size)
                del message
                if pause:
                    await asyncio.sleep(pause)
                await self._incoming.room(own)

    def _accept(self, stream: ClientStream, message: pb.StartRequest, size: int, client: Client, own: str) -> None:
        """Start a request of a session, in a thread if that takes long. It does not wait: a session of an HTTP server
        carries the requests of many tenants. `size`: of the message; `own`: the session's own tenant.
        """
        delay = 0.0
        try:
            if client.role not in REQUESTS:
                raise denied("a request", REQUESTS, client.role)
            tenant = client.tenant_of(message.request.tenant, own)
            if tenant != own:
                allowances = self._methods.allowances
                delay = allowances.debt(tenant)
                if delay > _LONGEST_DELAY or self._incoming.full(tenant):
                    raise AllSparkError(
                        AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR,
                        f"this client has sent more than {allowances.burst >> 20} MiB at once, or "
                        f"{allowances.rate >> 20} MiB a second, of requests that were not read yet or were refused; "
                        "send them again later", retryable=True)
                allowances.take(tenant, size)
        except AllSparkError as error:
            stream.refuse(message.id, error)
            return
        if not delay and is_tiny(size, message.request):
            self._start(stream, message, client, own)
            return
        loop = asyncio.get_running_loop()
        self._incoming.add(tenant, size)

        # A request whose grammar is compiled already does not wait for other grammars.
        known = grammar_of(message.request)
        grammar = None if known is None else (known, self._cache_scope(message.request, client))
        if grammar is None or grammar in self._compiled:
            threads = self._workers.of_size(size)
        else:
            threads = self._workers.guided_input

        def run() -> None:
            accepted, began = False, time.perf_counter()
            try:
                accepted = self._start(stream, message, client, own)
            finally:
                with contextlib.suppress(RuntimeError):     # the loop has ended
                    loop.call_soon_threadsafe(read, accepted, time.perf_counter() - began)

        def read(accepted: bool, seconds: float) -> None:
            self._incoming.remove(tenant, size)
            if not accepted:
                self._methods.allowances.charge(tenant, seconds)
            if accepted and grammar is not None:
                self._compiled[grammar] = None
                while len(self._compiled) > CACHED_GRAMMARS:
                    del self._compiled[next(iter(self._compiled))]

        if delay:
            loop.call_later(delay, threads.submit, tenant, run)
        else:
            threads.submit(tenant, run)

    def _start(self, stream: ClientStream, message: pb.StartRequest, client: Client, own: str) -> bool:
        """Submit a request, or refuse it; returns whether the engine took it. Any thread."""
        try:
            spec = self._spec(message.request, client, own)
        except BaseException as error:
            stream.refuse(message.id, known_error(error))
            return False
        ticket = functools.partial(self._tickets.issue, spec, message.request)
        return stream.start(message.id, spec, ticket if client.role is Role.GENERATE else None)

    # --- Generate ------------------------------------------------------------------------------------------------

    async def generate(self, context: grpc.aio.ServicerContext[Any, Any], client: Client) -> None:
        """One request, whose results are streamed."""
        async with self._opened(context) as stream:
            try:
                tenant = client.tenant or context.peer()
                async with self._methods.concurrency.enter(tenant):
                    data = await receive(context)
                    size = len(data)
                    await asyncio.sleep(self._methods.allowances.take(tenant, size))
                    request = await self._methods.parse_in_thread(pb.GenerateRequest, data, context, client, tenant)
                    guided = grammar_of(request) is not None
                    threads = self._workers.guided_input if guided else self._workers.of_size(size)
                    start = functools.partial(self._start_only, stream, request, client, context.peer())
                    await self._methods.charged(tenant, threads, start)
                    del data, request, start
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
        client.check_model(request.model)
        check_sizes(request, self._engine.info(request.model), client.role)
        spec = convert.request_from_pb(request)
        spec.tenant = client.tenant_of(spec.tenant, connection)
        spec.cache_scope = self._cache_scope(request, client)
        if client.role is Role.GENERATE:    # an HTTP server and an administrator are believed without a ticket
            self._tickets.believe(spec, request)
        if self.draining and not (spec.resumed and self._passes_once(request.ticket)):
            raise Draining
        self.prefixes.note(spec)
        return spec

    def _passes_once(self, ticket: bytes) -> bool:
        """Whether a ticket, if there is one, passes the drain for the first time. Any thread."""
        with self._passing:
            if ticket in self._passed:
                return False
            if ticket:
                self._passed.add(ticket)
            return True

    def _cache_scope(self, request: pb.GenerateRequest, client: Client) -> str:
        return "" if self._share_prefixes else client.cache_scope(request.tenant)

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
