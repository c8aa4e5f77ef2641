"""/v1/responses, OpenAI's. With a store, responses can be fetched, continued and computed in the background."""

from __future__ import annotations

import logging
from typing import Any

from allspark_client.types import ModelInfo
from allspark_server.access import Client

from .call import Call, new_id
from .errors import INTERNAL, ApiError, bad_value, not_available
from .images import check_sees, read_images
from .internal import scope_of
from .jobs import MOST_RESPONSES, Jobs
from .replies import ChatReplies, chat_spec, effort_kwargs
from .responses_wire import Item, ResponsesRequest, messages_of, tools_of
from .responses_writer import LOGPROBS, Keep, ResponseWriter, response_object
from .sampling import check_room, check_stream_options, config_of
from .store import Stored
from .stored_responses import EventLog, follow, input_items, items_before, shown

logger = logging.getLogger(__name__)

#: values of `include` that are accepted: the first is honoured, the second has no effect
_INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
_REFUSED = {
    "conversation": "it keeps no conversations; use 'previous_response_id'",
    "prompt": "it has no stored prompts; use 'instructions'",
    "access_programs": "it has none",
    "background_options": "it has none",
    "context_management": "it drops nothing of an input",
    "image": "its models make no images",
    "moderation": "it moderates nothing",
}


def _check(request: ResponsesRequest, has_store: bool) -> None:
    for name, why in _REFUSED.items():
        if getattr(request, name) not in (None, False):
            raise not_available(name, why)
    for name in ("previous_response_id", "background"):
        if getattr(request, name) and not has_store:
            raise not_available(name, "it keeps nothing; its operator starts it with --store for that")
    if request.background and request.store is False:
        raise bad_value("background", "it needs 'store'")
    if request.truncation == "auto":
        raise not_available("truncation", "it drops nothing of an input that is too long")
    for i, name in enumerate(request.include or ()):
        if name not in _INCLUDED:
            raise bad_value(f"include[{i}]", f"allowed: {', '.join(_INCLUDED)}")
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        raise not_available("text.verbosity", "no model of this server knows it")
    if not request.tools and request.tool_choice not in (None, "none", "auto"):
        raise bad_value("tool_choice", "it is only allowed when 'tools' are specified")
    check_stream_options(request)


async def responses(call: Call, request: ResponsesRequest) -> None:
    """Answers an input."""
    has_store = call.worker.jobs is not None
    _check(request, has_store)
    name = new_id("resp_")
    earlier = []
    if request.previous_response_id:
        earlier = await items_before(call, request.previous_response_id)
    if request.background:
        await _begin(call, request, earlier, name)
        return
    keep: Keep | None = None
    if has_store and request.store is not False:
        async def keep(response: dict[str, Any], status: str) -> bool:
            data = {"response": response, "input": input_items(request), "previous": request.previous_response_id}
            try:
                await call.jobs.store.put(Stored(name, "response", call.client.tenant, data, status))
            except ApiError as error:
                logger.error("response %s is not stored: %s", name, error.message)
                return False
            return True

    await _answer(call, request, earlier, name, keep)


async def _answer(call: Call, request: ResponsesRequest, earlier: list[Item], name: str, keep: Keep | None) -> None:
    """Computes and writes a response."""
    info = await call.model(request.model)
    config = config_of(request, info, request.max_output_tokens)
    if LOGPROBS in (request.include or ()):
        config.logprobs, config.top_logprobs = True, request.top_logprobs or 0
    if (answer_format := _format(request)) is not None:
        if config.response_format is not None:
            raise bad_value("structured_outputs", "'text.format' already constrains the answer")
        config.response_format = answer_format
    tools, choice = tools_of(request)
    kwargs = dict(request.chat_template_kwargs or {})
    if request.reasoning is not None:
        kwargs = {**effort_kwargs(request.reasoning.effort), **kwargs}
    spec = chat_spec(request.model, messages_of(request, earlier), config, tools=tools,
                     tool_choice=choice if tools else None, parallel_tool_calls=request.parallel_tool_calls,
                     chat_template_kwargs=kwargs or None)
    await read_images(call, info, spec, request.mm_processor_kwargs)
    async with call.generate(spec) as answer:
        check_room(info, len(answer.prompt_ids), request.max_output_tokens, "max_output_tokens")
        replies = ChatReplies(call, answer, info)
        writer = ResponseWriter(call, request, info, replies, name, keep)
        if request.stream:
            await writer.stream()
        else:
            await writer.whole()


