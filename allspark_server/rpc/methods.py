"""The methods of rank 0's service: their roles and threads, and the unary calls to the engine.

Every method, unary ones included, is registered as a stream of bytes. So no message is received before the role of its
sender is known (access.py), and bytes that cannot be decoded get a clear error.
"""
from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from allspark_client import convert
from allspark_client._proto import allspark_pb2 as pb
from allspark_client.errors import AllSparkError, AsStatus

from ..access import Access, Client, ModelRoots, Role
from ..allowances import Allowances
from ..weights.hub import with_local_paths
from .calls import EOF, ConcurrencyLimits, RareLog, Writer, abort, receive
from .health import SERVICE_NAME, Health
from .prefix_log import PrefixLog
from .request_sizes import check_sizes
from .tenant_threads import TenantThreads
from .wire_format import check_items

if TYPE_CHECKING:
    from ..engine.engine import Engine

logger = logging.getLogger(__name__)

#: messages of at least this many bytes use a separate thread pool, so that short prompts do not wait for long ones
LARGE_MESSAGE = 64 << 10
#: bytes that one tenant may send at once, and per second: a million tokens of text, more than any model reads
BURST, RATE = 8 << 20, 4 << 20
#: calls of one client that are read, wait for a thread or run in one, at the same time: their messages take memory
_AT_ONCE = 12
_MAX_DETOKENIZED = 1 << 20  # ids of one call
_PROGRESS_SECONDS = 0.25    # between two messages about a load
EVERY_ROLE = frozenset(Role)
REQUESTS = frozenset((Role.GENERATE, Role.DOOR, Role.ADMIN))
ADMIN = frozenset((Role.ADMIN,))
GATEWAYS = frozenset((Role.DOOR, Role.ADMIN))   # they may know of the prompts of all tenants
M = TypeVar("M", bound=Message)
T = TypeVar("T")
#: the body of a method: it is called with the context and the client, which has been allowed to call it
Method = Callable[[grpc.aio.ServicerContext, Client], Awaitable[None]]
_ANYONE = Client(Role.READ)     # the client of methods that ask for no token


class Workers:
    """Threads for blocking calls of the engine. Calls that may take long have threads of their own, and no tenant has
    all threads that read prompts.
    """

    def __init__(self) -> None:
        self.control = ThreadPoolExecutor(4, thread_name_prefix="allspark-control")         # loads take minutes
        self.parsing = TenantThreads(2, 1, "allspark-parsing")                              # of large messages
        self.input = TenantThreads(4, 2, "allspark-input")                                  # prompts of usual size
        self.large_input = TenantThreads(2, 1, "allspark-large-input")
        self.guided_input = TenantThreads(4, 2, "allspark-guided-input")                    # compiles grammars
        self.statistics = ThreadPoolExecutor(2, thread_name_prefix="allspark-statistics")
        self.ends = ThreadPoolExecutor(1, thread_name_prefix="allspark-ends")               # of sessions

    def of_size(self, size: int) -> TenantThreads:
        """The threads that handle a request whose message has `size` bytes."""
        return self.input if size < LARGE_MESSAGE else self.large_input

    def shutdown(self) -> None:
        """End the threads; loads that still run are not waited for."""
        self.control.shutdown(wait=False, cancel_futures=True)
        for threads in (self.parsing, self.input, self.large_input, self.guided_input):
            threads.shutdown()
        self.statistics.shutdown(cancel_futures=True)
        self.ends.shutdown()


