"""One client's side of the service: what it still has to be sent, and which of the engine's requests are its own."""
from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable

from allspark_client import convert
from allspark_client._proto import allspark_pb2 as pb
from allspark_client.errors import AllSparkError, AsStatus
from allspark_client.request import RequestSpec
from allspark_client.types import GeneratedElements, GenerateRequestStatus

if TYPE_CHECKING:
    from .engine import Engine

logger = logging.getLogger(__name__)

#: A client that reads slowly is sent larger messages less often. One that lets this many tokens and top-logprob pairs
#: pile up is disconnected: its requests together cannot produce that much between two reads of a program that is alive.
MAX_PENDING = 4_000_000


@dataclass
class _Pending:
    """What happened to one request since the last message."""

    answered: bool = False      # Started was sent, or is in `event`: until then results are held back
    event: pb.RequestEvent | None = None
    elements: list[GeneratedElements] = field(default_factory=list)
    status: GenerateRequestStatus | None = None
    error: AllSparkError | None = None
    stat: dict[str, float] | None = None
    changed: bool = False


class _RequestSink:
    """The engine's Sink of one request: files everything under the client's id for it. Runs on the engine's thread."""

    def __init__(self, session: "Session", request_id: int):
        self._session, self._id = session, request_id

    def on_elements(self, handle: int, elements: GeneratedElements, text: str | None) -> None:
        if text is not None:
            elements.text = text
        self._session.file(self._id, elements=elements)

    def on_status(self, handle: int, status: GenerateRequestStatus) -> None:
        self._session.file(self._id, status=status)

    def on_finish(self, handle: int, status: GenerateRequestStatus, error: AllSparkError | None,
                  stat: dict[str, float]) -> None:
        self._session.file(self._id, status=status, error=error, stat=stat)


