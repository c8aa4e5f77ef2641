"""The gRPC service of rank 0: an event loop in a thread of its own, between clients and the engine's thread.

Blocking engine calls run in worker threads. Results come the other way: the engine's thread files them in the sessions
of their clients, and after each step wakes the loop once, which sends each client at most one message.
"""
from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
import stat
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, AsyncIterator, Callable

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from allspark_client import convert
from allspark_client._proto import allspark_pb2 as pb
from allspark_client.errors import AllSparkError, AsStatus
from allspark_client.types import TlsConfig

from .session import MAX_PENDING, Backlog, Session, generate_response, overflow_error

if TYPE_CHECKING:
    from .engine import Engine

logger = logging.getLogger(__name__)

SERVICE_NAME = "allspark.Allspark"
#: A silent client is noticed after a ping interval and a ping timeout: 12 s, within the 15 s that are promised.
PING_INTERVAL_SECONDS, PING_TIMEOUT_SECONDS = 5, 7
_MAX_MESSAGE = 256 << 20
_MAX_METADATA = 64 << 10
_OPTIONS = [
    ("grpc.keepalive_time_ms", PING_INTERVAL_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_SECONDS * 1000),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_SECONDS * 1000),    # of bandwidth probes, which stand in for keepalive
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),   # a second server on the same port is an error, not a rival for its connections
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", _MAX_MESSAGE),
    ("grpc.max_metadata_size", _MAX_METADATA),
    ("grpc.absolute_max_metadata_size", 2 * _MAX_METADATA),
]
_CODES = {
    AsStatus.ALLSPARK_PARAM_ERROR: grpc.StatusCode.INVALID_ARGUMENT,
    AsStatus.ALLSPARK_MEMORY_ERROR: grpc.StatusCode.RESOURCE_EXHAUSTED,
    AsStatus.ALLSPARK_CACHE_MEMORY_OUT: grpc.StatusCode.RESOURCE_EXHAUSTED,
    AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR: grpc.StatusCode.RESOURCE_EXHAUSTED,
    AsStatus.ALLSPARK_INVALID_CALL_ERROR: grpc.StatusCode.FAILED_PRECONDITION,
    AsStatus.ALLSPARK_REQUEST_DENIED: grpc.StatusCode.PERMISSION_DENIED,
}


