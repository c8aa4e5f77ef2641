"""The ASGI application with all endpoints."""

from __future__ import annotations

import asyncio
import gc
import json
import re
from typing import Any

from allspark_server.access import Role

from . import admin, batches, files
from .adapters import LoadRequest, UnloadRequest, load_adapter, unload_adapter
from .bodies import Receive
from .call import Call, Endpoint, HttpWorker, Send
from .chat import chat
from .chat_wire import ChatRequest
from .completions import CompletionRequest, completions
from .embeddings import EmbeddingRequest, embeddings
from .errors import ApiError
from .messages import count_tokens, messages
from .messages_wire import MessagesRequest, Prompt
from .metrics import CONTENT_TYPE, of_members
from .models import NamedModel, health, list_models, live, load, one_model, unload, version
from .openapi import describe
from .page import page, pool
from .responses import responses
from .responses_wire import ResponsesRequest
from .scoring import ClassifyRequest, RerankRequest, ScoreRequest, classify, rerank, rerank_v2, score
from .stored_responses import cancel_response, delete_response, get_response, list_input_items
from .tokenize import DetokenizeRequest, TokenizeRequest, detokenize, tokenize

_EXPOSED = ", ".join(("x-request-id", "retry-after", "retry-after-ms", *(
    f"x-ratelimit-{what}-{unit}" for unit in ("requests", "tokens") for what in ("limit", "remaining", "reset")
))).encode()
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9_, -]{1,1024}")


async def _metrics(call: Call, _: None) -> None:
    """Metrics of this server and of the groups behind it, for Prometheus."""
    try:
        members = await call.pool.metrics()
    except ApiError:
        members = {}
    # On a thread: there may be many members, and many files of workers.
    text = await asyncio.to_thread(lambda: call.worker.metrics.text() + of_members(members))
    await call.reply(text, kind=CONTENT_TYPE)


