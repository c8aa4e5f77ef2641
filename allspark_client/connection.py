"""One connection to rank 0 of a server group: its calls, and the session stream that all requests share."""
from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from . import convert
from ._proto import allspark_pb2 as pb
from .connection_options import check_address
from .errors import AllSparkError, AsStatus, Draining
from .queue import ResultQueue
from .request import RequestSpec, adapter_name
from .types import GenerateRequestStatus, MemberState, ModelState, TlsConfig
from .version import __version__
from .waiting import Event, waking_together

logger = logging.getLogger(__name__)

_SERVICE = "/allspark.Allspark/"
#: how long a connection attempt may take before it counts as failed, s
ATTEMPT_SECONDS = 5.0
#: how old what members say of their models may be where they are looked at, s
STATE_AGE_SECONDS = 0.5
#: how long a server may take to say whether it takes a request, s
ANSWER_SECONDS = 60.0
#: pause after a failed attempt in the background, s
_RECONNECT_PAUSE_SECONDS = 0.5
#: more than a request's id and the framing of its message take
_ENVELOPE_BYTES = 64
#: losses of servers until a request is given up: of those that ran it alone, without a token; and of any, in a row
MOST_DEATHS, MOST_LOSSES = 2, 10
_OPTIONS = [
    ("grpc.keepalive_time_ms", 10_000),     # a server that stops answering is noticed within 20 s
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),   # in spite of its name: what one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # each engine has connections of its own: closing one leaves others alone
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_metadata_size", 64 << 10),
    ("grpc.absolute_max_metadata_size", 128 << 10),
]


class Unavailable(Exception):
    """A server cannot be reached, or the connection broke: worth another try, here or elsewhere."""

    def __init__(self, address: str, details: str):
        self.address, self.details = address, details
        super().__init__(f"the server at {address} cannot be reached: {details}")


def has_adapter(model: ModelState, spec: RequestSpec) -> bool:
    """Whether the adapter that a request names is loaded there, or it names none."""
    return not spec.config.lora_name or adapter_name(spec.config.lora_name) in model.adapters


@dataclass(eq=False)
class Request:
    """A request on the client's side. Its queue outlives sessions: after a resumption it is fed by another one."""

    handle: int
    spec: RequestSpec
    queue: ResultQueue = field(default_factory=ResultQueue)
    received: list[list[int]] = field(default_factory=list)     #: tokens so far, of each sample
    fingerprint: str = ""
    session: Session | None = None
    wire_id: int = 0
    stopped: bool = False                                   #: the caller wants it to end
    dropped: bool = False                                   #: and to hear no more of it
    resumed: bool = False
    losses: int = 0                                         #: servers lost in a row without a new token
    deaths: int = 0                                         #: of these, those that count: see RequestSpec
    generated_at_start: int = 0                             #: tokens, when it was sent last
    begun: bool = False                                     #: a step has held it since, all alone
    arrival: float = field(default_factory=time.time)
    first_token: float = 0.0
    answered: Event = field(default_factory=Event)
    refusal: Exception | None = None                        #: the server's answer, or Unavailable

    def __post_init__(self) -> None:
        self.received = self.received or [[] for _ in range(self.spec.config.n)]

    @property
    def generated(self) -> int:
        """Tokens so far, of all samples."""
        return sum(map(len, self.received))

    def obstacle(self, model: ModelState | None, address: str) -> tuple[str, bool]:
        """Why a member that has this model would not give the continuation to the bit, or ""; whether it never will."""
        if model is None or not model.running:
            return f"model {self.spec.model!r} does not run on {address}", False
        differs = f"{address} would not continue it identically (its {{}} differs)"
        if model.fingerprint != self.fingerprint:
            return differs.format("fingerprint"), True
        if not has_adapter(model, self.spec):
            return f"{address} has not loaded lora_name={self.spec.config.lora_name!r}", False
        if self.spec.adapter and model.adapters[adapter_name(self.spec.config.lora_name)] != self.spec.adapter:
            return differs.format("adapter of that name"), False
        return "", False

    def note_loss(self) -> str:
        """Its server was lost. Returns why it is not handed on any more, or "". A request that ends its servers must
        not end one after the other: one that got no token since its last start is retried alone, and given up when
        that has failed twice.
        """
        if self.generated > self.generated_at_start:
            self.losses = self.deaths = 0
        elif not self.deaths or self.begun:
            self.deaths += 1
        self.losses += 1
        if self.deaths > MOST_DEATHS:       # the first was beside others
            return f"{MOST_DEATHS} servers were lost while they ran this request alone: it seems to be what ends them"
        if self.losses > MOST_LOSSES:
            return f"servers were lost {self.losses} times in a row without a new token of this request"
        return ""

    def finish(self, status: GenerateRequestStatus, error: AllSparkError | None = None,
               reason: str | None = None) -> None:
        """End the request from this side. An interruption without an error is one that the caller asked for."""
        self.queue.finish(status, error, reason)