class Service:
    """Serves an engine to clients. `start` returns once it listens; `stop` ends it."""

    def __init__(self, engine: "Engine", addresses: list[str], *, token: str | None = None,
                 tls: TlsConfig | dict[str, str] | None = None, max_pending: int = MAX_PENDING):
        """`addresses`: "host:port" (port 0: any free one) or "unix:/path". `token`: what clients must present as bearer
        token. `tls`: certificate and key for TCP addresses (Unix sockets are guarded by their directory); with a ca,
        clients need certificates. `max_pending`: tokens a client may leave unread before it is disconnected."""
        if isinstance(addresses, str) or not addresses:
            raise ValueError(f"addresses={addresses!r} must be a list of 'host:port' and 'unix:/path', at least one")
        self._engine = engine
        self._wanted = list(addresses)
        self._token = token
        self._tls = TlsConfig(**tls) if isinstance(tls, dict) else tls
        self._max_pending = max_pending
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._end: asyncio.Event | None = None
        self._grace = 0.0
        self._control = ThreadPoolExecutor(4, thread_name_prefix="allspark-control")   # loads take minutes
        self._quick = ThreadPoolExecutor(4, thread_name_prefix="allspark-submit")
        self._dirty: set[Session] = set()
        self._dirty_lock = threading.Lock()
        self._sessions: set[Session] = set()
        self._backlog = Backlog()
        self._health: health.aio.HealthServicer | None = None
        #: what the service listens on, with real port numbers
        self.addresses: list[str] = []

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
        self._quick.shutdown(wait=True)     # sessions are being closed there

    async def _serve(self, started: "Future[list[str]]") -> None:
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        interceptors = [_TokenCheck(self._token)] if self._token else []
        server = grpc.aio.server(options=_OPTIONS, interceptors=interceptors)
        server.add_generic_rpc_handlers((self._handlers(),))
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        try:
            bound = [self._bind(server, address) for address in self._wanted]
            await server.start()
            await self._set_health(True)
        except BaseException as error:
            await server.stop(None)
            started.set_exception(error)
            return
        started.set_result(bound)
        await self._end.wait()
        await self._set_health(False)
        for session in self._sessions:
            session.ready.set()     # those with nothing live end at once
        await server.stop(self._grace)
        for address in bound:
            if address.startswith("unix:/") and os.path.exists(address[5:]):
                os.unlink(address[5:])

    async def _set_health(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    def _bind(self, server: grpc.aio.Server, address: str) -> str:
        unix = address.startswith("unix:")
        if unix:
            address = "unix:" + _check_socket(address)
        elif ":" not in address:
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                                f"address {address!r} is neither host:port nor unix:/path")
        credentials = _credentials(self._tls) if self._tls is not None and not unix else None
        try:
            if credentials is not None:
                port = server.add_secure_port(address, credentials)
            else:
                if self._token and not unix and not address.startswith(("127.", "localhost:", "[::1]:")):
                    logger.warning("clients send their token in clear text to %s; configure TLS", address)
                port = server.add_insecure_port(address)
        except RuntimeError as error:
            port, cause = 0, error
        else:
            cause = None
        if port == 0:
            raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR,
                                f"cannot listen on {address}: the port is in use, or the host is not this machine's"
                                ) from cause
        return address if unix else f"{address.rsplit(':', 1)[0]}:{port}"

    # --- from the engine's thread --------------------------------------------------------------------------------

    def _news(self, session: Session, now: bool) -> None:
        with self._dirty_lock:
            self._dirty.add(session)
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
        for session in dirty:
            session.ready.set()
            if session.overflow and session.task is not None:
                session.task.cancel()   # it waits for a client that takes nothing
                session.task = None

    # --- streams -------------------------------------------------------------------------------------------------

    async def _session(self, requests: AsyncIterator[pb.SessionRequest], context: grpc.aio.ServicerContext) -> None:
        session = self._open()
        session.task = asyncio.current_task()
        reader = None
        try:
            first = await context.read()
            if first is grpc.aio.EOF:
                return
            if first.WhichOneof("action") != "hello" or first.hello.protocol != convert.PROTOCOL:
                spoken = f"version {first.hello.protocol}" if first.HasField("hello") else "no version"
                await _abort(context, AllSparkError(
                    AsStatus.ALLSPARK_REQUEST_DENIED,
                    f"this server speaks version {convert.PROTOCOL} of the protocol, the client announced {spoken}"))
            await context.write(pb.SessionResponse(info=self._info()))
            reader = asyncio.create_task(self._read(context, session))
            reader.add_done_callback(lambda _: session.ready.set())
            while True:
                await session.ready.wait()
                session.ready.clear()
                events = session.take()
                if events:
                    await context.write(pb.SessionResponse(events=events))
                if reader.done() and not reader.cancelled() and reader.exception() is not None:
                    await _abort(context, reader.exception())
                if session.idle and (reader.done() or self._end.is_set()):
                    return
        except asyncio.CancelledError:
            if not session.overflow:
                raise
            session.close()
            await _abort(context, overflow_error(self._max_pending))
        finally:
            if reader is not None:
                reader.cancel()
            self._close(session)

    async def _read(self, context: grpc.aio.ServicerContext, session: Session) -> None:
        loop = asyncio.get_running_loop()
        while (message := await context.read()) is not grpc.aio.EOF:
            action = message.WhichOneof("action")
            if action == "start":
                await loop.run_in_executor(self._quick, self._start, session, message.start)
            elif action == "stop":
                session.stop(message.stop)
            elif action == "release":
                session.release(message.release)
            else:
                raise ValueError("a session's messages after the first are start, stop and release")

    def _start(self, session: Session, message: pb.StartRequest) -> None:
        try:
            spec = convert.request_from_pb(message.request)
        except (ValueError, TypeError, AllSparkError) as error:
            session.refuse(message.id, error)
            return
        session.start(message.id, spec)

    async def _generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        session = self._open()
        session.task = asyncio.current_task()
        try:
            try:
                spec = convert.request_from_pb(request)
            except (ValueError, TypeError, AllSparkError) as error:
                await _abort(context, error)
            await asyncio.get_running_loop().run_in_executor(self._quick, session.start, 0, spec)
            while not session.idle:
                await session.ready.wait()
                session.ready.clear()
                for event in session.take():
                    if event.HasField("refused"):
                        await _abort(context, convert.error_from_pb(event.refused))
                    await context.write(generate_response(event))
        except asyncio.CancelledError:
            if not session.overflow:
                raise
            session.close()
            await _abort(context, overflow_error(self._max_pending))
        finally:
            self._close(session)

    def _open(self) -> Session:
        session = Session(self._engine, self._news, self._max_pending, self._backlog)
        self._sessions.add(session)
        return session

    def _close(self, session: Session) -> None:
        self._sessions.discard(session)
        with self._dirty_lock:
            self._dirty.discard(session)
        # Not awaited: the call may be being cancelled. Not on the loop: thousands of requests may be live.
        try:
            self._quick.submit(session.close)
        except RuntimeError:    # the service is stopping and its threads are gone
            session.close()

    # --- calls ---------------------------------------------------------------------------------------------------

    def _handlers(self) -> grpc.GenericRpcHandler:
        engine = self._engine
        done = pb.Done()
        handlers = {
            "Session": grpc.stream_stream_rpc_method_handler(
                self._session, pb.SessionRequest.FromString, pb.SessionResponse.SerializeToString),
            "Generate": grpc.unary_stream_rpc_method_handler(
                self._generate, pb.GenerateRequest.FromString, pb.GenerateResponse.SerializeToString),
        }
        model, lora = pb.ModelRequest, pb.LoraRequest
        calls: list[tuple[str, Any, ThreadPoolExecutor, Callable[[Any], Any]]] = [
            ("InstallModel", pb.InstallModelRequest, self._control,
             lambda r: (_install(engine, r), done)[1]),
            ("StartModel", model, self._control, lambda r: (engine.start_model(r.model), done)[1]),
            ("StopModel", model, self._control, lambda r: (engine.stop_model(r.model), done)[1]),
            ("ReleaseModel", model, self._control, lambda r: (engine.release_model(r.model), done)[1]),
            ("LoadLora", lora, self._control, lambda r: (engine.load_lora(r.model, r.lora), done)[1]),
            ("UnloadLora", lora, self._control, lambda r: (engine.unload_lora(r.model, r.lora), done)[1]),
            ("UnloadDeviceMem", model, self._control, lambda r: (engine.unload_device_mem(r.model), done)[1]),
            ("LoadDeviceMem", model, self._control, lambda r: (engine.load_device_mem(r.model), done)[1]),
            ("GetOpProfiling", model, self._control,
             lambda r: pb.OpProfiling(table=engine.get_op_profiling_info(r.model))),
            ("GetFileInformation", pb.FileInformationRequest, self._control,
             lambda r: pb.FileInformation(**vars(engine.get_file_information(r.graph_path, r.param_path)))),
            ("GetStat", model, self._quick, lambda r: convert.engine_stat_to_pb(engine.get_as_engine_stat(r.model))),
            ("GetModelInfo", model, self._quick, lambda r: convert.model_info_to_pb(engine.get_model_info(r.model))),
            ("GetServerInfo", pb.ServerInfoRequest, self._quick, lambda r: self._info()),
        ]
        for name, request_type, pool, call in calls:
            handlers[name] = grpc.unary_unary_rpc_method_handler(
                _unary(name, pool, call), request_type.FromString, lambda response: response.SerializeToString())
        return grpc.method_handlers_generic_handler(SERVICE_NAME, handlers)

    def _info(self) -> pb.ServerInfo:
        engine = self._engine
        return pb.ServerInfo(
            protocol=convert.PROTOCOL, version=engine.get_version_full(), rank_id=engine.get_rank_id(),
            rank_nums=engine.get_rank_nums(), models=convert.models_to_pb(engine.list_models()))


