"""A client's connection to one server group: a channel to rank 0, and the session stream on it."""
from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from . import convert
from ._proto import allspark_pb2 as pb
from .affinity import DIGEST_BYTES
from .connection_options import check_address
from .errors import AllSparkError, AsStatus
from .session import OnLost, Session, Unavailable, translate
from .types import MemberState, ModelState, TlsConfig

logger = logging.getLogger(__name__)

_SERVICE = "/allspark.Allspark/"
#: how long a connection attempt may take before it counts as failed, s
ATTEMPT_SECONDS = 5.0
#: how old the state of models may be where `MemberState` shows it, s
STATE_AGE_SECONDS = 0.5
#: pause after a failed attempt in the background, s
_RECONNECT_PAUSE_SECONDS = 0.5
_OPTIONS: list[tuple[str, str | int]] = [
    ("grpc.keepalive_time_ms", 10_000),     # a server that stops answering is noticed within 20 s
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),   # despite its name: the time limit of one attempt to connect
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # engines do not share connections: closing one leaves others alone
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_metadata_size", 64 << 10),
    ("grpc.absolute_max_metadata_size", 128 << 10),
]


M = TypeVar("M", bound=Message)


class Member:
    """A server group, as a client sees it: a channel, and at most one live session. Any thread may call the methods."""

    def __init__(self, address: str, tls: TlsConfig | None, token: str | None, on_lost: OnLost):
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
        self._background = threading.Lock()     # guards _connecting
        self._session: Session | None = None
        self._models: tuple[float, list[ModelState]] = (0.0, [])
        self._prefixes = "", 0      # epoch and number of the last answer
        self._tells_prefixes = True
        #: prompt tokens that this client has sent since `models` last asked the server
        self.sent_work = 0
        #: a number that grows with each request of this client that a server gets: that of this one's last request
        self.last_request = 0
        #: whether the server is draining, as of the last answer to `models`
        self.draining = False
        self._closed = False
        self._connecting = False

    @property
    def live_session(self) -> Session | None:
        """The session if there is a live one, otherwise None. Does not wait."""
        session = self._session
        return session if session is not None and session.broken is None else None

    @property
    def connected(self) -> bool:
        """Whether there is a live session."""
        return self.live_session is not None

    def session(self, timeout: float = ATTEMPT_SECONDS) -> Session:
        """The live session; opened within `timeout` seconds if there is none.

        Raises Unavailable, or AllSparkError if the server refuses this client.
        """
        if not self._lock.acquire(timeout=timeout):     # another thread is connecting, with a timeout of its own
            raise Unavailable(self.address, f"no answer within {timeout:g} s")
        try:
            if self._closed:
                raise Unavailable(self.address, "the client is closed")
            if self._session is None or self._session.broken is not None:
                outbox: queue.SimpleQueue[pb.SessionRequest | None] = queue.SimpleQueue()
                method = self._channel.stream_stream(
                    _SERVICE + "Session", pb.SessionRequest.SerializeToString, pb.SessionResponse.FromString)
                call = method(_messages(outbox), metadata=self._metadata)
                session = Session(self.address, call, outbox, self._on_lost)
                session.greet(timeout)
                self._session = session
            return self._session
        finally:
            self._lock.release()

    def reconnect_soon(self) -> None:
        """Try to open a session on another thread, so that callers do not wait for a server that may be dead."""
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

    def call(self, method: str, request: Message, response_type: type[M], timeout: float | None = None) -> M:
        """A unary call, which may take `timeout` seconds. Raises what the engine raised, or Unavailable."""
        rpc = self._channel.unary_unary(_SERVICE + method, type(request).SerializeToString, response_type.FromString)
        try:
            answer: M = rpc(request, timeout=timeout, metadata=self._metadata)
            return answer
        except grpc.RpcError as error:
            raise translate(error, self.address) from None
        except ValueError as error:     # grpc: the channel was closed by another thread
            raise Unavailable(self.address, str(error)) from None

    def load_model(self, name: str, on_progress: Callable[[float], None] | None = None) -> None:
        """Have the server load a model on demand, and wait. Raises what the engine raised, or Unavailable."""
        for progress in self.stream("LoadModel", pb.ModelRequest(model=name), pb.LoadProgress):
            if on_progress is not None:
                on_progress(progress.part)
        self._models = 0.0, []

    def stream(self, method: str, request: Message, response_type: type[M],
               timeout: float | None = None) -> Iterator[M]:
        """The messages that answer a call, which may take `timeout` seconds. Raises what the engine raised, or
        Unavailable.
        """
        rpc = self._channel.unary_stream(_SERVICE + method, type(request).SerializeToString, response_type.FromString)
        try:
            yield from rpc(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise translate(error, self.address) from None
        except ValueError as error:     # as in `call`
            raise Unavailable(self.address, str(error)) from None

    def knows_models(self, max_age: float) -> bool:
        """Whether `models(max_age)` would answer from memory."""
        return time.monotonic() - self._models[0] <= max_age

    @property
    def known_models(self) -> list[ModelState]:
        """The last answer of `models`. Does not wait."""
        return self._models[1]

    def models(self, max_age: float = 0.0) -> list[ModelState]:
        """This server's models, as of at most `max_age` seconds ago. Raises Unavailable or AllSparkError."""
        models = self._models[1]
        if not self.knows_models(max_age):
            info = self.call("GetServerInfo", pb.ServerInfoRequest(), pb.ServerInfo, ATTEMPT_SECONDS)
            models = convert.models_from_pb(info.models)
            self._models, self.draining, self.sent_work = (time.monotonic(), models), info.draining, 0
        return models

    def new_prefixes(self) -> tuple[bool, list[bytes]]:
        """Whether the server has started anew since the last call, and digests of the prompts that it has computed
        since. Nothing if it does not tell this client.
        """
        if not self._tells_prefixes:
            return False, []
        try:
            epoch, number = self._prefixes
            answer = self.call("GetPrefixes", pb.PrefixesRequest(epoch=epoch, number=number), pb.Prefixes,
                               ATTEMPT_SECONDS)
        except AllSparkError as error:
            # This client's role does not allow it, or the server is older.
            self._tells_prefixes = error.status not in (AsStatus.ALLSPARK_REQUEST_DENIED,
                                                        AsStatus.ALLSPARK_INVALID_CALL_ERROR)
            return False, []
        self._prefixes = answer.epoch, answer.number
        data = answer.digests
        return epoch not in ("", answer.epoch), [data[i:i + DIGEST_BYTES] for i in range(0, len(data), DIGEST_BYTES)]

    def state(self) -> MemberState:
        """This server's state; without waiting, if it cannot be reached."""
        session = self._session
        if session is None or session.broken is not None or session.info is None:
            self.reconnect_soon()
            return MemberState(self.address)
        info = session.info
        try:
            models = self.models(STATE_AGE_SECONDS)
        except (Unavailable, AllSparkError):
            models = []
        return MemberState(self.address, True, info.version, info.rank_nums, list(info.placement), models,
                           self.draining)

    def close(self) -> None:
        """Close the session and the channel."""
        self._closed = True     # without the lock, which an attempt to connect may hold
        session = self._session
        if session is not None:
            session.close()
        self._channel.close()


def retry_unless(done: AsStatus, method: str, request: Message) -> Callable[[Member], None]:
    """Returns a function that repeats a call whose answer was lost. If the repeated call is refused with status `done`,
    the first one had succeeded.
    """
    def again(member: Member) -> None:
        try:
            member.call(method, request, pb.Done)
        except AllSparkError as error:
            if error.status is not done:
                raise

    return again


def _messages(outbox: queue.SimpleQueue[pb.SessionRequest | None]) -> Iterator[pb.SessionRequest]:
    while (message := outbox.get()) is not None:
        yield message


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