class Session:
    """A live session stream. A thread reads it and feeds the queues of its requests until it breaks."""

    def __init__(self, address: str, call: Any, outbox: queue.SimpleQueue[pb.SessionRequest | None],
                 on_lost: Callable[[Session, list[Request], Unavailable | AllSparkError], None]):
        self.address = address
        self._call = call
        self._outbox = outbox
        self._on_lost = on_lost
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._live: dict[int, Request] = {}
        self.info: pb.ServerInfo | None = None
        self.broken: Unavailable | AllSparkError | None = None
        self._greeted = threading.Event()
        self._thread = threading.Thread(target=self._read, name=f"allspark-client {address}", daemon=True)
        self._thread.start()

    def greet(self, timeout: float) -> None:
        """Say hello and wait for the answer; raises Unavailable, or AllSparkError if the server refuses this client."""
        self._outbox.put(pb.SessionRequest(
            hello=pb.Hello(protocol=convert.PROTOCOL, client=f"allspark_client {__version__} pid {os.getpid()}")))
        if not self._greeted.wait(timeout):
            self.close()
            raise Unavailable(self.address, f"no answer within {timeout:g} s")
        if self.broken is not None:
            raise self.broken

    def start(self, request: Request) -> None:
        """Send a request and wait for the answer; raises what the engine raised, or Unavailable."""
        self.send(request)
        self.wait_answer(request)

    def send(self, request: Request) -> None:
        """Send a request, of which `wait_answer` tells more; raises Unavailable."""
        message = convert.request_to_pb(request.spec)
        if len(request.received) == 1:
            message.generated.extend(request.received[0])
        elif request.generated:
            message.samples.extend(pb.TokenIds(ids=ids) for ids in request.received)
        message.resumed, message.deaths = message.resumed or request.resumed, request.deaths
        request.generated_at_start, request.begun = request.generated, False
        request.answered.clear()
        request.refusal = self._too_large(message)
        if request.refusal is not None:
            request.answered.set()
            return
        with self._lock:
            if self.broken is not None:
                raise _unavailable(self.broken, self.address)
            request.session, request.wire_id = self, next(self._ids)
            self._live[request.wire_id] = request
            self._outbox.put(pb.SessionRequest(start=pb.StartRequest(id=request.wire_id, request=message)))

    def wait_answer(self, request: Request) -> None:
        """Wait for the answer to `send`; raises what the engine raised, or Unavailable."""
        self._answer(request, request.answered.wait(ANSWER_SECONDS))

    async def wait_answer_async(self, request: Request) -> None:
        """As wait_answer, in an event loop."""
        self._answer(request, await request.answered.wait_async(ANSWER_SECONDS))

    def _answer(self, request: Request, came: bool) -> None:
        if not came:
            with self._lock:
                if not request.answered.is_set():
                    self._live.pop(request.wire_id, None)
                    self._outbox.put(pb.SessionRequest(release=request.wire_id))
                    raise Unavailable(self.address, f"no answer to a request within {ANSWER_SECONDS:g} s")
        if request.refusal is not None:
            raise request.refusal

    def _too_large(self, message: pb.GenerateRequest) -> AllSparkError | None:
        """The refusal of what the server would not take: it would end the stream that all requests share."""
        most = self.info.max_message_bytes if self.info is not None else 0
        size = message.ByteSize() + _ENVELOPE_BYTES
        if not 0 < most < size:
            return None
        return AllSparkError(AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR,
                             f"the request is a message of {size} bytes, and the server at {self.address} takes at "
                             f"most {most} (its --max-message-mib)")

    def stop(self, request: Request) -> None:
        """Ask for a request's end."""
        self._outbox.put(pb.SessionRequest(stop=request.wire_id))

    def release(self, request: Request) -> None:
        """Tell the server to forget a request. Who waits for an answer waits no longer."""
        with self._lock:
            if self._live.pop(request.wire_id, None) is None:   # the server has told of its end, and forgotten it
                return
            if not request.answered.is_set():
                request.refusal = AllSparkError(AsStatus.ALLSPARK_INVALID_CALL_ERROR, "the request was released")
                request.answered.set()
            self._outbox.put(pb.SessionRequest(release=request.wire_id))

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def close(self) -> None:
        """End the stream; the server cancels what is live."""
        self._outbox.put(None)
        self._call.cancel()

    def _read(self) -> None:
        error: Unavailable | AllSparkError = Unavailable(self.address, "the server closed the session")
        try:
            for message in self._call:
                if message.HasField("info"):
                    self.info = message.info
                    self._greeted.set()
                with waking_together(), self._lock:
                    for event in message.events:
                        self._apply(event)
        except grpc.RpcError as rpc_error:
            error = translate(rpc_error, self.address)
            if not isinstance(error, (Unavailable, AllSparkError)):     # a ValueError concerns the stream itself here
                error = AllSparkError(AsStatus.ALLSPARK_RUNTIME_ERROR,
                                      f"the session with {self.address} ended: {error}")
        except Exception as unexpected:     # whatever it is, the requests must not hang
            logger.exception("reading the session with %s failed", self.address)
            error = AllSparkError(AsStatus.ALLSPARK_UNKNOWN_ERROR, f"{type(unexpected).__name__}: {unexpected}")
        with self._lock:
            self.broken = error
            lost, self._live = list(self._live.values()), {}
        self._outbox.put(None)
        self._greeted.set()
        started = [r for r in lost if r.answered.is_set()]
        for request in lost:
            if not request.answered.is_set():
                request.refusal = _unavailable(error, self.address)
                request.answered.set()
        self._on_lost(self, started, error)

    def _apply(self, event: pb.RequestEvent) -> None:
        request = self._live.get(event.id)
        if request is None:     # released meanwhile
            return
        outcome = event.WhichOneof("outcome")
        if outcome == "refused":
            del self._live[event.id]
            error = convert.error_from_pb(event.refused)
            request.refusal = Unavailable(self.address, error.message) if isinstance(error, Draining) else error
            request.answered.set()
            return
        for message in event.elements:
            elements = convert.elements_from_pb(message)
            request.first_token = request.first_token or time.time()
            request.received[elements.sample_index].extend(elements.ids_from_generate)
            request.queue.put(elements)
        request.begun = request.begun or event.begun
        if event.HasField("status"):
            status = GenerateRequestStatus(event.status)
            if event.HasField("stat"):
                request.queue.update_stat(self._stat(request, event.stat))
            if status.final:
                del self._live[event.id]
                error = convert.as_allspark_error(event.error) if event.HasField("error") else None
                if status is GenerateRequestStatus.GenerateInterrupted and not request.stopped:
                    error = error or AllSparkError(
                        AsStatus.ALLSPARK_RUNTIME_ERROR,
                        f"the server at {self.address} interrupted the request: model {request.spec.model!r} was "
                        "stopped or released there, or the server is stopping")
                request.finish(status, error, event.finish_reason or None)
            else:
                request.queue.set_status(status)
        if outcome == "started":
            request.fingerprint, request.spec.adapter = event.started.fingerprint, event.started.adapter
            request.queue.opened = request.queue.opened or event.started.opened
            if event.started.prompt_ids:
                request.spec.set_prompt(list(event.started.prompt_ids))
            request.answered.set()

    @staticmethod
    def _stat(request: Request, message: pb.RequestStat) -> dict[str, float]:
        stat = convert.stat_from_pb(message)
        if request.resumed:     # the server knows its own part only
            stat["generated_token_length"] = request.queue.GeneratedLength()
            stat["arrival_time"] = request.arrival
            stat["finish_time"] = 1e3 * (time.time() - request.arrival)
            stat["first_token_time"] = request.first_token
            stat["time_to_first_token"] = 1e3 * (request.first_token - request.arrival)
        return stat


