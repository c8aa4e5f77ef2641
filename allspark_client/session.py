"""The session stream of a connection, which all its requests share."""
from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc

from . import convert
from ._proto import allspark_pb2 as pb
from .errors import AllSparkError, AsStatus, Draining
from .live_request import LiveRequest
from .types import GenerateRequestStatus
from .version import __version__
from .waiting import waking_together

logger = logging.getLogger(__name__)

#: how long a server may take to accept or refuse a request, s
ANSWER_SECONDS = 60.0
_PROGRAM = f"allspark_client {__version__}"
#: upper bound of a request's id and the framing of its message, bytes
_ENVELOPE_BYTES = 64


class Unavailable(Exception):
    """A server cannot be reached, or its connection broke. The call may succeed later, or on another server."""

    def __init__(self, address: str, details: str):
        self.address, self.details = address, details
        super().__init__(f"the server at {address} cannot be reached: {details}")


OnLost = Callable[["Session", list[LiveRequest], "Unavailable | AllSparkError"], None]


class Session:
    """A live Session call (allspark.proto): one stream in each direction for all requests of a connection.

    A thread of its own reads the server's messages and feeds the requests' queues until the stream breaks; it then
    calls `on_lost` with the requests that had not ended. Any thread may call the methods.
    """

    def __init__(self, address: str, call: Any,
                 outbox: queue.SimpleQueue[pb.SessionRequest | None], on_lost: OnLost):
        """`call`: the started gRPC stream, which sends what is put in `outbox` until None."""
        self.address = address
        self._call = call
        self._outbox = outbox
        self._on_lost = on_lost
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._live: dict[int, LiveRequest] = {}
        self.info: pb.ServerInfo | None = None
        self.broken: Unavailable | AllSparkError | None = None
        self._greeted = threading.Event()
        self._thread = threading.Thread(target=self._read, name=f"allspark-client {address}", daemon=True)
        self._thread.start()

    def greet(self, timeout: float) -> None:
        """Introduce this client and wait for the server's answer, at most `timeout` seconds.

        Raises Unavailable, or AllSparkError if the server refuses this client.
        """
        self._outbox.put(pb.SessionRequest(hello=convert.hello(f"{_PROGRAM} pid {os.getpid()}")))
        if not self._greeted.wait(timeout):
            self.close()
            raise Unavailable(self.address, f"no answer within {timeout:g} s")
        if self.broken is not None:
            raise self.broken
        assert self.info is not None    # greeted, and not broken
        try:
            convert.common_protocol(self.info.oldest_protocol or self.info.protocol, self.info.protocol,
                                    f"the server at {self.address} (version {self.info.version})",
                                    f"this client ({_PROGRAM})")
        except AllSparkError:
            self.close()
            raise

    def start(self, request: LiveRequest) -> None:
        """Send a request and wait until the server accepts it; raises what the engine raised, or Unavailable."""
        self.send(request)
        self.wait_answer(request)

    def send(self, request: LiveRequest) -> None:
        """Send a request without waiting for the answer (see wait_answer); raises Unavailable."""
        message = convert.request_to_pb(request.spec)
        if len(request.received) == 1:
            message.generated.extend(request.received[0])
        elif request.generated:
            message.samples.extend(pb.TokenIds(ids=ids) for ids in request.received)
        message.resumed, message.deaths = message.resumed or request.resumed, request.deaths
        message.ticket = request.ticket
        request.generated_at_start, request.begun = request.generated, False
        request.answered.clear()
        request.refusal = self._knows_no_images(message) or self._too_large(message)
        if request.refusal is not None:
            request.answered.set()
            return
        with self._lock:
            if self.broken is not None:
                raise _unavailable(self.broken, self.address)
            request.session, request.wire_id = self, next(self._ids)
            self._live[request.wire_id] = request
            self._outbox.put(pb.SessionRequest(start=pb.StartRequest(id=request.wire_id, request=message)))

    def wait_answer(self, request: LiveRequest) -> None:
        """Wait for the server's answer to `send`; raises what the engine raised, or Unavailable."""
        self._check_answer(request, request.answered.wait(ANSWER_SECONDS))

    async def wait_answer_async(self, request: LiveRequest) -> None:
        """As wait_answer, in an event loop."""
        self._check_answer(request, await request.answered.wait_async(ANSWER_SECONDS))

    def _check_answer(self, request: LiveRequest, in_time: bool) -> None:
        if not in_time:
            with self._lock:
                if not request.answered.is_set():
                    self._live.pop(request.wire_id, None)
                    self._outbox.put(pb.SessionRequest(release=request.wire_id))
                    raise Unavailable(self.address, f"no answer to a request within {ANSWER_SECONDS:g} s")
        if request.refusal is not None:
            raise request.refusal

    def _knows_no_images(self, message: pb.GenerateRequest) -> AllSparkError | None:
        """The error of a message with images for an older server, which would answer as if there were none."""
        if not message.images or self.info is None or self.info.protocol >= convert.IMAGES_PROTOCOL:
            return None
        return AllSparkError(AsStatus.ALLSPARK_INVALID_CALL_ERROR,
                             f"images: the server at {self.address} (version {self.info.version}) takes none; upgrade "
                             "it")

    def _too_large(self, message: pb.GenerateRequest) -> AllSparkError | None:
        """The error of a message that is larger than the server accepts: sending it would end the whole stream."""
        most = self.info.max_message_bytes if self.info is not None else 0
        size = message.ByteSize() + _ENVELOPE_BYTES
        if not 0 < most < size:
            return None
        return AllSparkError(AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR,
                             f"the request is a message of {size} bytes, and the server at {self.address} takes at "
                             f"most {most} (its --max-message-mib)")

    def stop(self, request: LiveRequest) -> None:
        """Ask the server to end a request; its end arrives as an event."""
        self._outbox.put(pb.SessionRequest(stop=request.wire_id))

    def release(self, request: LiveRequest) -> None:
        """Tell the server to forget a request. A thread that waits for the answer to it gets an AllSparkError."""
        with self._lock:
            if self._live.pop(request.wire_id, None) is None:   # it has ended, and the server has forgotten it
                return
            if not request.answered.is_set():
                request.refusal = AllSparkError(AsStatus.ALLSPARK_INVALID_CALL_ERROR, "the request was released")
                request.answered.set()
            self._outbox.put(pb.SessionRequest(release=request.wire_id))

    @property
    def live(self) -> int:
        """The number of requests that have not ended."""
        return len(self._live)

    def close(self) -> None:
        """End the stream; the server cancels its live requests."""
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
                    if message.HasField("tokens"):
                        self._apply_tokens(message.tokens)
                    for event in message.events:
                        self._apply(event)
        except grpc.RpcError as rpc_error:
            cause = translate(rpc_error, self.address)
            # Another error, such as a ValueError, is about the stream itself here.
            error = cause if isinstance(cause, (Unavailable, AllSparkError)) else AllSparkError(
                AsStatus.ALLSPARK_RUNTIME_ERROR, f"the session with {self.address} ended: {cause}")
        except Exception as unexpected:     # whatever it is, no request may hang
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

    def _apply_tokens(self, message: pb.Tokens) -> None:
        """Give new tokens to their requests: of requests that have got tokens before."""
        for request_id, token, text, sample, logprob, top in convert.tokens_from_pb(message):
            request = self._live.get(request_id)
            if request is not None:     # not released meanwhile
                request.received[sample].append(token)
                request.queue.put_token(sample, token, text, logprob, top, request.cached.get(sample, (0, 0, 0)))

    def _apply(self, event: pb.RequestEvent) -> None:
        request = self._live.get(event.id)
        if request is None:     # released meanwhile
            return
        outcome = event.WhichOneof("outcome")
        if outcome == "refused":
            del self._live[event.id]
            refusal = convert.error_from_pb(event.refused)
            request.refusal = Unavailable(self.address, refusal.message) if isinstance(refusal, Draining) else refusal
            request.answered.set()
            return
        for message in event.elements:
            elements = convert.elements_from_pb(message)
            request.first_token = request.first_token or time.monotonic()
            request.received[elements.sample_index].extend(elements.ids_from_generate)
            request.cached[elements.sample_index] = (elements.prefix_cache_len, elements.prefix_len_gpu,
                                                     elements.prefix_len_cpu)
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
            request.image_fingerprint, request.ticket = event.started.image_fingerprint, event.started.ticket
            request.queue.opened = request.queue.opened or event.started.opened
            if event.started.prompt_ids:
                request.spec.set_prompt(list(event.started.prompt_ids))
            request.answered.set()

    @staticmethod
    def _stat(request: LiveRequest, message: pb.RequestStat) -> dict[str, float]:
        stat = convert.stat_from_pb(message)
        if request.resumed:     # the server knows only what it generated itself
            stat["generated_token_length"] = request.queue.GeneratedLength()
            stat["arrival_time"] = request.wall_arrival
            stat["finish_time"] = 1e3 * (time.monotonic() - request.arrival)
            if request.first_token:
                stat["time_to_first_token"] = 1e3 * (request.first_token - request.arrival)
                stat["first_token_time"] = request.wall_arrival + request.first_token - request.arrival
        return stat


def translate(error: grpc.RpcError, address: str) -> Exception:
    """The exception that a failed call stands for: what the engine raised, Unavailable, or AllSparkError."""
    for entry in error.trailing_metadata() or ():
        if entry.key == convert.ERROR_KEY:
            return convert.error_from_pb(pb.Error.FromString(entry.value))
    code, details = error.code(), error.details() or "no details"
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED):
        return Unavailable(address, details)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:      # by gRPC: a message that is too large, say
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
