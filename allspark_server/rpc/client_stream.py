"""The results that wait to be sent to one client, and the requests that belong to it."""
from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from allspark_client import convert
from allspark_client._proto import allspark_pb2 as pb
from allspark_client.errors import AllSparkError, AsStatus
from allspark_client.request import RequestSpec
from allspark_client.types import GeneratedElements, GenerateRequestStatus

from ..engine.results import SampleEnd, prompt_elements
from .calls import known_error
from .client_limits import ClientLimits
from .token_columns import TokenColumns

if TYPE_CHECKING:
    import numpy as np

    from ..engine.engine import Engine

logger = logging.getLogger(__name__)

#: The tokens and top-logprob pairs that a client may leave unread before it is disconnected. A client that reads slowly
#: gets larger messages less often; one that still reads at all never reaches this limit.
MAX_PENDING = 4_000_000
#: The same for all clients together, about half a gigabyte; beyond it, the client with the most is disconnected.
MAX_PENDING_OF_ALL = 2 * MAX_PENDING
#: Results that may wait for the event loop before the output stage merges them itself.
_MAX_FILED = 1 << 14


def _values(tensors: list[dict[str, Any]]) -> int:
    return sum(array.size for tensor in tensors for array in tensor.values())


@dataclass
class _Pending:
    """The results of one request since the last message."""

    stopped: bool = False       # by the client, before it was started
    answered: bool = False      # Started was sent, or is in `event`; results wait for it
    event: pb.RequestEvent | None = None
    cached: dict[int, int] = field(default_factory=dict)    # by sample: what its tokens so far said of the prefix cache
    elements: list[GeneratedElements] = field(default_factory=list)
    texts: list[list[str]] = field(default_factory=list)    # of each of `elements`, in parts
    size: int = 0               # tokens and top-logprob pairs of `elements`
    begun: bool = False         # a step is about to compute it alone
    status: GenerateRequestStatus | None = None
    error: AllSparkError | None = None
    stat: dict[str, float] | None = None
    reason: str = ""

    def add_prompt(self, elements: GeneratedElements) -> int:
        """Add results about the prompt; returns their size."""
        self.elements.append(elements)
        self.texts.append([])
        size = sum(map(len, elements.prompt_logprobs_list)) + _values(elements.tensors_from_model_inference)
        self.size += size
        return size

    def add(self, sample: int, token: int, logprob: float | None, top: list[tuple[int, float]], text: str | None,
            cached: int, end: SampleEnd | None) -> int:
        """Add a token; returns its size."""
        if not self.elements or self.elements[-1].sample_index != sample:
            self.elements.append(
                GeneratedElements(prefix_cache_len=cached, prefix_len_cpu=cached, sample_index=sample))
            self.texts.append([])
            self.cached[sample] = cached
        elements = self.elements[-1]
        elements.ids_from_generate.append(token)
        size = 1
        if logprob is not None:
            elements.token_logprobs_list.append(logprob)
            elements.log_probs_list.append(top)
            size += len(top)
        if text:
            self.texts[-1].append(text)
        if end is not None:
            elements.finish_reason, elements.stop_string = end
        self.size += size
        return size


class _RequestSink:
    """The engine's Sink of one request. It files results under the client's id of the request."""

    def __init__(self, stream: ClientStream, request_id: int):
        self._stream, self._id = stream, request_id

    def on_token(self, handle: int, sample: int, token: int, logprob: float | None, top: list[tuple[int, float]],
                 text: str | None, cached: int, end: SampleEnd | None) -> None:
        self._stream.file((self._id, sample, token, logprob, top, text, cached, end))

    def on_prompt(self, handle: int, sample: int, logprobs: list[list[tuple[int, float]]],
                  embedding: np.ndarray | None) -> None:
        self._stream.file((self._id, _OF_PROMPT, prompt_elements(sample, logprobs, embedding), None, None, "", 0,
                           None))

    def on_status(self, handle: int, status: GenerateRequestStatus) -> None:
        self._stream.file((self._id, _NO_SAMPLE, status, None, None, "", 0, None))

    def on_begun(self, handle: int) -> None:
        self._stream.file((self._id, _BEGUN, None, None, None, "", 0, None))

    def on_finish(self, handle: int, status: GenerateRequestStatus, error: AllSparkError | None,
                  stat: dict[str, float], reason: str) -> None:
        self._stream.file((self._id, _NO_SAMPLE, status, error, stat, reason, 0, None))


#: The arguments of one call of a sink, as a tuple because it is cheap: (id, sample, token, logprob, top, text, cached,
#: end); for a status or an end (id, _NO_SAMPLE, status, error, stat, reason, 0, None); for results about a prompt
#: (id, _OF_PROMPT, elements, then Nones).
_Result = tuple[int, int, Any, Any, Any, Any, int, Any]
_NO_SAMPLE, _OF_PROMPT, _BEGUN = -1, -2, -3


