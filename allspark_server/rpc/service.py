"""The gRPC service of rank 0: an event loop in a thread of its own, between clients and the engine's thread.

Every method is registered as a stream of bytes, also where a client sends one message and expects one: so nothing is
received before its sender's role is known (access.py), and what is no message gets an answer that says so.

Blocking engine calls run in worker threads. Results come the other way: the output stage files them in the streams
of their clients, and after each step wakes the loop once, which sends each client at most one message.
"""
from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from allspark_client import convert
from allspark_client._proto import allspark_pb2 as pb
from allspark_client.errors import AllSparkError, AsStatus, Draining
from allspark_client.request import RequestSpec

from .. import metrics
from ..access import Access, Client, ModelRoots, Role
from ..engine.report import GroupReport
from ..weights.hub import with_local_paths
from .calls import HELLO_SECONDS, Allowance, Gates, RareLog, Writer, abort, is_guided, is_tiny, receive
from .client_limits import ClientLimits
from .client_stream import MAX_PENDING, Backlog, ClientStream, generate_response, overflow_error
from .listen import listen

if TYPE_CHECKING:
    from ..engine.engine import Engine

logger = logging.getLogger(__name__)

SERVICE_NAME = "allspark.Allspark"
#: what a model is called by grpc.health.v1: this and its name
MODEL_HEALTH = "allspark.Model/"
_HEALTH_SECONDS = 1.0       # between looks at the engine, and between health calls of its own
_OWN_CALL_SECONDS = 10.0    # until one of these counts as failed
#: A silent client is noticed after a ping interval and a ping timeout: 12 s, within the 15 s that are promised.
PING_INTERVAL_SECONDS, PING_TIMEOUT_SECONDS = 5, 7
#: the largest message taken from a client: the ids of a prompt of four million tokens, or 128 bytes of text for each of
#: 128k tokens
MAX_MESSAGE = 16 << 20
#: messages from this size on have threads of their own: a short prompt must not wait for long texts being tokenized
_LARGE_MESSAGE = 64 << 10
#: requests of one stream whose grammars are being compiled; more have to wait
_MAX_COMPILING = 1024
_MAX_METADATA = 64 << 10
#: bytes that one stream may send, at once and in a second: a million tokens of text, more than any model reads
_BURST, _RATE = 8 << 20, 4 << 20
#: calls of one client that are read, or wait here to be worked on, at once
_AT_ONCE = 12
_OPTIONS = [
    ("grpc.keepalive_time_ms", PING_INTERVAL_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_SECONDS * 1000),
    # Of probes of the bandwidth, which stand in for keepalive: without them no silent client is noticed.
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_SECONDS * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),   # a second server on the same port is an error, not a rival for its connections
    ("grpc.max_concurrent_streams", 256),       # of a connection; all requests of a stream share one
    ("grpc.max_connection_idle_ms", 600_000),   # of a connection without calls: no client of ours is
    ("grpc.server_handshake_timeout_ms", 20_000),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", _MAX_METADATA),
    ("grpc.absolute_max_metadata_size", 2 * _MAX_METADATA),
]
_EVERY_ROLE = frozenset(Role)
_REQUESTS = frozenset((Role.GENERATE, Role.DOOR, Role.ADMIN))
_ADMIN = frozenset((Role.ADMIN,))
_NOBODY = Client(Role.READ)     # whose token is no longer valid: what runs goes on, nothing new begins
#: a method's other half: called with the context and the client once that is known to be allowed
_Method = Callable[[grpc.aio.ServicerContext, "Client | None"], Awaitable[None]]


