"""What endpoints share: a call with its client, its requests to the pool and its answer."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import re
import secrets
import time
import traceback
import urllib.parse
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from allspark_client.request import LARGE, RequestSpec
from allspark_client.types import ModelInfo
from allspark_server.access import Client, Role
from allspark_server.logs import log_http_request

from .bodies import BodyReader, ClientDisconnected, Receive, Share
from .choices import Choices
from .errors import INTERNAL, ApiError
from .image_urls import ImageFetcher
from .metrics import Metrics
from .pool import TURN_SECONDS, Answer, Pool
from .rate_limits import RateLimits
from .wire import Body, UnknownFields, parse

if TYPE_CHECKING:
    from allspark_server.access import Access
    from allspark_server.certificates import Certificates

    from .jobs import Jobs

logger = logging.getLogger(__name__)

Send = Callable[[dict[str, Any]], Awaitable[None]]
#: how long a client may stop reading, s, and how many tokens may wait for it meanwhile
UNREAD_SECONDS, UNREAD_TOKENS = 60.0, 1 << 16
_LOOK_SECONDS = 1.0
#: pause between two looks for a group, s
_GROUP_SECONDS = 0.2
#: characters of a piece of an answer
PIECE = 1 << 16
#: the memory that a fetched image takes, in multiples of its size: as it arrives, whole, in the message for the pool,
#: and as that is sent
_IMAGE_COST = 4
_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_SEND_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
                 (b"x-accel-buffering", b"no")]


@dataclass
class HttpWorker:
    """The state of a worker process that all its calls share."""

    pool: Pool
    access: Access
    bodies: BodyReader
    metrics: Metrics
    #: whether the worker's token lets it name the tenants of its requests
    names_tenants: bool = True
    #: whether /health says that this server takes no new requests
    draining: bool = False
    certificates: Certificates | None = None
    #: a pipe that gets a byte a second while the event loop runs; -1: none
    alive_fd: int = -1
    #: how long requests wait while no group takes any, s; 0: they are refused
    wait_limit: float = 0.0
    #: after how many seconds of silence a stream gets a comment, so that proxies keep it open; 0: never
    heartbeat: float = 0.0
    #: origins of web pages that may read answers (CORS); "*": all
    origins: frozenset[str] = frozenset()
    #: whether a body with an unknown field is refused
    strict_fields: bool = False
    #: endpoints that need no token although they have a role
    open_endpoints: frozenset[str] = frozenset()
    #: the store and the work on what is in it; None: this server keeps nothing
    jobs: Jobs | None = None
    max_file_bytes: int = 200 << 20
    #: fetches images that requests name by URL
    images: ImageFetcher = field(default_factory=ImageFetcher)

    def __post_init__(self) -> None:
        self.limits = RateLimits(os.environ.get("PROMETHEUS_MULTIPROC_DIR"))
        self.calls: set[Call] = set()
        self._comments: set[asyncio.Future[None]] = set()
        self.started = int(time.time())

    async def watch(self) -> None:
        """Each second: disconnect clients that do not read, look at the certificate, and tell that the event loop runs.
        Runs until it is cancelled.
        """
        while True:
            if self.certificates is not None:
                self.certificates.look()
                self.metrics.certificate(self.certificates.expires)
            self._tell_alive()
            await asyncio.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            for call in list(self.calls):
                if self.heartbeat and call.silent(now) >= self.heartbeat:
                    self._comments.add(task := asyncio.ensure_future(call.comment()))
                    task.add_done_callback(self._comments.discard)
                if call.stuck(now):
                    logger.warning("%s does not read its answer; its request is cancelled", call.peer)
                    call.abort()

    def _tell_alive(self) -> None:
        if self.alive_fd >= 0:
            with contextlib.suppress(OSError):      # the pipe is full, or nobody reads it any more
                os.write(self.alive_fd, b".")


class Call:
    """An HTTP request and its answer. `client`: its role and tenant."""

    def __init__(self, worker: HttpWorker, scope: dict[str, Any], send: Send, client: Client):
        self.worker, self.pool, self.client = worker, worker.pool, client
        self._scope, self._send = scope, send
        self._sending_since = 0.0
        self._streaming, self._written = False, 0.0
        self._chunk: Callable[[bytes], bool] | None = None  # sends at once, if it returns True
        self._answers: list[Answer] = []
        self._limited, self._counted = False, 0     # for the limits of its key: whether it counts, and tokens so far
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        #: the client's x-request-id, or a new one: in the answer, the group's logs and traces
        self.request_id = given if _REQUEST_ID.fullmatch(given) else new_id("req_")
        #: the fields that its images and videos have come from, in the order of the prompt
        self.image_places: list[str] = []
        #: what the requests to the pool have generated
        self.generated: list[Choices] = []
        self.task: asyncio.Future[None] | None = None
        self.body_size = 0
        self.share: Share | None = None     # of the memory for bodies; None: of a call that has none
        self.wants_stream = False   # of events
        self.unknown = UnknownFields(worker.strict_fields)
        self.status = 0
        self.created = int(time.time())
        self.began = time.monotonic()

    @property
    def peer(self) -> str:
        """The client's address, for logs."""
        return ":".join(map(str, self._scope.get("client") or ("unix",)))

    @property
    def tenant(self) -> str:
        """The client's tenant; for clients that differ only by their connections, their host."""
        return self.client.tenant or f"http:{(self._scope.get('client') or ('unix',))[0]}"

    @property
    def path_rest(self) -> str:
        """The part of the path that stands for a {name} at its end."""
        return str(self._scope["path_rest"])

    def query(self, name: str) -> str:
        """The value of a name in the query of the URL; "" if there is none."""
        values = urllib.parse.parse_qs(self._scope.get("query_string", b"").decode("latin-1")).get(name, [""])
        return values[-1]

    @property
    def jobs(self) -> Jobs:
        """The store of this server. Raises ApiError if it has none."""
        if self.worker.jobs is None:
            raise ApiError(400, "This server keeps nothing: its operator starts it with --store for that",
                           code="unsupported_parameter")
        return self.worker.jobs

    # --- requests to the pool --------------------------------------------------------------------------------

    async def model(self, name: str) -> ModelInfo:
        """A model's description, once the model is loaded. Raises ApiError (404) if there is no such model."""
        return await self.pool.attempt(functools.partial(self._model, name), self._waiter)

    async def _model(self, name: str) -> ModelInfo:
        base, adapter = await self.pool.resolve(name)
        if not self.client.may_use(name, base):
            raise ApiError(404, f"The model '{name}' does not exist, or this API key does not allow it", "model",
                           "model_not_found")
        if await self.pool.is_unloaded(base):
            await self.pool.load(base, self._tell_loading)
        return await self.pool.info(base if not adapter else name)

    @property
    def _waiter(self) -> Callable[[], Awaitable[None]] | None:
        """What waits while no group takes requests; None: they are refused."""
        return self._wait_for_a_group if self.worker.wait_limit else None

    async def _wait_for_a_group(self) -> None:
        """Wait while no group takes requests; the metrics count who does, so that somebody can start one. Raises
        ApiError (503) after the limit.
        """
        until = time.monotonic() + self.worker.wait_limit
        with self.worker.metrics.waiting():
            while why := self.pool.health():
                if time.monotonic() > until:
                    raise ApiError(503, f"No group has come within {self.worker.wait_limit:g} s: {why}",
                                   code="unavailable", retry_after=1)
                if self.wants_stream:       # comments keep the connection from here on
                    await self.stream()
                await asyncio.sleep(_GROUP_SECONDS)

    async def _tell_loading(self, part: float) -> None:
        """Tell a client that wants a stream that its model is being loaded."""
        if self.wants_stream:
            await self.stream()
            await self.write(f": the model is being loaded, {100 * part:.0f} %\n\n".encode())

    def generate(self, spec: RequestSpec) -> Answer:
        """A request to the pool, to be entered with `async with`."""
        if self.worker.names_tenants:
            spec.tenant = self.tenant
        spec.config.user_request_id = self.request_id
        spec.trust_trace(dict(self._scope["headers"]).get(b"traceparent", b"").decode("latin-1"))
        spec.large = spec.large or self.body_size > LARGE
        answer = self.pool.generate(spec, self._waiter, self.image_places)
        self._answers.append(answer)
        return answer

    def hold_image(self, size: int) -> None:
        """Count a fetched image of `size` bytes as a part of the body. Raises ApiError (503) if that is too much."""
        if self.share is not None:
            self.share.take(_IMAGE_COST * size)

    def count_request(self) -> None:
        """Count the call for the limits of its key. Raises ApiError (429) if they do not allow it now."""
        if self.client.limit is not None:
            self._limited = True
            self.worker.limits.take(self.client.tenant, self.client.limit)

    def _count_tokens(self) -> None:
        """Count the tokens that are new since the last call for the limits of the key."""
        if self.client.limit is not None and self._limited:
            tokens = sum(len(answer.prompt_ids) + answer.generated for answer in self._answers if answer.started)
            if tokens > self._counted:
                self.worker.limits.charge(self.client.tenant, self.client.limit, tokens - self._counted)
                self._counted = tokens

    def end(self, endpoint: str) -> None:
        """Count the call and its requests to the pool in the metrics, however it has ended."""
        self._count_tokens()
        metrics = self.worker.metrics
        seconds = time.monotonic() - self.began
        metrics.request(endpoint, self.status, seconds)
        log_http_request(self.peer, self._scope.get("method", ""), self._scope.get("path", ""), self.status, seconds,
                         self.request_id, self.tenant)
        for choices in self.generated:
            metrics.generated(choices.info.name, len(choices.answer.prompt_ids), choices.cached_tokens, choices.tokens,
                              choices.answer.stat.time_to_first_token / 1e3)

    # --- the answer --------------------------------------------------------------------------------------

    async def reply(self, body: Any, status: int = 200, kind: bytes = b"application/json",
                    headers: list[tuple[bytes, bytes]] | None = None) -> None:
        """Send the whole answer: bytes as they are, anything else as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode(errors="replace")
        await self._start(status, [(b"content-type", kind), (b"content-length", str(len(data)).encode()),
                                   *(headers or ())])
        await self.write(data, False)

    async def reply_in_pieces(self, pieces: Iterable[str]) -> None:
        """Send JSON that may be long, made of `pieces` that are made meanwhile. They must not fail.

        Other calls have their turns in between, and the whole is never in memory.
        """
        waiting: list[str] = []
        size, since = 0, time.monotonic()
        for piece in pieces:
            waiting.append(piece)
            size += len(piece)
            if size > PIECE:
                if not self.status:
                    await self._start(200, [(b"content-type", b"application/json")])
                await self.write("".join(waiting).encode(errors="replace"))
                waiting, size = [], 0
            if time.monotonic() - since > TURN_SECONDS:
                await asyncio.sleep(0)
                since = time.monotonic()
        last = "".join(waiting).encode(errors="replace")
        await (self.write(last, False) if self.status else self.reply(last))

    async def begin(self, kind: bytes, length: int) -> None:
        """Begin an answer of known length, whose parts `write` sends."""
        await self._start(200, [(b"content-type", kind), (b"content-length", str(length).encode())])

    async def stream(self) -> None:
        """Begin an answer of server-sent events, unless it has begun."""
        if self._streaming:
            return
        await self._start(200, _SEND_HEADERS)
        self._streaming = True
        self._chunk = (self._scope.get("extensions") or {}).get("allspark.chunk")

    async def write(self, data: bytes, more: bool = True) -> None:
        """Send a part of the answer; waits while the client does not read."""
        if not more:
            self._count_tokens()    # before the client knows the end, and asks again
        elif data and self._chunk is not None and self._chunk(data):
            self._written = time.monotonic()
            return
        self._sending_since = self._written = time.monotonic()
        self._streaming = self._streaming and more
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self._sending_since = 0.0

    def silent(self, now: float) -> float:
        """For how many seconds a stream of events has sent nothing; 0.0 if it cannot."""
        return now - self._written if self._streaming and not self._sending_since else 0.0

    async def comment(self) -> None:
        """Send a comment in a stream of events, which clients skip."""
        if self._streaming:
            with contextlib.suppress(Exception):    # the connection has failed, which the handler notices
                await self.write(b": the request is still running\n\n")

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status, self._sending_since = status, time.monotonic()
        self._written = self._sending_since
        headers = [*headers, (b"x-request-id", self.request_id.encode())]
        if ignored := ", ".join(self.unknown.ignored):
            headers.append((b"warning", f'299 - "unknown fields are ignored: {ignored}"'.encode()))
        if self.client.limit is not None and self._limited:
            self._count_tokens()
            headers += self.worker.limits.headers(self.client.tenant, self.client.limit)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        self._sending_since = 0.0

    def stuck(self, now: float) -> bool:
        """Whether the client has stopped reading."""
        if not self._sending_since:
            return False
        late = now - self._sending_since
        unread = sum(answer.unread for answer in self._answers if answer.started)
        return late > UNREAD_SECONDS or (late > _LOOK_SECONDS and unread > UNREAD_TOKENS)

    def abort(self) -> None:
        """Close the connection at once, and cancel the handler."""
        extensions = self._scope.get("extensions") or {}
        if "allspark.abort" in extensions:
            extensions["allspark.abort"]()
        if self.task is not None:
            self.task.cancel()


Handler = Callable[[Call, Any], Awaitable[None]]
ErrorBody = Callable[[ApiError], dict[str, Any]]
Upload = Callable[[Call, dict[str, Any], Receive], Awaitable[Any]]


class Endpoint:
    """An ASGI application for one path: checks the client's role, parses the body, and calls the handler.

    Args:
        worker: the state of the process.
        name: the endpoint's name in metrics and in the API description.
        handler: writes the answer.
        form: the pydantic model of the body; None: there is no body.
        role: the role that a client needs; None: none.
        error_body: the form of errors.
        kind: the content type of answers that are not event streams.
        upload: reads the body of an endpoint without a form, for the handler.
    """

    def __init__(self, worker: HttpWorker, name: str, handler: Handler, *, form: type[Body] | None = None,
                 role: Role | None = Role.READ, error_body: ErrorBody = ApiError.body,
                 kind: str = "application/json", upload: Upload | None = None):
        self.name, self.handler, self.form, self.role, self.kind = name, handler, form, role, kind
        self._worker, self._error_body, self._upload = worker, error_body, upload

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Serve a request."""
        worker = self._worker
        call = Call(worker, scope, send, Client(Role.READ))
        worker.calls.add(call)
        try:
            call.client = self._admit(scope)
            if self.role is not None and self.role.includes(Role.GENERATE) and scope["method"] == "POST":
                call.count_request()
            with worker.bodies.share(call.tenant) as share:
                form: Any = None
                if self.form is not None:
                    call.share = share
                    body = await share.read(scope, receive)
                    call.body_size = len(body)
                    form = parse(self.form, body, call.unknown)
                    call.wants_stream = bool(getattr(form, "stream", False))
                    del body
                    await asyncio.sleep(0)      # other calls' turn: parsing may have taken long
                elif self._upload is not None:
                    form = await self._upload(call, scope, receive)
                await self._until_gone(call, form, receive)
        except ClientDisconnected:
            call.status = call.status or 499    # nginx' status for a client that has disconnected
        except Exception as error:
            await self._send_error(call, error)
            _forget_frames(error)
        finally:
            call.task = None
            worker.calls.discard(call)
            call.end(self.name)

    def _admit(self, scope: dict[str, Any]) -> Client:
        if self.role is None or self.name in self._worker.open_endpoints:
            return Client(Role.READ)
        if (client := scope.get("allspark.client")) is not None:    # of a call that this server makes itself
            return client
        return admit(self._worker.access, scope, self.role)

    async def _until_gone(self, call: Call, form: Any, receive: Receive) -> None:
        """Run the handler; cancel it if the client disconnects."""
        call.task = asyncio.ensure_future(self.handler(call, form))
        watch = asyncio.ensure_future(self._wait_gone(receive))
        try:
            await asyncio.wait((call.task, watch), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            if not call.task.done():
                call.task.cancel()
                await asyncio.wait((call.task,))
        if call.task.cancelled():
            raise ClientDisconnected
        call.task.result()

    async def _wait_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            continue

    async def _send_error(self, call: Call, error: Exception) -> None:
        """Answer with an error; if events have been sent already, with a last event that is the error."""
        known = error if isinstance(error, ApiError) else INTERNAL
        if known is INTERNAL:
            logger.error("%s failed, request %s", self.name, call.request_id, exc_info=error)
        try:
            if not call.status:
                await reply_error(call, known, self._error_body)
            else:
                logger.warning("a stream of %s ends with an error: %s", self.name, known.message)
                event = b"event: error\n" if self._error_body is ApiError.anthropic_body else b""
                data = json.dumps(self._error_body(known)).encode()
                await call.write(event + b"data: " + data + b"\n\n")
                await call.write(b"", False)
        except Exception as failure:    # the connection has failed
            logger.debug("an error could not be sent: %s", failure)


def _forget_frames(error: BaseException | None) -> None:
    """Free what the frames of an error hold, such as the body: cycles would keep it until a garbage collection."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


async def reply_error(call: Call, error: ApiError, error_body: ErrorBody = ApiError.body) -> None:
    """Answer with an error."""
    headers = [(b"retry-after", str(error.retry_after).encode())] if error.retry_after else []
    if error.retry_after_ms:
        headers.append((b"retry-after-ms", str(error.retry_after_ms).encode()))
    if error.allow:
        headers.append((b"allow", error.allow.encode()))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.status in (408, 413):      # the rest of the body will not be read
        headers.append((b"connection", b"close"))
    await call.reply(error_body(error), error.status, headers=headers)


def admit(access: Access, scope: dict[str, Any], role: Role) -> Client:
    """The client of a request. Raises ApiError: 401 without a valid key, 403 if its role does not include `role`."""
    headers = dict(scope["headers"])
    given = headers.get(b"authorization")
    if given is None and b"x-api-key" in headers:
        given = b"Bearer " + headers[b"x-api-key"]
    unix = scope.get("server") is None or scope["server"][1] is None
    client = access.known(given or b"", unix, (scope.get("extensions") or {}).get("allspark.certificate", ""))
    if client is None:
        why = "Incorrect API key provided." if given else \
            "You didn't provide an API key: use the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
        raise ApiError(401, why, code="invalid_api_key")
    if not client.role.includes(role):
        raise ApiError(403, f"This API key may only do what the role '{client.role.value}' allows; "
                            f"this needs '{role.value}'", code="insufficient_permissions")
    return client


def new_id(prefix: str) -> str:
    """A new id that begins with `prefix`."""
    return f"{prefix}{secrets.token_hex(12)}"