def _install(engine: "Engine", request: pb.InstallModelRequest) -> None:
    config = convert.model_config_from_pb(request.config)
    try:
        engine.install_model(config)
    except AllSparkError:
        if not (request.retried and engine.installed(config)):
            raise


def _unary(name: str, pool: ThreadPoolExecutor, call: Callable[[Any], Any]) -> Callable[..., Any]:
    async def handler(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, call, request)
        except Exception as error:
            if not isinstance(error, (AllSparkError, ValueError, TypeError)):
                logger.exception("%s failed", name)
            await _abort(context, error)

    return handler


async def _abort(context: grpc.aio.ServicerContext, error: BaseException) -> None:
    """End a call with an error that the client raises again as it was; never returns."""
    message = convert.error_to_pb(error)
    if message.kind == pb.ALLSPARK_ERROR:
        code = _CODES.get(AsStatus(message.status), grpc.StatusCode.INTERNAL)
    else:
        code = grpc.StatusCode.INVALID_ARGUMENT
    await context.abort(code, message.message[:1000],
                        trailing_metadata=((convert.ERROR_KEY, message.SerializeToString()),))


class _TokenCheck(grpc.aio.ServerInterceptor):
    """Refuses calls without the bearer token; health checks need none (probes have no secrets)."""

    def __init__(self, token: str):
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(self, continuation: Callable[..., Any], details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(details)
        if handler is None or details.method.startswith(f"/{health.SERVICE_NAME}/"):
            return handler
        given = dict(details.invocation_metadata).get("authorization", "")
        if hmac.compare_digest(given.encode() if isinstance(given, str) else given, self._expected):
            return handler

        async def deny(_: Any, context: grpc.aio.ServicerContext) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED,
                                "a wrong bearer token" if given else "a bearer token is needed")

        make = {(False, False): grpc.unary_unary_rpc_method_handler,
                (False, True): grpc.unary_stream_rpc_method_handler,
                (True, False): grpc.stream_unary_rpc_method_handler,
                (True, True): grpc.stream_stream_rpc_method_handler}
        return make[(handler.request_streaming, handler.response_streaming)](
            deny, handler.request_deserializer, handler.response_serializer)