class Service:
    """Serves an engine to clients. `start` returns once it listens; `stop` ends it."""

    def __init__(self, engine: Engine, addresses: list[str], *, access: Access | None = None,
                 roots: ModelRoots | None = None, socket_mode: int = 0o600, socket_group: str = "", inner: str = "",
                 limits: ClientLimits | None = None, max_message: int = MAX_MESSAGE, max_pending: int = MAX_PENDING):
        """`addresses`: "host:port" (port 0: any free one) or "unix:/path". `access`: what clients need; without it only
        Unix sockets are served, made with `socket_mode` and for `socket_group`. `inner`: a Unix socket beside them, for
        health calls of its own. `roots`: the paths that clients may name, none by default. `limits`: of their requests.
        `max_message`: bytes that a client may send at once; `max_pending`: tokens it may leave unread before it is
        disconnected. Raises ValueError for a TCP address that is not guarded.
        """
        if isinstance(addresses, str) or not addresses:
            raise ValueError(f"addresses={addresses!r} must be a list of 'host:port' and 'unix:/path', at least one")
        if not 1 << 10 <= max_message < 1 << 31:
            raise ValueError(f"max_message={max_message} must be at least 1 KiB and below 2 GiB")
        access = access or Access()
        for address in addresses:
            access.check_listener(address)
        self._engine = engine
        self._wanted = list(addresses)
        self._access = access
        self._roots = roots or ModelRoots()
        self._socket_mode, self._socket_group = socket_mode, socket_group
        self._inner = inner
        self._draining = False
        self._report = GroupReport()
        self._max_message = max_message
        self._max_pending = max_pending
        self._limits = limits or ClientLimits()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._end: asyncio.Event | None = None
        self._grace = 0.0
        # What may take long has threads of its own, lest the rest wait for it: loads (minutes), tokenizing (seconds).
        self._control = ThreadPoolExecutor(4, thread_name_prefix="allspark-control")
        self._input = ThreadPoolExecutor(4, thread_name_prefix="allspark-input")
        self._large_input = ThreadPoolExecutor(2, thread_name_prefix="allspark-large-input")
        self._guided_input = ThreadPoolExecutor(4, thread_name_prefix="allspark-guided-input")
        self._statistics = ThreadPoolExecutor(2, thread_name_prefix="allspark-statistics")
        self._ends = ThreadPoolExecutor(1, thread_name_prefix="allspark-ends")      # of sessions
        self._dirty: set[ClientStream] = set()
        self._dirty_lock = threading.Lock()
        self._streams: set[ClientStream] = set()
        self._sessions = itertools.count(1)
        self._backlog, self._gates = Backlog(), Gates(_AT_ONCE)
        self._health = health.aio.HealthServicer()
        self._reflection = reflection.aio.ReflectionServicer(
            (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME))
        self._healthy: dict[str, bool | None] = {}      # as last told; None: no longer known
        self._undecodable = RareLog("a message of %s cannot be decoded")
        self._refused = RareLog("a call of %s was refused: it shows no valid token")
        #: what the service listens on, with real port numbers
        self.addresses: list[str] = []
        #: when a health call of its own was answered last, on the monotonic clock; 0.0: it makes none
        self.healthy = 0.0

    # --- life ----------------------------------------------------------------------------------------------------

    def start(self) -> list[str]:
        """Listen and serve in a thread; returns the bound addresses. Raises AllSparkError naming one that is in use."""
        if self._thread is not None:
            raise AllSparkError(AsStatus.ALLSPARK_INVALID_CALL_ERROR, "the service was started already")
        self._engine.add_flush_listener(self._on_flush)     # first: results before it would wait for a later step
        started: Future[list[str]] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), name="allspark-service",
                                        daemon=True)
        self._thread.start()
        try:
            self.addresses = started.result()
        except BaseException:
            self._thread.join()
            raise
        return self.addresses

    def stop(self, grace: float = 0.5) -> None:
        """Stop listening; give live requests `grace` seconds, then break their streams (they may resume elsewhere)."""
        if self._thread is None or self._loop is None or not self._thread.is_alive():
            return
        self._grace = grace
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._control.shutdown(wait=False, cancel_futures=True)
        for pool in (self._input, self._large_input, self._guided_input, self._statistics):
            pool.shutdown(cancel_futures=True)
        self._ends.shutdown()

    def drain(self, undo: bool = False) -> None:
        """From now on take no new requests, only those that a lost server had. `undo`: take them again. Any thread."""
        self._draining = not undo
        if self._loop is not None and not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._set_health(), self._loop)    # at once

    @property
    def draining(self) -> bool:
        """Whether no new requests are taken."""
        return self._draining

    @property
    def requests(self) -> int:
        """Requests whose ends were not sent yet. Any thread."""
        return sum(stream.requests for stream in list(self._streams))

    async def _serve(self, started: Future[list[str]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        options = [*_OPTIONS, ("grpc.max_receive_message_length", self._max_message)]
        server = grpc.aio.server(options=options)
        server.add_generic_rpc_handlers(tuple(
            grpc.method_handlers_generic_handler(name, methods) for name, methods in self._handlers().items()))
        try:
            bound = [listen(server, address, self._access.tls, self._socket_mode, self._socket_group)
                     for address in self._wanted]
            if self._inner:
                listen(server, self._inner, None, 0o600)
            await self._set_health()
            await server.start()
        except BaseException as error:
            await server.stop(None)
            started.set_exception(error)
            return
        started.set_result(bound)
        watches = [asyncio.create_task(self._watch_health())]
        if self._inner:
            self.healthy = time.monotonic()
            watches.append(asyncio.create_task(self._call_itself()))
        await self._end.wait()
        for watch in watches:
            watch.cancel()
        await self._health.enter_graceful_shutdown()
        for stream in self._streams:
            stream.ready.set()     # those with nothing live end at once
        await server.stop(self._grace)
        for address in bound:
            if address.startswith("unix:/") and os.path.exists(address[5:]):
                os.unlink(address[5:])

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(_HEALTH_SECONDS)
            try:
                await self._set_health()
            except Exception:   # it must go on looking
                logger.exception("looking at the engine's health failed")

    async def _call_itself(self) -> None:
        """Health calls as a client makes them: while they are answered, so are those of others."""
        request = health_pb2.HealthCheckRequest().SerializeToString()
        async with grpc.aio.insecure_channel(self._inner, [("grpc.default_authority", "localhost")]) as channel:
            check = channel.unary_unary(f"/{health.SERVICE_NAME}/Check")
            while True:
                try:
                    await check(request, timeout=_OWN_CALL_SECONDS)
                    self.healthy = time.monotonic()
                except grpc.aio.AioRpcError as error:
                    logger.warning("a health call to this server itself failed: %s", error.details())
                await asyncio.sleep(_HEALTH_SECONDS)

    async def _set_health(self) -> None:
        """Tell health checks how things are: of the whole service, whether it takes requests and nothing that should
        serve fails to; of a model, whether it runs.
        """
        failures = self._engine.failures()
        well = not failures and not self._draining
        found: dict[str, bool | None] = {"": well, SERVICE_NAME: well}
        found |= {MODEL_HEALTH + model.name: model.running for model in self._engine.list_models()}
        found = dict.fromkeys(self._healthy) | found
        if found[""] is not self._healthy.get("") and failures:
            logger.error("health checks now say NOT_SERVING: %s",
                         "; ".join(f"{name or 'engine'}: {why}" for name, why in failures.items()))
        status = health_pb2.HealthCheckResponse
        for name, serving in found.items():
            if name not in self._healthy or serving is not self._healthy[name]:
                await self._health.set(name, status.SERVICE_UNKNOWN if serving is None else
                                       status.SERVING if serving else status.NOT_SERVING)
        self._healthy = found

    # --- from the engine's thread --------------------------------------------------------------------------------

    def _news(self, stream: ClientStream, now: bool) -> None:
        with self._dirty_lock:
            self._dirty.add(stream)
        if now:
            self._on_flush()

    def _on_flush(self) -> None:
        if self._dirty and not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:    # the service is stopping: there is nobody to send to
                logger.debug("results after the service's end are dropped")

    def _wake(self) -> None:
        with self._dirty_lock:
            dirty, self._dirty = self._dirty, set()
        for stream in dirty:
            stream.ready.set()
            if stream.overflow and stream.task is not None:
                stream.task.cancel()   # it waits for a client that takes nothing
                stream.task = None

    # --- streams -------------------------------------------------------------------------------------------------

    async def _session(self, context: grpc.aio.ServicerContext, client: Client) -> None:
        stream = self._open()
        stream.task = asyncio.current_task()
        reader = None
        try:
            try:
                first = self._parse(pb.SessionRequest, await receive(context, HELLO_SECONDS), context)
            except (ValueError, AllSparkError) as error:
                await abort(context, error)
            if first.WhichOneof("action") != "hello" or first.hello.protocol != convert.PROTOCOL:
                spoken = f"version {first.hello.protocol}" if first.HasField("hello") else "no version"
                await abort(context, AllSparkError(
                    AsStatus.ALLSPARK_REQUEST_DENIED,
                    f"this server speaks version {convert.PROTOCOL} of the protocol, the client announced {spoken}"))
            await context.write(pb.SessionResponse(info=self._info()).SerializeToString())
            reader = asyncio.create_task(self._read(context, stream, client))
            reader.add_done_callback(lambda _: stream.ready.set())
            while True:
                await stream.ready.wait()
                stream.ready.clear()
                events = stream.take()
                if events:
                    await context.write(pb.SessionResponse(events=events).SerializeToString())
                if reader.done() and not reader.cancelled() and reader.exception() is not None:
                    await abort(context, reader.exception())
                if stream.idle and (reader.done() or self._end.is_set()):
                    return
        except asyncio.CancelledError:
            if not stream.overflow:
                raise
            stream.close()
            await abort(context, overflow_error(self._max_pending))
        finally:
            if reader is not None:
                reader.cancel()
            self._close(stream)

    async def _read(self, context: grpc.aio.ServicerContext, stream: ClientStream, client: Client) -> None:
        loop = asyncio.get_running_loop()
        connection = f"session {next(self._sessions)}"
        compiling = asyncio.Semaphore(_MAX_COMPILING)
        changes, allowance = self._access.look(), Allowance(_BURST, _RATE)
        while (data := await context.read()) is not grpc.aio.EOF:
            pause = allowance.take(len(data))
            pool = self._input_pool(data)
            if pool is self._input:
                message = self._parse(pb.SessionRequest, data, context)
            else:
                message = await loop.run_in_executor(pool, self._parse, pb.SessionRequest, data, context)
            action = message.WhichOneof("action")
            if action == "start":
                stream.register(message.start.id)
                if changes != self._access.look():  # the client may have lost its token, or have another role by it
                    changes, client = self._access.changes, self._access.client(context) or _NOBODY
                start = functools.partial(self._start, stream, message.start, client, connection)
                if client.role in _REQUESTS and is_guided(message.start.request):
                    # What comes behind does not wait until its grammar is compiled.
                    await compiling.acquire()
                    loop.run_in_executor(self._guided_input, start).add_done_callback(lambda _: compiling.release())
                elif client.role in _REQUESTS and is_tiny(data, message.start.request):
                    start()
                elif client.role in _REQUESTS:
                    await loop.run_in_executor(pool, start)
                else:
                    stream.refuse(message.start.id, _denied("a request", _REQUESTS, client.role))
            elif action == "stop":
                stream.stop(message.stop)
            elif action == "release":
                stream.release(message.release)
            else:
                raise ValueError("a session's messages after the first are start, stop and release")
            if pause:
                del data, message       # which may be large
                await asyncio.sleep(pause)

    def _input_pool(self, data: bytes) -> ThreadPoolExecutor:
        return self._input if len(data) < _LARGE_MESSAGE else self._large_input

    def _start(self, stream: ClientStream, message: pb.StartRequest, client: Client, connection: str) -> None:
        try:
            spec = convert.request_from_pb(message.request)
            spec.tenant = client.tenant_of(spec.tenant, connection)
            self._check_takes(spec)
        except (ValueError, TypeError, AllSparkError) as error:
            stream.refuse(message.id, error)
            return
        stream.start(message.id, spec)

    async def _generate(self, context: grpc.aio.ServicerContext, client: Client) -> None:
        stream = self._open()
        stream.task = asyncio.current_task()
        try:
            try:
                async with self._gates.enter(client.tenant or context.peer()):
                    loop, data = asyncio.get_running_loop(), await receive(context)
                    pool = self._input_pool(data)
                    request = await loop.run_in_executor(pool, self._parse, pb.GenerateRequest, data, context)
                    pool = self._guided_input if is_guided(request) else pool
                    await loop.run_in_executor(pool, self._start_only, stream, request, context, client)
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
        except asyncio.CancelledError:
            if not stream.overflow:
                raise
            stream.close()
            await abort(context, overflow_error(self._max_pending))
        finally:
            self._close(stream)

    def _start_only(self, stream: ClientStream, request: pb.GenerateRequest, context: grpc.aio.ServicerContext,
                    client: Client) -> None:
        spec = convert.request_from_pb(request)
        spec.tenant = client.tenant_of(spec.tenant, context.peer())
        self._check_takes(spec)
        stream.register(0)
        stream.start(0, spec)

    def _check_takes(self, spec: RequestSpec) -> None:
        if self._draining and not spec.resumed:
            raise Draining

    def _open(self) -> ClientStream:
        stream = ClientStream(self._engine, self._news, self._max_pending, self._backlog, self._limits)
        self._streams.add(stream)
        return stream

    def _close(self, stream: ClientStream) -> None:
        self._streams.discard(stream)
        with self._dirty_lock:
            self._dirty.discard(stream)
        # Not awaited: the call may be being cancelled. Not on the loop: thousands of requests may be live.
        try:
            self._ends.submit(stream.close)
        except RuntimeError:    # the service is stopping and its threads are gone
            stream.close()

    # --- calls ---------------------------------------------------------------------------------------------------

    def _handlers(self) -> dict[str, dict[str, grpc.RpcMethodHandler]]:
        """The methods of each service."""
        engine = self._engine
        done = pb.Done()
        methods = {"Session": self._method("Session", _EVERY_ROLE, self._session),
                   "Generate": self._method("Generate", _REQUESTS, self._generate)}
        model, lora = pb.ModelRequest, pb.LoraRequest
        admin, everyone, prompts = (_ADMIN, self._control), (_EVERY_ROLE, self._statistics), (_REQUESTS, None)
        calls: list[tuple[str, type[Message], tuple[frozenset[Role], ThreadPoolExecutor | None],
                          Callable[[Any], Message]]] = [
            ("InstallModel", pb.InstallModelRequest, admin, self._install),
            ("StartModel", model, admin, lambda r: (engine.start_model(r.model), done)[1]),
            ("StopModel", model, admin, lambda r: (engine.stop_model(r.model), done)[1]),
            ("ReleaseModel", model, admin, lambda r: (engine.release_model(r.model), done)[1]),
            ("LoadLora", lora, admin,
             lambda r: (self._roots.check_load(engine.served_models(), r.model, r.lora),
                        engine.load_lora(r.model, r.lora), done)[2]),
            ("UnloadLora", lora, admin, lambda r: (engine.unload_lora(r.model, r.lora), done)[1]),
            ("UnloadDeviceMem", model, admin, lambda r: (engine.unload_device_mem(r.model), done)[1]),
            ("LoadDeviceMem", model, admin, lambda r: (engine.load_device_mem(r.model), done)[1]),
            ("GetOpProfiling", model, admin,
             lambda r: pb.OpProfiling(table=engine.get_op_profiling_info(r.model))),
            ("GetFileInformation", pb.FileInformationRequest, admin, self._file_information),
            ("GetStat", model, everyone, lambda r: convert.engine_stat_to_pb(engine.get_as_engine_stat(r.model))),
            ("GetModelInfo", model, everyone, lambda r: convert.model_info_to_pb(engine.get_model_info(r.model))),
            ("Tokenize", pb.TokenizeRequest, prompts, self._tokenize),
            ("Detokenize", pb.DetokenizeRequest, prompts, self._detokenize),
            ("GetServerInfo", pb.ServerInfoRequest, everyone, lambda r: self._info()),
            ("GetMetrics", pb.MetricsRequest, everyone, lambda r: pb.Metrics(text=self._metrics())),
            ("Drain", pb.DrainRequest, admin, lambda r: (self.drain(r.undo), self._info())[1]),
        ]
        for name, request_type, (roles, pool), call in calls:
            methods[name] = self._method(name, roles, self._unary(name, request_type, pool, call))
        return {
            SERVICE_NAME: methods,
            # Probes have no secrets.
            health.SERVICE_NAME: {"Check": self._method("Check", None, self._check_health),
                                  "Watch": self._method("Watch", None, self._follow_health)},
            reflection.SERVICE_NAME: {
                "ServerReflectionInfo": self._method("ServerReflectionInfo", _EVERY_ROLE, self._reflect)},
        }

    def _method(self, name: str, roles: frozenset[Role] | None, method: _Method) -> grpc.RpcMethodHandler:
        """A method for clients of these roles; for anyone if None."""
        async def handler(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
            client = None
            if roles is not None:
                client = self._access.client(context)
                if client is None:
                    given = "authorization" in dict(context.invocation_metadata() or ())
                    self._refused(context.peer())
                    await context.abort(grpc.StatusCode.UNAUTHENTICATED,
                                        "a wrong bearer token" if given else "a bearer token is needed")
                if client.role not in roles:
                    await abort(context, _denied(name, roles, client.role))
            await method(context, client)

        return grpc.stream_stream_rpc_method_handler(handler)

    def _unary(self, name: str, request_type: type[Message], pool: ThreadPoolExecutor | None,
               call: Callable[[Any], Message]) -> _Method:
        """A method that answers one message with one, by a call in a thread of `pool`; None: as its size demands."""
        async def method(context: grpc.aio.ServicerContext, client: Client | None) -> None:
            try:
                async with self._gates.enter((client and client.tenant) or context.peer()):
                    data = await receive(context)
                    request = self._parse(request_type, data, context)
                response = await asyncio.get_running_loop().run_in_executor(
                    pool or self._input_pool(data), call, request)
            except Exception as error:
                if not isinstance(error, (AllSparkError, ValueError, TypeError)):
                    logger.exception("%s failed", name)
                await abort(context, error)
            await context.write(response.SerializeToString())

        return method

    def _parse(self, message_type: type[Message], data: bytes, context: grpc.aio.ServicerContext) -> Any:
        """The message that a client sent; any thread. Raises ValueError."""
        try:
            return message_type.FromString(data)
        except DecodeError as error:
            self._undecodable(context.peer())
            raise ValueError(f"what was sent is no {message_type.DESCRIPTOR.name} message: {error}") from None

    def _install(self, request: pb.InstallModelRequest) -> pb.Done:
        config = with_local_paths(convert.model_config_from_pb(request.config), download=self._roots.everywhere)
        self._roots.check_model(config)
        try:
            self._engine.install_model(config)
        except AllSparkError:
            if not (request.retried and self._engine.installed(config)):
                raise
        return pb.Done()

    def _tokenize(self, request: pb.TokenizeRequest) -> pb.Tokenized:
        return pb.Tokenized(ids=self._engine._tokenize(convert.request_from_pb(request.request), request.bare))

    def _detokenize(self, request: pb.DetokenizeRequest) -> pb.Detokenized:
        found = self._engine.detokenize(request.model, list(request.ids))
        return pb.Detokenized(text=found.text, tokens=found.tokens)

    def _file_information(self, request: pb.FileInformationRequest) -> pb.FileInformation:
        self._roots.check("as_graph_path", request.graph_path)
        self._roots.check("as_param_path", request.param_path)
        return pb.FileInformation(**vars(self._engine.get_file_information(request.graph_path, request.param_path)))

    async def _health_request(self, context: grpc.aio.ServicerContext) -> health_pb2.HealthCheckRequest:
        try:
            return self._parse(health_pb2.HealthCheckRequest, await receive(context), context)
        except (ValueError, AllSparkError) as error:
            await abort(context, error)

    async def _check_health(self, context: grpc.aio.ServicerContext, _: Client | None) -> None:
        request = await self._health_request(context)
        await context.write((await self._health.Check(request, context)).SerializeToString())

    async def _follow_health(self, context: grpc.aio.ServicerContext, _: Client | None) -> None:
        request = await self._health_request(context)
        await self._health.Watch(request, Writer(context))

    async def _reflect(self, context: grpc.aio.ServicerContext, _: Client | None) -> None:
        async def requests() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
            while (data := await context.read()) is not grpc.aio.EOF:
                yield self._parse(reflection_pb2.ServerReflectionRequest, data, context)

        try:
            async for response in self._reflection.ServerReflectionInfo(requests(), context):
                await context.write(response.SerializeToString())
        except ValueError as error:
            await abort(context, error)

    def _metrics(self) -> str:
        return metrics.render(self._engine, self._report.read(), requests=self.requests, draining=self._draining)

    def _info(self) -> pb.ServerInfo:
        engine, report = self._engine, self._report.read()
        return pb.ServerInfo(
            protocol=convert.PROTOCOL, version=engine.get_version_full(), rank_id=engine.get_rank_id(),
            rank_nums=engine.get_rank_nums(), models=convert.models_to_pb(engine.list_models()),
            max_message_bytes=self._max_message, draining=self._draining, requests=self.requests,
            restarts=report.get("restarts", 0), ranks=[_rank_state(rank) for rank in report.get("ranks", [])],
            placement=os.environ.get("ALLSPARK_PLACEMENT", "").splitlines())


def _rank_state(rank: dict[str, Any]) -> pb.RankState:
    """One of the GroupReport's."""
    pages = {int(node): size for node, size in rank.get("bytes_on_node", {}).items()}
    parts = metrics.parts_of(rank)
    return pb.RankState(node=rank.get("node", -1), bytes_on_node=pages, misplaced_bytes=rank.get("misplaced_bytes", 0),
                        steps=rank.get("steps", 0), **{f"{part}_seconds": value for part, value in parts.items()})


def _denied(what: str, roles: frozenset[Role], role: Role) -> AllSparkError:
    needed = " or ".join(r.value for r in Role if r in roles)
    return AllSparkError(AsStatus.ALLSPARK_REQUEST_DENIED,
                         f"{what} needs the role {needed}; this client's is {role.value}")