class Member:
    """A server group: a channel, and at most one live session."""

    def __init__(self, address: str, tls: TlsConfig | None, token: str | None,
                 on_lost: Callable[[Session, list[Request], Unavailable | AllSparkError], None]):
        self.address = check_address(address)
        self._on_lost = on_lost
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        options = list(_OPTIONS)
        if self.address.startswith("unix:"):
            options.append(("grpc.default_authority", "localhost"))
        if tls is None or self.address.startswith("unix:"):
            self._channel = grpc.insecure_channel(self.address, options)
        else:
            if tls.server_name:
                options.append(("grpc.ssl_target_name_override", tls.server_name))
            self._channel = grpc.secure_channel(self.address, _credentials(tls), options)
        self._lock = threading.Lock()           # held while connecting
        self._background = threading.Lock()     # of _connecting
        self._session: Session | None = None
        self._models: tuple[float, list[ModelState]] = (0.0, [])
        #: tokens of prompts that this client has sent since `models` was told
        self.sent_work = 0
        #: it takes no new requests, as far as `models` has told
        self.draining = False
        self._closed = False
        self._connecting = False

    @property
    def live_session(self) -> Session | None:
        """The session if there is a live one, without waiting."""
        session = self._session
        return session if session is not None and session.broken is None else None

    @property
    def connected(self) -> bool:
        """Whether there is a live session."""
        return self.live_session is not None

    def session(self, timeout: float = ATTEMPT_SECONDS) -> Session:
        """The live session, opened if there is none. Raises Unavailable, or AllSparkError if refused."""
        if not self._lock.acquire(timeout=timeout):     # another thread tries already, with a timeout of its own
            raise Unavailable(self.address, f"no answer within {timeout:g} s")
        try:
            if self._closed:
                raise Unavailable(self.address, "the client is closed")
            if self._session is None or self._session.broken is not None:
                outbox: queue.SimpleQueue[pb.SessionRequest | None] = queue.SimpleQueue()
                method = self._channel.stream_stream(
                    _SERVICE + "Session", pb.SessionRequest.SerializeToString, pb.SessionResponse.FromString)
                call = method(_drain(outbox), metadata=self._metadata)
                session = Session(self.address, call, outbox, self._on_lost)
                session.greet(timeout)
                self._session = session
            return self._session
        finally:
            self._lock.release()

    def reconnect_soon(self) -> None:
        """Try to open a session in the background, so that nobody waits for a server that may be dead."""
        with self._background:
            if self._connecting or self._closed or self.connected:
                return
            self._connecting = True
        threading.Thread(target=self._reconnect, name=f"allspark-connect {self.address}", daemon=True).start()

    def _reconnect(self) -> None:
        try:
            self.session()
            logger.info("connected to %s again", self.address)
        except (Unavailable, AllSparkError) as error:
            logger.debug("%s", error)
            time.sleep(_RECONNECT_PAUSE_SECONDS)
        finally:
            self._connecting = False

    def call(self, method: str, request: Any, response_type: Any, timeout: float | None = None) -> Any:
        """A unary call. Raises what the engine raised, or Unavailable."""
        rpc = self._channel.unary_unary(_SERVICE + method, type(request).SerializeToString, response_type.FromString)
        try:
            return rpc(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise translate(error, self.address) from None
        except ValueError as error:     # grpc: the channel was closed by another thread
            raise Unavailable(self.address, str(error)) from None

    def knows_models(self, max_age: float) -> bool:
        """Whether `models` would ask nobody."""
        return time.monotonic() - self._models[0] <= max_age

    def models(self, max_age: float = 0.0) -> list[ModelState]:
        """list_models of this member, at most `max_age` seconds old."""
        models = self._models[1]
        if not self.knows_models(max_age):
            info = self.call("GetServerInfo", pb.ServerInfoRequest(), pb.ServerInfo, ATTEMPT_SECONDS)
            models = convert.models_from_pb(info.models)
            self._models, self.draining, self.sent_work = (time.monotonic(), models), info.draining, 0
        return models

    def state(self) -> MemberState:
        """What is known of this member; one that cannot be reached is not waited for."""
        session = self._session
        if session is None or session.broken is not None or session.info is None:
            self.reconnect_soon()
            return MemberState(self.address)
        info = session.info
        try:
            models = self.models(STATE_AGE_SECONDS)
        except (Unavailable, AllSparkError):
            models = []
        return MemberState(self.address, True, info.version, info.rank_nums, list(info.placement), models)

    def close(self) -> None:
        """Close session and channel."""
        self._closed = True     # not under the lock: an attempt to connect may hold it
        session = self._session
        if session is not None:
            session.close()
        self._channel.close()


def unless(done: AsStatus, method: str, request: Any) -> Callable[[Member], None]:
    """A call once more, as its answer was lost: to be refused with `done` means that it was obeyed."""
    def again(member: Member) -> None:
        try:
            member.call(method, request, pb.Done)
        except AllSparkError as error:
            if error.status is not done:
                raise

    return again


def _drain(outbox: queue.SimpleQueue[pb.SessionRequest | None]) -> Iterator[pb.SessionRequest]:
    while (message := outbox.get()) is not None:
        yield message


def translate(error: grpc.RpcError, address: str) -> Exception:
    """The exception that a failed call stands for."""
    for key, value in error.trailing_metadata() or ():
        if key == convert.ERROR_KEY:
            return convert.error_from_pb(pb.Error.FromString(value))
    code, details = error.code(), error.details() or "no details"
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED):
        return Unavailable(address, details)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:      # the transport's: say, a message larger than the server takes
        return AllSparkError(AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR, f"the server at {address} refused: {details}")
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return AllSparkError(AsStatus.ALLSPARK_REQUEST_DENIED,
                             f"the server at {address} refused this client: {details}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return AllSparkError(AsStatus.ALLSPARK_INVALID_CALL_ERROR,
                             f"the server at {address} does not offer this call: {details}")
    return AllSparkError(AsStatus.ALLSPARK_RUNTIME_ERROR, f"the server at {address} failed: {code.name}: {details}")


def _unavailable(error: Exception, address: str) -> Unavailable:
    return error if isinstance(error, Unavailable) else Unavailable(address, str(error))


def _credentials(tls: TlsConfig) -> grpc.ChannelCredentials:
    def read(path: str | None) -> bytes | None:
        if path is None:
            return None
        try:
            with open(path, "rb") as file:
                return file.read()
        except OSError as error:
            raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR, f"the TLS file {path} cannot be read: {error}") from error

    if (tls.cert is None) != (tls.key is None):
        raise ValueError("tls: a client certificate needs both cert and key")
    return grpc.ssl_channel_credentials(read(tls.ca), read(tls.key), read(tls.cert))
