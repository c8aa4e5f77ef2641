"""All endpoints, as one ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import AsyncIterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from allspark_server.access import Role

from .call import Call, Door, Endpoint
from .chat import chat
from .chat_wire import ChatRequest
from .completions import CompletionRequest, completions
from .embeddings import EmbeddingRequest, embeddings
from .errors import ApiError
from .messages import count_tokens, messages
from .messages_wire import MessagesRequest, Prompt
from .metrics import CONTENT_TYPE
from .models import health, list_models, one_model
from .openapi import describe
from .responses import responses
from .responses_wire import ResponsesRequest
from .tokenize import DetokenizeRequest, TokenizeRequest, detokenize, tokenize


async def _metrics(call: Call, _: None) -> None:
    """Counters of this door, for Prometheus."""
    await call.reply(call.door.metrics.text(), kind=CONTENT_TYPE)


def _endpoints(door: Door) -> list[tuple[str, str, Endpoint]]:
    """Method, path and endpoint."""
    generate, read = Role.GENERATE, Role.READ
    return [
        ("POST", "/v1/chat/completions", Endpoint(door, "chat", chat, form=ChatRequest, role=generate)),
        ("POST", "/v1/completions",
         Endpoint(door, "completions", completions, form=CompletionRequest, role=generate)),
        ("POST", "/v1/embeddings", Endpoint(door, "embeddings", embeddings, form=EmbeddingRequest, role=generate)),
        ("POST", "/v1/responses", Endpoint(door, "responses", responses, form=ResponsesRequest, role=generate)),
        ("POST", "/v1/messages", Endpoint(door, "messages", messages, form=MessagesRequest, role=generate,
                                          error_body=ApiError.anthropic_body)),
        ("POST", "/v1/messages/count_tokens", Endpoint(door, "count_tokens", count_tokens, form=Prompt, role=generate,
                                                       error_body=ApiError.anthropic_body)),
        ("GET", "/v1/models", Endpoint(door, "models", list_models, role=read)),
        ("GET", "/v1/models/{model:path}", Endpoint(door, "model", one_model, role=read)),
        ("POST", "/tokenize", Endpoint(door, "tokenize", tokenize, form=TokenizeRequest, role=generate)),
        ("POST", "/detokenize", Endpoint(door, "detokenize", detokenize, form=DetokenizeRequest, role=generate)),
        ("GET", "/health", Endpoint(door, "health", health, role=None)),
        ("GET", "/metrics", Endpoint(door, "metrics", _metrics, role=read, kind="text/plain")),
    ]


def application(door: Door) -> Starlette:
    """The door's application; its life is the pool's connection's."""
    @contextlib.asynccontextmanager
    async def life(_: Starlette) -> AsyncIterator[None]:
        await door.pool.open()
        watch = asyncio.create_task(door.watch())
        try:
            yield
        finally:
            watch.cancel()
            await door.pool.close()

    endpoints = _endpoints(door)
    description = json.dumps(describe(endpoints)).encode()

    async def openapi(call: Call, _: None) -> None:
        """This description."""
        await call.reply(description)

    endpoints.append(("GET", "/openapi.json", Endpoint(door, "openapi", openapi, role=None)))
    routes = [Route(path, endpoint, methods=[method]) for method, path, endpoint in endpoints]
    return Starlette(routes=routes, lifespan=life, exception_handlers={HTTPException: _no_route})


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, method = request.url.path, request.method
    if error.status_code == 404:
        known = ApiError(404, f"Unknown request URL: {method} {path}", code="unknown_url")
    elif error.status_code == 405:
        known = ApiError(405, f"{path} does not take {method}", code="method_not_supported")
    else:
        known = ApiError(error.status_code, str(error.detail))
    return JSONResponse(known.body(), error.status_code, headers=error.headers)