def _format(request: ResponsesRequest) -> dict[str, Any] | None:
    """text.format in the form of chats; None for any text."""
    given = request.text.format if request.text is not None else None
    if given is None or given.type == "text":
        return None
    plain = given.model_dump(exclude_none=True, by_alias=True)
    if given.type == "json_object":
        return plain
    return {"type": plain.pop("type"), "json_schema": plain}


# --- in the background -------------------------------------------------------------------------------------------


async def _begin(call: Call, request: ResponsesRequest, earlier: list[Item], name: str) -> None:
    """Begins a background response, and answers with it, or with its events as they come."""
    jobs = call.jobs
    if jobs.count("resp_") >= MOST_RESPONSES:
        raise ApiError(429, "Too many background responses are being computed", code="rate_limit_exceeded",
                       retry_after=1)
    await _known(call, request, earlier)
    stored = Stored(name, "response", call.client.tenant, {
        "response": response_object(request, name, call.created, "queued", True), "input": input_items(request),
        "previous": request.previous_response_id, "request": request.model_dump(exclude_none=True, by_alias=True),
    }, "queued")
    await jobs.store.put(stored)
    jobs.start(name, _work(jobs, stored, request, call.client, call.request_id))
    if request.stream:
        await follow(call, stored, -1)
    else:
        await call.reply(shown(stored))


async def _known(call: Call, request: ResponsesRequest, earlier: list[Item]) -> ModelInfo:
    """Raises ApiError for a request that is wrong in a way that can be told at once."""
    info = await call.model(request.model)
    config_of(request, info, request.max_output_tokens)
    tools, choice = tools_of(request)
    messages = messages_of(request, earlier)
    check_sees(info, messages)
    chat_spec(request.model, messages, config_of(request, info, None), tools=tools,
              tool_choice=choice if tools else None)
    return info


async def _work(jobs: Jobs, stored: Stored, request: ResponsesRequest, client: Client, request_id: str) -> None:
    """Computes a background response."""
    store, data = jobs.store, stored.data
    log = EventLog(store, stored.id if request.stream else "")
    call = Call(jobs.worker, scope_of("/v1/responses", client, request_id), log.send, client)

    data["response"]["status"], final = "failed", "failed"
    data["response"]["error"] = {"code": "server_error", "message": "The answer ended with an error"}

    async def keep(response: dict[str, Any], status: str) -> bool:
        nonlocal final
        data["response"], final = response, status
        return True

    try:
        if await store.change_state(stored.id, "in_progress", ("queued", "in_progress")):
            try:
                before = request.previous_response_id
                await _answer(call, request, await items_before(call, before) if before else [], stored.id, keep)
            except Exception as error:
                known = error if isinstance(error, ApiError) else INTERNAL
                if known is INTERNAL:
                    logger.error("background response %s failed", stored.id, exc_info=error)
                data["response"]["error"] = {"code": known.code or "server_error", "message": known.message}
            await log.close()       # who follows the events reads all of them before the final state
            stored.state = final
            data.pop("request", None)
            await store.change(stored, ("queued", "in_progress"))
    finally:
        log.stop()
        call.end("responses")
        current = await store.get("response", stored.id, stored.tenant)
        if current is not None and current.state == "cancelling":
            await _cancelled(jobs, current)


async def _cancelled(jobs: Jobs, stored: Stored) -> None:
    stored.data["response"]["status"] = stored.state = "cancelled"
    stored.data.pop("request", None)
    await jobs.store.change(stored)


async def continue_response(jobs: Jobs, stored: Stored) -> None:
    """Computes an abandoned background response anew. One whose events were read fails: they would not fit."""
    if stored.state == "cancelling":
        await _cancelled(jobs, stored)
        return
    request = ResponsesRequest.model_validate(stored.data["request"])
    if request.stream:
        stored.data["response"] |= {"status": "failed", "error": {
            "code": "server_error", "message": "The process that computed this response has ended"}}
        stored.state = "failed"
        await jobs.store.change(stored)
        return
    logger.info("background response %s is computed anew", stored.id)
    jobs.start(stored.id, _work(jobs, stored, request, jobs.client_of(stored.tenant), new_id("req_")))