class Backlog:
    """How much each client of a service has left unread. Any thread may call the methods."""

    def __init__(self, limit: int = MAX_PENDING_OF_ALL):
        self._limit = limit
        self._lock = threading.Lock()
        self._of: dict[ClientStream, int] = {}
        self._total = 0

    def set(self, stream: ClientStream, size: int) -> ClientStream | None:
        """Set how much a stream holds; returns the largest stream if all together hold too much."""
        with self._lock:
            self._total += size - self._of.pop(stream, 0)
            if size:
                self._of[stream] = size
            return max(self._of, key=self._of.__getitem__) if self._total > self._limit else None


class ClientStream:
    """The requests of one client, from its first message until its stream ends.

    The output stage's thread files results and never waits; the service's event loop takes them. The loop sets `ready`
    after a step with results.
    """

    def __init__(self, engine: Engine, notify: Callable[[ClientStream, bool], None], max_pending: int = MAX_PENDING,
                 backlog: Backlog | None = None, limits: ClientLimits | None = None):
        """`notify(stream, now)` is called when results were filed, once until they are taken or merged.

        With `now`, no engine step may follow that would flush them. `backlog`, `limits`: shared by all streams.
        """
        self._engine = engine
        self._notify = notify
        self._max_pending = max_pending
        self._max_filed = min(_MAX_FILED, max_pending)
        self._shared = backlog or Backlog()
        self._limits = limits or ClientLimits()
        self._filed: deque[_Result] = deque()     # by the output stage, without a lock; merged under the lock
        self._notified = False                  # `notify` was called for what is filed
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._changed: dict[int, None] = {}     # ids with results to send, in order
        self._handles: dict[int, int] = {}
        self._counted: dict[int, tuple[str, int]] = {}  # of handles: the tenant and the samples that limits count
        self._size = 0                          # of all `_pending`
        self._closed = False
        self.overflow = False
        #: the call that sends; cancelled on overflow, since it may be blocked
        self.task: asyncio.Task[None] | None = None
        self.ready = asyncio.Event()

    def register(self, request_id: int) -> None:
        """Announce a request; its client may stop or release it from now on. ValueError if the id is in use."""
        with self._lock:
            if request_id in self._pending or request_id in self._handles:
                raise ValueError(f"id {request_id} is in use by another request of this stream")
            self._pending[request_id] = _Pending()

    def start(self, request_id: int, spec: RequestSpec, ticket: Callable[[], bytes] | None = None) -> bool:
        """Submit a registered request; the answer, started or refused, becomes part of the next message.

        `ticket()`: the ticket of the accepted request. Returns whether the engine took it. Any thread may call this;
        it may block.
        """
        with self._lock:
            pending = self._pending.get(request_id)
        if pending is None:     # released already
            return False
        try:
            started = pb.Started(fingerprint=self._engine.fingerprint(spec.model))
            if spec.images:
                started.image_fingerprint = self._engine.image_fingerprint(spec.model)
            as_ids = spec.input_ids is not None
            handle = self._submit(request_id, spec)
            started.adapter = spec.adapter
            if ticket is not None:
                started.ticket = ticket()
            if not as_ids:      # the engine has set them in the spec
                started.prompt_ids.extend(spec.input_ids)
                started.opened = spec.opened
        except BaseException as error:  # reported to the client
            self.refuse(request_id, known_error(error))
            return False
        with self._lock:
            gone = self._closed or self._pending.get(request_id) is not pending
            if not gone:
                self._handles[request_id] = handle
        if gone:    # the client disconnected, or released it, while the engine accepted it
            self._release(handle)
            return True
        if pending.stopped:
            self.stop(request_id)
        self._answer(request_id, pb.RequestEvent(id=request_id, started=started))
        return True

    def _submit(self, request_id: int, spec: RequestSpec) -> int:
        counted = spec.tenant, spec.config.n
        self._limits.enter(*counted)
        try:
            handle = self._engine.submit(spec, _RequestSink(self, request_id))
        except BaseException:
            self._limits.leave(*counted)
            raise
        self._counted[handle] = counted
        return handle

    def refuse(self, request_id: int, error: Exception) -> None:
        """Reject a registered request."""
        self._answer(request_id, pb.RequestEvent(id=request_id, refused=convert.error_to_pb(error)))

    def _answer(self, request_id: int, event: pb.RequestEvent) -> None:
        with self._lock:
            pending = self._pending.get(request_id)
            if pending is None:
                return
            pending.answered, pending.event = True, event
            self._changed[request_id] = None
        self._notify(self, True)

    def file(self, result: _Result) -> None:
        """Add a result of a request. Only the output stage's thread calls this; it does not wait."""
        self._filed.append(result)
        if len(self._filed) > self._max_filed:  # the event loop is late: keep the results compact
            with self._lock:
                self._merge()
        if not self._notified:
            self._notified = True
            self._notify(self, False)

    def _merge(self, columns: TokenColumns | None = None) -> None:
        """Move all filed results to their requests, but tokens of requests without other news to `columns`, if it is
        given. The caller holds the lock.
        """
        self._notified = False     # first: results filed from now on may wait for the next time
        filed, requests, changed = self._filed, self._pending, self._changed
        while filed:
            result = filed.popleft()
            request_id = result[0]
            pending = requests.get(request_id)
            if pending is None:
                continue
            if (columns is not None and result[7] is None and pending.answered and request_id not in changed
                    and pending.cached.get(result[1]) == result[6]):    # the first is None for what is not a token
                columns.add(result)
                continue
            if result[1] == _NO_SAMPLE:
                pending.status = result[2]
                if result[4] is not None:
                    pending.error, pending.stat, pending.reason = result[3:6]
            elif result[1] == _BEGUN:
                pending.begun = True
            elif result[1] == _OF_PROMPT:
                self._size += pending.add_prompt(result[2])
            else:
                self._size += pending.add(*result[1:])
            if pending.answered:
                changed[request_id] = None
        size = self._size + (0 if columns is None else columns.size)
        self.overflow = self.overflow or size > self._max_pending
        self._note_size(size)

    def _note_size(self, size: int | None = None) -> None:
        largest = self._shared.set(self, self._size if size is None else size)
        if largest is not None:
            largest.overflow = True
            largest._notify(largest, False)

    def take(self, columns: TokenColumns | None = None) -> list[pb.RequestEvent]:
        """The events to be sent now, one for each request with results. Tokens without other news go to `columns`, if
        it is given; they come before the events.
        """
        taken: list[tuple[int, _Pending]] = []
        ended: list[int] = []
        with self._lock:
            self._merge(columns)
            changed, self._changed = self._changed, {}
            for request_id in changed:
                pending = self._pending.get(request_id)
                if pending is None:
                    continue
                taken.append((request_id, pending))
                self._size -= pending.size
                refused = pending.event is not None and pending.event.HasField("refused")
                if refused or (pending.status is not None and pending.status.final):
                    del self._pending[request_id]
                    if request_id in self._handles:
                        ended.append(self._handles.pop(request_id))
                else:
                    self._pending[request_id] = _Pending(answered=True, cached=pending.cached)
            self._note_size()
        for handle in ended:    # nothing more will be sent about them
            self._release(handle)
        return [_event(request_id, pending) for request_id, pending in taken]

    def stop(self, request_id: int) -> None:
        """Cancel a request. Has no effect if it has ended or was never started."""
        with self._lock:
            handle = self._handles.get(request_id)
            if handle is None and request_id in self._pending:
                self._pending[request_id].stopped = True
        if handle is not None:
            try:
                self._engine.cancel(handle)
            except AllSparkError as error:   # it has ended, or its model was released
                logger.debug("stopping request %d: %s", request_id, error)

    def release(self, request_id: int) -> None:
        """Free a request; nothing more is sent about it."""
        with self._lock:
            handle = self._handles.pop(request_id, None)
            pending = self._pending.pop(request_id, None)
            if pending is not None:
                self._size -= pending.size
                self._note_size()
        if handle is not None:
            self._release(handle)

    def close(self) -> None:
        """Cancel and free all requests, since the client has disconnected."""
        with self._lock:
            self._closed = True
            handles, self._handles = list(self._handles.values()), {}
            self._pending.clear()
            self._size = 0
            self._note_size()
        for handle in handles:
            self._release(handle)

    @property
    def requests(self) -> int:
        """The number of requests whose end has not been sent yet. Any thread may read it."""
        return len(self._pending)

    @property
    def idle(self) -> bool:
        """Whether no request is live, and nothing waits to be sent."""
        with self._lock:
            return not self._pending

    def _release(self, handle: int) -> None:
        self._limits.leave(*self._counted.pop(handle))
        try:
            self._engine.release(handle)
        except AllSparkError as error:   # released with its model, or the engine is closed
            logger.debug("releasing request: %s", error)