def _endpoints(worker: HttpWorker) -> list[tuple[str, str, Endpoint]]:
    """The endpoints, each with its method and path."""
    generate, read = Role.GENERATE, Role.READ
    return [
        ("POST", "/v1/chat/completions", Endpoint(worker, "chat", chat, form=ChatRequest, role=generate)),
        ("POST", "/v1/completions",
         Endpoint(worker, "completions", completions, form=CompletionRequest, role=generate)),
        ("POST", "/v1/embeddings", Endpoint(worker, "embeddings", embeddings, form=EmbeddingRequest, role=generate)),
        *(("POST", path, Endpoint(worker, name, handler, form=RerankRequest, role=generate))
          for path, name, handler in (("/v1/rerank", "rerank", rerank), ("/rerank", "rerank_plain", rerank),
                                      ("/v2/rerank", "rerank_v2", rerank_v2))),
        *(("POST", path, Endpoint(worker, f"score{suffix}", score, form=ScoreRequest, role=generate))
          for path, suffix in (("/v1/score", ""), ("/score", "_plain"))),
        *(("POST", path, Endpoint(worker, f"classify{suffix}", classify, form=ClassifyRequest, role=generate))
          for path, suffix in (("/v1/classify", ""), ("/classify", "_plain"))),
        ("POST", "/v1/responses", Endpoint(worker, "responses", responses, form=ResponsesRequest, role=generate)),
        ("GET", "/v1/responses/{response}", Endpoint(worker, "get_response", get_response, role=generate)),
        ("DELETE", "/v1/responses/{response}", Endpoint(worker, "delete_response", delete_response, role=generate)),
        ("POST", "/v1/responses/{response}/cancel", Endpoint(worker, "cancel_response", cancel_response,
                                                             role=generate)),
        ("GET", "/v1/responses/{response}/input_items", Endpoint(worker, "input_items", list_input_items,
                                                                 role=generate)),
        ("POST", "/v1/files", Endpoint(worker, "upload_file", files.upload_file, upload=files.read_upload,
                                       role=generate)),
        ("GET", "/v1/files", Endpoint(worker, "files", files.list_files, role=generate)),
        ("GET", "/v1/files/{file}", Endpoint(worker, "file", files.get_file, role=generate)),
        ("DELETE", "/v1/files/{file}", Endpoint(worker, "delete_file", files.delete_file, role=generate)),
        ("GET", "/v1/files/{file}/content", Endpoint(worker, "file_content", files.file_content, role=generate,
                                                     kind="application/octet-stream")),
        ("POST", "/v1/batches", Endpoint(worker, "create_batch", batches.create_batch, form=batches.BatchRequest,
                                         role=generate)),
        ("GET", "/v1/batches", Endpoint(worker, "batches", batches.list_batches, role=generate)),
        ("GET", "/v1/batches/{batch}", Endpoint(worker, "batch", batches.get_batch, role=generate)),
        ("POST", "/v1/batches/{batch}/cancel", Endpoint(worker, "cancel_batch", batches.cancel_batch, role=generate)),
        ("POST", "/v1/messages", Endpoint(worker, "messages", messages, form=MessagesRequest, role=generate,
                                          error_body=ApiError.anthropic_body)),
        ("POST", "/v1/messages/count_tokens", Endpoint(worker, "count_tokens", count_tokens, form=Prompt, role=generate,
                                                       error_body=ApiError.anthropic_body)),
        ("GET", "/v1/models", Endpoint(worker, "models", list_models, role=read)),
        ("GET", "/v1/models/{model}", Endpoint(worker, "model", one_model, role=read)),
        ("POST", "/models/load", Endpoint(worker, "load_model", load, form=NamedModel, role=Role.ADMIN)),
        ("POST", "/models/unload", Endpoint(worker, "unload_model", unload, form=NamedModel, role=Role.ADMIN)),
        ("POST", "/v1/load_lora_adapter", Endpoint(worker, "load_lora_adapter", load_adapter, form=LoadRequest,
                                                   role=Role.ADMIN, kind="text/plain")),
        ("POST", "/v1/unload_lora_adapter", Endpoint(worker, "unload_lora_adapter", unload_adapter,
                                                     form=UnloadRequest, role=Role.ADMIN, kind="text/plain")),
        ("POST", "/sleep", Endpoint(worker, "sleep", admin.sleep, role=Role.ADMIN)),
        ("POST", "/wake_up", Endpoint(worker, "wake_up", admin.wake_up, role=Role.ADMIN)),
        ("GET", "/is_sleeping", Endpoint(worker, "is_sleeping", admin.is_sleeping, role=read)),
        ("POST", "/reset_prefix_cache", Endpoint(worker, "reset_prefix_cache", admin.reset_prefix_cache,
                                                 role=Role.ADMIN)),
        ("GET", "/server_info", Endpoint(worker, "server_info", admin.server_info, role=read)),
        ("POST", "/tokenize", Endpoint(worker, "tokenize", tokenize, form=TokenizeRequest, role=generate)),
        ("POST", "/detokenize", Endpoint(worker, "detokenize", detokenize, form=DetokenizeRequest, role=generate)),
        ("GET", "/", Endpoint(worker, "page", page, role=None, kind="text/html")),
        ("GET", "/pool", Endpoint(worker, "pool", pool, role=read)),
        ("GET", "/version", Endpoint(worker, "version", version, role=read)),
        ("GET", "/health", Endpoint(worker, "health", health, role=None)),
        ("GET", "/health/ready", Endpoint(worker, "ready", health, role=None)),
        ("GET", "/health/live", Endpoint(worker, "live", live, role=None)),
        ("GET", "/metrics", Endpoint(worker, "metrics", _metrics, role=read, kind="text/plain")),
    ]


def _with_origin(send: Send, origin: bytes) -> Send:
    """Adds to an answer that a web page of this origin may read it (CORS)."""
    async def sending(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [
                *message["headers"], (b"access-control-allow-origin", origin), (b"vary", b"Origin"),
                (b"access-control-expose-headers", _EXPOSED)]}
        await send(message)

    return sending


