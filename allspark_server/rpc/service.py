"""The gRPC service of rank 0: an event loop in a thread of its own, between clients and the engine's thread."""
from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from allspark_client import convert
from allspark_client._proto import allspark_pb2 as pb
from allspark_client.errors import AllSparkError, AsStatus

from .. import metrics
from ..access import Access, ModelRoots
from ..certificates import Certificates
from ..engine.report import GroupReport
from .client_limits import ClientLimits
from .client_stream import MAX_PENDING
from .health import SERVICE_NAME, Health
from .listen import listen, open_certificates
from .methods import EVERY_ROLE, REQUESTS, Methods, UnaryCalls, Workers
from .options import MAX_MESSAGE, SERVER_OPTIONS
from .span_calls import SpanCalls
from .streams import Streams

if TYPE_CHECKING:
    from ..engine.engine import Engine


class Service:
    """Serves an engine to clients. `start` returns once it listens; `stop` ends it.

    Args:
        engine: the engine that computes.
        addresses: "host:port" (port 0: any free port) or "unix:/path".
        access: what clients must show. By default only Unix sockets are served.
        roots: the directories of models that clients may name; by default none.
        socket_mode: the mode of Unix sockets.
        socket_group: the group of Unix sockets; "": the process's own.
        inner: a further Unix socket, for the service's health calls to itself; "": it makes none.
        limits: how many requests clients may have at the same time.
        max_message: the limit of a client's message, bytes.
        max_pending: how many tokens a client may leave unread before it is disconnected.
        share_prefixes: whether all tenants share one prefix cache.

    Raises:
        ValueError: an argument is wrong, or a TCP address is not protected.
    """

    def __init__(self, engine: Engine, addresses: list[str], *, access: Access | None = None,
                 roots: ModelRoots | None = None, socket_mode: int = 0o600, socket_group: str = "", inner: str = "",
                 limits: ClientLimits | None = None, max_message: int = MAX_MESSAGE, max_pending: int = MAX_PENDING,
                 share_prefixes: bool = False):
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
        self._socket_mode, self._socket_group = socket_mode, socket_group
        self._inner = inner
        self._report = GroupReport()
        self._max_message = max_message
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._end: asyncio.Event | None = None
        self._grace = 0.0
        self._certificates: Certificates | None = None
        self._workers = Workers()
        self._methods = Methods(access, self._workers)
        self._streams = Streams(engine, access, self._workers, self._methods, limits or ClientLimits(), max_pending,
                                self._info, share_prefixes)
        self._calls = UnaryCalls(engine, roots or ModelRoots())
        self._span_calls = SpanCalls(engine, self._methods, lambda: self.draining)
        self._health = Health(engine, lambda: self.draining)
        #: called, in any thread, when a drain begins or is undone
        self.on_drain: Callable[[], None] = lambda: None
        #: the addresses that the service listens on, with real port numbers
        self.addresses: list[str] = []

    # --- start and end -------------------------------------------------------------------------------------------

    def start(self) -> list[str]:
        """Listen and serve in a thread; returns the bound addresses.

        Raises AllSparkError, for an address in use say.
        """
        if self._thread is not None:
            raise AllSparkError(AsStatus.ALLSPARK_INVALID_CALL_ERROR, "the service was started already")
        self._engine.add_flush_listener(self._streams.flush)    # before the first request: it delivers results
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
        """Stop listening. Live requests get `grace` seconds before their streams break; they may resume elsewhere."""
        if self._thread is None or self._loop is None or self._end is None or not self._thread.is_alive():
            return
        self._grace = grace
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._workers.shutdown()
        self._span_calls.shutdown()

    def drain(self) -> None:
        """Accept no new requests any more, except resumed ones of lost servers: the service is about to stop. Any
        thread.
        """
        self._streams.stopping = True
        self._drain_changed()

    def drain_for(self, seconds: float) -> None:
        """Accept no new requests for so long, except resumed ones of lost servers; 0.0: accept them again, inf: not
        before that. A drain that lasts longer is not shortened. Any thread.
        """
        until = time.monotonic() + seconds
        self._streams.drained_until = max(until, self._streams.drained_until) if seconds else 0.0
        self._drain_changed()

    def _drain_changed(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._health.update(), self._loop)
        self.on_drain()

    @property
    def drain_left(self) -> float:
        """For how many seconds new requests are refused by `drain_for`."""
        return max(0.0, self._streams.drained_until - time.monotonic())

    @property
    def draining(self) -> bool:
        """Whether no new requests are taken."""
        return self._streams.draining

    @property
    def requests(self) -> int:
        """The number of requests whose end has not been sent yet. Any thread may read it."""
        return self._streams.requests

    @property
    def healthy(self) -> float:
        """When a health call of the service to itself was last answered (monotonic clock, s); 0.0: it makes none."""
        return self._health.answered

    async def _serve(self, started: Future[list[str]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        self._streams.begin()
        server = grpc.aio.server(options=[*SERVER_OPTIONS, ("grpc.max_receive_message_length", self._max_message)])
        server.add_generic_rpc_handlers(tuple(
            grpc.method_handlers_generic_handler(name, methods) for name, methods in self._handlers().items()))
        try:
            if self._access.tls is not None:
                self._certificates = open_certificates(self._access.tls)
            bound = [listen(server, address, self._certificates, self._socket_mode, self._socket_group)
                     for address in self._wanted]
            if self._inner:
                listen(server, self._inner, None, 0o600)
            await self._health.update()
            await server.start()
        except BaseException as error:
            await server.stop(None)
            started.set_exception(error)
            return
        tasks = [asyncio.create_task(self._health.watch())]
        if self._certificates is not None:
            tasks.append(asyncio.create_task(self._certificates.watch()))
        if self._inner:
            tasks.append(asyncio.create_task(self._health.call_itself(self._inner)))
        started.set_result(bound)
        await self._end.wait()
        for task in tasks:
            task.cancel()
        await self._health.servicer.enter_graceful_shutdown()
        self._streams.end()
        await server.stop(self._grace)
        for address in bound:
            if address.startswith("unix:/") and os.path.exists(address[5:]):
                os.unlink(address[5:])

    def _handlers(self) -> dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]]:
        """The methods of each gRPC service."""
        return {
            SERVICE_NAME: {
                "Session": self._methods.method("Session", EVERY_ROLE, self._streams.session),
                "Generate": self._methods.method("Generate", REQUESTS, self._streams.generate),
                **self._calls.handlers(self._methods, self._workers, self._info, self.drain_for, self._metrics,
                                       self._streams.prefixes),
                **self._span_calls.handlers(),
            },
            **self._methods.probes(self._health),
        }

    # --- information ---------------------------------------------------------------------------------------------

    def _metrics(self) -> str:
        expires = self._certificates.expires if self._certificates is not None else 0.0
        return metrics.render(self._engine, self._report.read(), requests=self.requests, draining=self.draining,
                              certificate_expires=expires)

    def _info(self) -> pb.ServerInfo:
        engine, report = self._engine, self._report.read()
        return pb.ServerInfo(
            protocol=convert.PROTOCOL, oldest_protocol=convert.OLDEST_PROTOCOL, version=engine.get_version_full(),
            rank_id=engine.get_rank_id(), rank_nums=engine.get_rank_nums(),
            models=convert.models_to_pb(engine.list_models()),
            max_message_bytes=self._max_message, draining=self.draining, requests=self.requests,
            restarts=report.get("restarts", 0), ranks=[_rank_state(rank) for rank in report.get("ranks", [])],
            placement=os.environ.get("ALLSPARK_PLACEMENT", "").splitlines())


def _rank_state(rank: dict[str, Any]) -> pb.RankState:
    """A rank of the GroupReport as a message."""
    pages = {int(node): size for node, size in rank.get("bytes_on_node", {}).items()}
    parts = metrics.parts_of(rank)
    return pb.RankState(node=rank.get("node", -1), bytes_on_node=pages, misplaced_bytes=rank.get("misplaced_bytes", 0),
                        steps=rank.get("steps", 0), expert_messages=rank.get("expert_messages", 0),
                        expert_rows=rank.get("expert_rows", 0), expert_hits=rank.get("expert_hits", 0),
                        expert_uses=rank.get("expert_uses", 0),
                        **{f"{part}_seconds": value for part, value in parts.items()})