class Session:
    """Requests of one client, from its first message until its stream ends.

    Filled by the engine's thread, which never waits here; emptied by the service's event loop. `ready` is set by the
    loop after a step that left something to send.
    """

    def __init__(self, engine: "Engine", news: Callable[["Session", bool], None], max_pending: int = MAX_PENDING):
        """`news(session, now)` is told of everything filed; with `now`, no engine step will follow to flush it."""
        self._engine = engine
        self._news = news
        self._max_pending = max_pending
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._handles: dict[int, int] = {}
        self._backlog = 0
        self._closed = False
        self.overflow = False
        self.task: asyncio.Task | None = None   # the call that sends; cancelled on overflow, since it may be stuck
        self.ready = asyncio.Event()

    def start(self, request_id: int, spec: RequestSpec) -> None:
        """Submit a request; its answer (started or refused) becomes part of the next message. Blocks; any thread."""
        self._register(request_id)
        try:
            started = pb.Started(fingerprint=self._engine.fingerprint(spec.model))
            as_ids = spec.input_ids is not None
            handle = self._engine.submit(spec, _RequestSink(self, request_id))
            if not as_ids:      # they are in the spec now
                started.prompt_ids.extend(spec.input_ids)
        except Exception as error:  # whatever it is, it is this client's to see
            if not isinstance(error, (AllSparkError, ValueError, TypeError)):
                logger.exception("submitting a request failed")
            self._answer(request_id, pb.RequestEvent(id=request_id, refused=convert.error_to_pb(error)))
            return
        with self._lock:
            gone = self._closed
            if not gone:
                self._handles[request_id] = handle
        if gone:    # the client vanished while the engine took the request
            self._release(handle)
            return
        self._answer(request_id, pb.RequestEvent(id=request_id, started=started))

    def refuse(self, request_id: int, error: Exception) -> None:
        """Answer a request that never reaches the engine."""
        self._register(request_id)
        self._answer(request_id, pb.RequestEvent(id=request_id, refused=convert.error_to_pb(error)))

    def _register(self, request_id: int) -> None:
        with self._lock:
            if request_id in self._pending or request_id in self._handles:
                raise ValueError(f"id {request_id} is in use by another request of this session")
            self._pending[request_id] = _Pending()

    def _answer(self, request_id: int, event: pb.RequestEvent) -> None:
        with self._lock:
            pending = self._pending.get(request_id)
            if pending is None:
                return
            pending.answered, pending.event, pending.changed = True, event, True
        self._news(self, True)

    def file(self, request_id: int, *, elements: GeneratedElements | None = None,
             status: GenerateRequestStatus | None = None, error: AllSparkError | None = None,
             stat: dict[str, float] | None = None) -> None:
        """Note news of a request."""
        with self._lock:
            pending = self._pending.get(request_id)
            if pending is None or self._closed:
                return
            if elements is not None:
                self._backlog += len(elements.ids_from_generate) + sum(map(len, elements.log_probs_list))
                self.overflow = self.overflow or self._backlog > self._max_pending
                last = pending.elements[-1] if pending.elements else None
                if last is not None and last.sample_index == elements.sample_index:
                    last.extend(elements)
                else:
                    pending.elements.append(elements)
            if status is not None:
                pending.status = status
            if stat is not None:
                pending.error, pending.stat = error, stat
            pending.changed = True
        self._news(self, False)

    def take(self) -> list[pb.RequestEvent]:
        """What is to be sent now, one event a request."""
        taken: list[tuple[int, _Pending]] = []
        with self._lock:
            for request_id, pending in list(self._pending.items()):
                if not (pending.changed and pending.answered):
                    continue
                taken.append((request_id, pending))
                refused = pending.event is not None and pending.event.HasField("refused")
                if refused or (pending.status is not None and pending.status.final):
                    del self._pending[request_id]
                else:
                    self._pending[request_id] = _Pending(answered=True)
            self._backlog = sum(len(e.ids_from_generate) for p in self._pending.values() for e in p.elements)
        return [_event(request_id, pending) for request_id, pending in taken]

    def stop(self, request_id: int) -> None:
        """Cancel a request; harmless if it has ended or was never started."""
        with self._lock:
            handle = self._handles.get(request_id)
        if handle is not None:
            try:
                self._engine.cancel(handle)
            except AllSparkError as error:   # it ended, or its model was released, meanwhile
                logger.debug("stopping request %d: %s", request_id, error)

    def release(self, request_id: int) -> None:
        """Free a request; nothing more is sent for it."""
        with self._lock:
            handle = self._handles.pop(request_id, None)
            self._pending.pop(request_id, None)
        if handle is not None:
            self._release(handle)

    def close(self) -> None:
        """Cancel and free all requests: the client has gone."""
        with self._lock:
            self._closed = True
            handles, self._handles = list(self._handles.values()), {}
            self._pending.clear()
        for handle in handles:
            self._release(handle)

    @property
    def idle(self) -> bool:
        """Nothing is live or waiting to be sent."""
        with self._lock:
            return not self._pending

    def _release(self, handle: int) -> None:
        try:
            self._engine.release(handle)
        except AllSparkError as error:   # released with its model, or the engine is closed
            logger.debug("releasing request: %s", error)


def _event(request_id: int, pending: _Pending) -> pb.RequestEvent:
    event = pending.event if pending.event is not None else pb.RequestEvent(id=request_id)
    event.elements.extend(convert.elements_to_pb(e) for e in pending.elements)
    if pending.status is not None:
        event.status = int(pending.status)
    if pending.error is not None:
        event.error.CopyFrom(convert.error_to_pb(pending.error))
    if pending.stat is not None:
        event.stat.CopyFrom(convert.stat_to_pb(pending.stat))
    return event


def overflow_error(pending: int) -> AllSparkError:
    """Why a client that does not read is disconnected."""
    return AllSparkError(AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR,
                         f"the client left more than {pending} generated tokens unread; its requests were cancelled")


def generate_response(event: pb.RequestEvent) -> pb.GenerateResponse:
    """An event of the Generate call's only request."""
    values: dict[str, Any] = {"elements": event.elements}
    if event.HasField("status"):
        values["status"] = event.status
    if event.HasField("error"):
        values["error"] = event.error
    if event.HasField("stat"):
        values["stat"] = event.stat
    return pb.GenerateResponse(**values)