def _check_socket(address: str) -> str:
    """The absolute path of "unix:PATH" or "unix:///PATH", free to be bound: a socket nobody listens on is removed."""
    path = address[len("unix:"):]
    path = os.path.abspath("/" + path.lstrip("/") if path.startswith("//") else path)
    if len(os.fsencode(path)) > 107:
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                            f"the socket path {path} has {len(os.fsencode(path))} bytes; Unix allows 107")
    if not os.path.isdir(os.path.dirname(path)):
        raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR,
                            f"cannot listen on unix:{path}: there is no directory {os.path.dirname(path)}")
    if not os.path.lexists(path):
        return path
    probe = socket.socket(socket.AF_UNIX)
    probe.settimeout(2.0)
    try:
        probe.connect(path)
    except ConnectionRefusedError:
        if not os.path.islink(path) and not _is_socket(path):
            raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR,
                                f"cannot listen on unix:{path}: the path exists and is not a socket") from None
        logger.warning("removing the stale socket %s: nobody listens on it", path)
        os.unlink(path)
        return path
    except OSError as error:
        raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR, f"cannot listen on unix:{path}: {error}") from error
    finally:
        probe.close()
    raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR,
                        f"cannot listen on unix:{path}: the address is in use, another server listens there")


def _is_socket(path: str) -> bool:
    return stat.S_ISSOCK(os.lstat(path).st_mode)


def _credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    if not tls.cert or not tls.key:
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, "tls needs cert and key, two PEM files")
    try:
        with open(tls.key, "rb") as key, open(tls.cert, "rb") as cert:
            pair = (key.read(), cert.read())
        ca = None
        if tls.ca:
            with open(tls.ca, "rb") as file:
                ca = file.read()
    except OSError as error:
        raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR, f"a TLS file cannot be read: {error}") from error
    return grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=ca is not None)