class Methods:
    """Makes gRPC handlers: checks roles, limits concurrency, decodes messages."""

    def __init__(self, access: Access, workers: Workers):
        self._access, self._workers = access, workers
        self.concurrency = ConcurrencyLimits(_AT_ONCE)
        self.allowances = Allowances(BURST, RATE)
        self._undecodable = RareLog("a message of %s cannot be decoded")
        self._refused = RareLog("a call of %s was refused: it shows no valid token")

    def method(self, name: str, roles: frozenset[Role] | None, method: Method) -> grpc.RpcMethodHandler[Any, Any]:
        """A method for clients of these roles; None: for anyone."""
        async def handler(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> None:
            client = _ANYONE
            if roles is not None:
                known = self._access.client(context)
                if known is None:
                    given = "authorization" in dict(context.invocation_metadata() or ())
                    self._refused(context.peer())
                    await context.abort(grpc.StatusCode.UNAUTHENTICATED,
                                        "a wrong bearer token" if given else "a bearer token is needed")
                    return
                client = known
                if client.role not in roles:
                    await abort(context, denied(name, roles, client.role))
            await method(context, client)

        return grpc.stream_stream_rpc_method_handler(handler)

    def unary(self, name: str, request_type: type[M], pool: ThreadPoolExecutor | None,
              call: Callable[[M], Message]) -> Method:
        """A method that answers one message with one. `call` runs in a thread of `pool`; None: chosen by size."""
        async def method(context: grpc.aio.ServicerContext[Any, Any], client: Client) -> None:
            tenant = client.tenant or context.peer()
            try:
                async with self.concurrency.enter(tenant):
                    data = await receive(context)
                    await asyncio.sleep(self.allowances.take(tenant, len(data)))
                    request = await self.parse_in_thread(request_type, data, context, client, tenant)
                    if pool is not None:
                        response = await asyncio.get_running_loop().run_in_executor(pool, call, request)
                    else:
                        threads = self._workers.of_size(len(data))
                        del data
                        response = await self.charged(tenant, threads, functools.partial(call, request))
            except Exception as error:
                if not isinstance(error, (AllSparkError, ValueError, TypeError)):
                    logger.exception("%s failed", name)
                await abort(context, error)
            await context.write(response.SerializeToString())

        return method

    async def charged(self, tenant: str, threads: TenantThreads, call: Callable[[], T]) -> T:
        """The result of `call` in a thread. If it refuses, its time counts against the tenant's allowance."""
        seconds = 0.0

        def timed() -> T:
            nonlocal seconds
            began = time.perf_counter()
            try:
                return call()
            finally:
                seconds = time.perf_counter() - began

        try:
            return await asyncio.wrap_future(threads.submit(tenant, timed))
        except (AllSparkError, ValueError, TypeError):
            self.allowances.charge(tenant, seconds)
            raise

    async def parse_in_thread(self, message_type: type[M], data: bytes, context: grpc.aio.ServicerContext[Any, Any],
                              client: Client, tenant: str) -> M:
        """As `parse`; a large message is parsed in a thread, and must not have too many items (TooManyItems), unless
        an administrator sends it.
        """
        if len(data) < LARGE_MESSAGE:
            return self.parse(message_type, data, context)

        def checked() -> M:
            if client.role is not Role.ADMIN:
                check_items(data, message_type)
            return self.parse(message_type, data, context)

        return await self.charged(tenant, self._workers.parsing, checked)

    def parse(self, message_type: type[M], data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> M:
        """The message that a client sent. Any thread may call this. Raises ValueError."""
        try:
            return message_type.FromString(data)
        except DecodeError as error:
            self._undecodable(context.peer())
            raise ValueError(f"the bytes sent are not a {message_type.DESCRIPTOR.name} message: {error}") from None

    def probes(self, state: Health) -> dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]]:
        """The services of health checks, which need no token, and of reflection."""
        servicer = reflection.aio.ReflectionServicer(
            (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME))

        async def request_of(context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                return self.parse(health_pb2.HealthCheckRequest, await receive(context), context)
            except (ValueError, AllSparkError) as error:
                await abort(context, error)

        async def check(context: grpc.aio.ServicerContext[Any, Any], _: Client) -> None:
            answer = await state.servicer.Check(await request_of(context), context)
            await context.write(answer.SerializeToString())

        async def watch(context: grpc.aio.ServicerContext[Any, Any], _: Client) -> None:
            await state.servicer.Watch(await request_of(context), Writer(context))

        async def reflect(context: grpc.aio.ServicerContext[Any, Any], _: Client) -> None:
            async def requests() -> AsyncIterator[Any]:
                while (data := await context.read()) is not EOF:
                    yield self.parse(reflection_pb2.ServerReflectionRequest, data, context)

            try:
                async for response in servicer.ServerReflectionInfo(requests(), context):
                    await context.write(response.SerializeToString())
            except ValueError as error:
                await abort(context, error)

        return {health.SERVICE_NAME: {"Check": self.method("Check", None, check),
                                      "Watch": self.method("Watch", None, watch)},
                reflection.SERVICE_NAME: {"ServerReflectionInfo": self.method("ServerReflectionInfo", EVERY_ROLE,
                                                                              reflect)}}


class UnaryCalls:
    """The calls to the engine that answer one message with one."""

    def __init__(self, engine: Engine, roots: ModelRoots):
        self._engine, self._roots = engine, roots

    def handlers(self, methods: Methods, workers: Workers, info: Callable[[], pb.ServerInfo],
                 drain: Callable[[float], None], metrics: Callable[[], str], prefixes: PrefixLog,
                 ) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """The calls by name. `info`, `drain`, `metrics`, `prefixes`: of the service."""
        engine = self._engine
        model, lora = pb.ModelRequest, pb.LoraRequest

        def done(action: Callable[[Any], object]) -> Callable[[Any], pb.Done]:
            def call(request: Any) -> pb.Done:
                action(request)
                return pb.Done()

            return call

        def drained(request: pb.DrainRequest) -> pb.ServerInfo:
            if not request.lease_seconds >= 0:
                raise ValueError(f"lease_seconds is {request.lease_seconds}; it must be at least 0")
            drain(0.0 if request.undo else request.lease_seconds or math.inf)
            return info()

        admin, everyone, prompts = (ADMIN, workers.control), (EVERY_ROLE, workers.statistics), (REQUESTS, None)
        calls: list[tuple[str, type[Message], tuple[frozenset[Role], ThreadPoolExecutor | None],
                          Callable[[Any], Message]]] = [
            ("InstallModel", pb.InstallModelRequest, admin, self._install),
            ("StartModel", model, admin, done(lambda r: engine.start_model(r.model))),
            ("StopModel", model, admin, done(lambda r: engine.stop_model(r.model))),
            ("ReleaseModel", model, admin, done(lambda r: engine.release_model(r.model))),
            ("UnloadModel", model, admin, done(lambda r: engine.unload_model(r.model))),
            ("LoadLora", lora, admin, done(self._load_lora)),
            ("UnloadLora", lora, admin, done(lambda r: engine.unload_lora(r.model, r.lora))),
            ("UnloadDeviceMem", model, admin, done(lambda r: engine.unload_device_mem(r.model))),
            ("LoadDeviceMem", model, admin, done(lambda r: engine.load_device_mem(r.model))),
            ("ResetPrefixCache", model, admin, done(lambda r: engine.reset_prefix_cache(r.model))),
            ("GetOpProfiling", model, admin,
             lambda r: pb.OpProfiling(table=engine.get_op_profiling_info(r.model))),
            ("GetFileInformation", pb.FileInformationRequest, admin, self._file_information),
            ("GetStat", model, everyone, lambda r: convert.engine_stat_to_pb(engine.get_as_engine_stat(r.model))),
            ("GetModelInfo", model, everyone, lambda r: convert.model_info_to_pb(engine.get_model_info(r.model))),
            ("Tokenize", pb.TokenizeRequest, prompts, self._tokenize),
            ("Detokenize", pb.DetokenizeRequest, prompts, self._detokenize),
            ("GetServerInfo", pb.ServerInfoRequest, everyone, lambda _: info()),
            ("GetPrefixes", pb.PrefixesRequest, (GATEWAYS, workers.statistics),
             lambda r: prefixes.since(r.epoch, r.number)),
            ("GetMetrics", pb.MetricsRequest, everyone, lambda _: pb.Metrics(text=metrics())),
            ("Drain", pb.DrainRequest, admin, drained),
        ]
        return {"LoadModel": methods.method("LoadModel", REQUESTS, functools.partial(self._load, methods)),
                **{name: methods.method(name, roles, methods.unary(name, request_type, pool, call))
                   for name, request_type, (roles, pool), call in calls}}

    async def _load(self, methods: Methods, context: grpc.aio.ServicerContext[Any, Any], client: Client) -> None:
        """Loads a model on demand; the progress is sent until it is loaded."""
        try:
            request = methods.parse(pb.ModelRequest, await receive(context), context)
            client.check_model(request.model)
            loaded = asyncio.wrap_future(self._engine.load_later(request.model))
            while not (await asyncio.wait((asyncio.shield(loaded),), timeout=_PROGRESS_SECONDS))[0]:
                progress = pb.LoadProgress(part=self._engine.loaded_part(request.model))
                await context.write(progress.SerializeToString())
            await loaded
        except (AllSparkError, ValueError, TypeError) as error:
            await abort(context, error)

    def _install(self, request: pb.InstallModelRequest) -> pb.Done:
        config = with_local_paths(convert.model_config_from_pb(request.config), download=self._roots.everywhere)
        self._roots.check_model(config)
        try:
            self._engine.install_model(config)
        except AllSparkError:
            if not (request.retried and self._engine.installed(config)):
                raise
        return pb.Done()

    def _load_lora(self, request: pb.LoraRequest) -> None:
        self._roots.check_load(self._engine.served_models(), request.model, request.lora)
        self._engine.load_lora(request.model, request.lora)

    def _tokenize(self, request: pb.TokenizeRequest) -> pb.Tokenized:
        check_sizes(request.request, self._engine.info(request.request.model), Role.GENERATE)
        return pb.Tokenized(ids=self._engine._tokenize(convert.request_from_pb(request.request), request.bare))

    def _detokenize(self, request: pb.DetokenizeRequest) -> pb.Detokenized:
        if len(request.ids) > _MAX_DETOKENIZED:
            raise ValueError(f"ids has {len(request.ids)} ids; allowed: at most {_MAX_DETOKENIZED}")
        answer = self._engine.detokenize(request.model, list(request.ids))
        return pb.Detokenized(text=answer.text, tokens=answer.tokens)

    def _file_information(self, request: pb.FileInformationRequest) -> pb.FileInformation:
        self._roots.check("as_graph_path", request.graph_path)
        self._roots.check("as_param_path", request.param_path)
        return pb.FileInformation(**vars(self._engine.get_file_information(request.graph_path, request.param_path)))


def denied(what: str, roles: frozenset[Role], role: Role) -> AllSparkError:
    """The error of a client whose role does not allow `what`. `roles`: those that do."""
    needed = " or ".join(r.value for r in Role if r in roles)
    return AllSparkError(AsStatus.ALLSPARK_REQUEST_DENIED,
                         f"{what} needs the role {needed}; this client's is {role.value}")