async def _preflight(scope: dict[str, Any], origin: bytes, send: Send) -> None:
    """Answers a browser that asks what a web page of this origin may send."""
    wanted = dict(scope["headers"]).get(b"access-control-request-headers", b"")
    if not _HEADER_NAMES.fullmatch(wanted):
        wanted = b"authorization, content-type"
    await send({"type": "http.response.start", "status": 204, "headers": [
        (b"access-control-allow-origin", origin), (b"vary", b"Origin"),
        (b"access-control-allow-methods", b"GET, POST, DELETE"),
        (b"access-control-allow-headers", wanted),
        (b"access-control-max-age", b"600")]})
    await send({"type": "http.response.body", "body": b""})


#: new objects that trigger a garbage collection. A step of 256 streams makes thousands, which reference counts free
#: soon: with the default, 700, each step would be searched several times
_YOUNG = 10_000


class Application:
    """The ASGI application. It finds the endpoint of a path, and is connected to the pool while it runs."""

    def __init__(self, worker: HttpWorker):
        self._worker = worker
        endpoints = _endpoints(worker)
        description = json.dumps(describe(endpoints)).encode()

        async def openapi(call: Call, _: None) -> None:
            """This API description."""
            await call.reply(description)

        endpoints.append(("GET", "/openapi.json", Endpoint(worker, "openapi", openapi, role=None)))
        #: endpoints by path, or by the beginning and the end of a path with a {name}, and then by method
        self._paths: dict[str, dict[str, Endpoint]] = {}
        self._named: dict[tuple[str, str], dict[str, Endpoint]] = {}
        for method, path, endpoint in endpoints:
            begin, brace, rest = path.partition("{")
            methods = (self._named.setdefault((begin, rest.partition("}")[2]), {}) if brace
                       else self._paths.setdefault(begin, {}))
            methods[method] = endpoint
            if method == "GET":
                methods["HEAD"] = endpoint

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Serve a request, or the application's start and end."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        origin = dict(scope["headers"]).get(b"origin", b"")
        if origin and self._worker.origins.intersection(("*", origin.decode("latin-1"))):
            if scope["method"] == "OPTIONS":
                await _preflight(scope, origin, send)
                return
            send = _with_origin(send, origin)
        await self._find(scope)(scope, receive, send)

    def _find(self, scope: dict[str, Any]) -> Endpoint:
        path, method = scope["path"], scope["method"]
        methods = self._paths.get(path)
        if methods is None:
            # The one with the longest end: /v1/responses/{response}/cancel before /v1/responses/{response}.
            fitting = [(begin, end) for begin, end in self._named if path.startswith(begin) and path.endswith(end)
                       and len(path) > len(begin) + len(end)]
            found = max(fitting, key=lambda pair: len(pair[1]), default=None)
            if found is None:
                return self._refusal(ApiError(404, f"Unknown request URL: {method} {path}", code="unknown_url"))
            methods, scope["path_rest"] = self._named[found], path[len(found[0]):len(path) - len(found[1])]
        if method not in methods:
            return self._refusal(ApiError(405, f"{path} does not take {method}", code="method_not_supported",
                                          allow=", ".join(methods)))
        return methods[method]

    def _refusal(self, error: ApiError) -> Endpoint:
        async def refuse(_: Call, __: None) -> None:
            raise error

        return Endpoint(self._worker, "none", refuse, role=None)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()     # lifespan.startup
        gc.collect()
        gc.freeze()     # collections skip what is loaded
        gc.set_threshold(_YOUNG)
        await self._worker.pool.open()
        watch = asyncio.create_task(self._worker.watch())
        if (jobs := self._worker.jobs) is not None:
            jobs.open(self._worker, self)
        await send({"type": "lifespan.startup.complete"})
        await receive()     # lifespan.shutdown
        watch.cancel()
        if jobs is not None:
            await jobs.close()
        await self._worker.pool.close()
        await send({"type": "lifespan.shutdown.complete"})