def _event(request_id: int, pending: _Pending) -> pb.RequestEvent:
    event = pending.event if pending.event is not None else pb.RequestEvent(id=request_id)
    for elements, parts in zip(pending.elements, pending.texts):
        elements.text = "".join(parts)
    if pending.begun:
        event.begun = True
    event.elements.extend(convert.elements_to_pb(e) for e in pending.elements)
    if pending.status is not None:
        event.status = cast("pb.RequestStatus", int(pending.status))
    if pending.error is not None:
        event.error.CopyFrom(convert.error_to_pb(pending.error))
    if pending.stat is not None:
        event.stat.CopyFrom(convert.stat_to_pb(pending.stat))
        event.finish_reason = pending.reason
    return event


def overflow_error(pending: int) -> AllSparkError:
    """The error of a client that does not read and is disconnected."""
    return AllSparkError(AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR,
                         f"the client left more than {pending} generated tokens unread; its requests were cancelled")


def generate_response(event: pb.RequestEvent) -> pb.GenerateResponse:
    """An event as a message of the Generate call."""
    values: dict[str, Any] = {"elements": event.elements}
    if event.HasField("status"):
        values["status"] = event.status
    if event.HasField("error"):
        values["error"] = event.error
    if event.HasField("stat"):
        values["stat"] = event.stat
        values["finish_reason"] = event.finish_reason
    return pb.GenerateResponse(**values)
