"""/v1/messages and /v1/messages/count_tokens, Anthropic's."""

from __future__ import annotations

import json
from typing import Any

from allspark_client.config import GenerateConfig
from allspark_server.chat import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin

from .call import Call, new_id
from .errors import bad_value, not_available
from .images import read_images
from .messages_wire import MessagesRequest, Prompt, ThinkingOn, messages_of, options_of, response_format_of
from .pieces import quoted
from .replies import ChatReplies, ChatReply, chat_spec
from .sampling import check_room, config_of

_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


_REFUSED = {"mcp_servers": "it calls no MCP servers; let the client call them, and pass their tools in 'tools'"}


def _check(request: Prompt) -> None:
    for name, why in _REFUSED.items():
        if getattr(request, name):
            raise not_available(name, why)
    if not request.tools and request.tool_choice is not None and request.tool_choice.type in ("any", "tool"):
        raise bad_value("tool_choice", "it is only allowed when 'tools' are specified")


async def messages(call: Call, request: MessagesRequest) -> None:
    """Answers a chat."""
    _check(request)
    info = await call.model(request.model)
    config = config_of(request, info, request.max_tokens)
    if isinstance(request.thinking, ThinkingOn):
        if request.thinking.budget_tokens >= request.max_tokens:
            raise bad_value("max_tokens", "it must be greater than 'thinking.budget_tokens'")
        if info.reasoning:      # Anthropic's clients ask every model to think
            config.thinking_token_budget = request.thinking.budget_tokens
    if request.stop_sequences:
        config.stop = request.stop_sequences
    config.response_format = response_format_of(request)
    spec = chat_spec(request.model, messages_of(request), config, **options_of(request))
    await read_images(call, info, spec)
    async with call.generate(spec) as answer:
        check_room(info, len(answer.prompt_ids), request.max_tokens, "max_tokens")
        replies = ChatReplies(call, answer, info)
        if request.stream:
            await _Stream(call, request, replies).run()
        else:
            await call.reply(await _whole(request, replies))


async def count_tokens(call: Call, request: Prompt) -> None:
    """The number of tokens of a chat's prompt."""
    _check(request)
    info = await call.model(request.model)
    spec = chat_spec(request.model, messages_of(request), GenerateConfig(), **options_of(request))
    await read_images(call, info, spec)
    await call.reply({"input_tokens": len(await call.pool.tokenize(spec, places=call.image_places))})


async def _whole(request: MessagesRequest, replies: ChatReplies) -> dict[str, Any]:
    events: list[Event] = []
    async for elements in replies.choices.answer:
        events += replies.take(elements)[1]
    reply = replies.all[0]
    content = _blocks(events + reply.finish())
    return {**_message(new_id("msg_"), request, content), **_end(reply, replies),
            "usage": {**_input_usage(replies), "output_tokens": replies.choices.tokens}}


def _blocks(events: list[Event]) -> list[dict[str, Any]]:
    """The blocks of an answer, in the order in which a stream has them."""
    found: list[tuple[ToolCallBegin | type[Event], list[str]]] = []
    for event in events:
        if isinstance(event, ToolCallBegin):
            found.append((event, []))
        elif isinstance(event, ToolCallArguments):
            found[-1][1].append(event.delta)
        else:
            if not found or found[-1][0] is not type(event):
                found.append((type(event), []))
            found[-1][1].append(event.text)
    blocks: list[dict[str, Any]] = []
    for kind, pieces in found:
        text = "".join(pieces)
        if isinstance(kind, ToolCallBegin):
            blocks.append({"type": "tool_use", "id": kind.id, "name": kind.name, "input": _input(text)})
        elif kind is Reasoning:
            blocks.append({"type": "thinking", "thinking": text, "signature": ""})
        else:
            blocks.append({"type": "text", "text": text})
    return blocks


def _message(name: str, request: MessagesRequest, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": name, "type": "message", "role": "assistant", "model": request.model, "content": content}


def _input(arguments: str) -> Any:
    """The arguments of a call; none if the answer ended within them."""
    try:
        values = json.loads(arguments or "{}")
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def _end(reply: ChatReply, replies: ChatReplies) -> dict[str, Any]:
    stop = reply.choice.stop_string
    reason = reply.finish_reason(replies.choices, of_named="tool_calls")
    return {"stop_reason": _REASONS[reason] if stop is None else "stop_sequence", "stop_sequence": stop}


def _input_usage(replies: ChatReplies) -> dict[str, Any]:
    cached = replies.choices.cached_tokens
    return {"input_tokens": len(replies.choices.answer.prompt_ids) - cached, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached}


class _Stream:
    """Writes events: a block for each part of the answer."""

    def __init__(self, call: Call, request: MessagesRequest, replies: ChatReplies):
        self._call, self._request, self._replies = call, request, replies
        self._block = ""        # the type of the block that is open
        self._blocks = 0

    async def run(self) -> None:
        """Write the whole stream."""
        call, replies = self._call, self._replies
        await call.stream()
        begun = {**_message(new_id("msg_"), self._request, []), "stop_reason": None, "stop_sequence": None,
                 "usage": {**_input_usage(replies), "output_tokens": 0}}
        await call.write(_event("message_start", message=begun) + _event("ping"))
        async for elements in replies.choices.answer:
            _, events = replies.take(elements)
            if events:
                await call.write(b"".join(map(self._of, events)))
        reply = replies.all[0]
        last = b"".join(map(self._of, reply.finish())) + self._close()
        usage = {**_input_usage(replies), "output_tokens": replies.choices.tokens}
        last += _event("message_delta", delta=_end(reply, replies), usage=usage)
        await call.write(last + _event("message_stop"), more=False)

    def _of(self, event: Event) -> bytes:
        if isinstance(event, ToolCallBegin):
            return self._open("tool_use", id=event.id, name=event.name, input={})
        empty: dict[str, str] = {}
        if isinstance(event, Content):
            kind, empty, delta, field, text = "text", {"text": ""}, "text_delta", "text", event.text
        elif isinstance(event, Reasoning):
            kind, empty = "thinking", {"thinking": "", "signature": ""}
            delta, field, text = "thinking_delta", "thinking", event.text
        else:
            kind, delta, field, text = "tool_use", "input_json_delta", "partial_json", event.delta
        data = b"" if self._block == kind else self._open(kind, **empty)
        # as _event, but in the fastest way: every token comes here
        return data + ('event: content_block_delta\ndata: {"type": "content_block_delta", '
                       f'"index": {self._blocks - 1}, "delta": {{"type": "{delta}", "{field}": {quoted(text)}}}}}\n\n'
                       ).encode()

    def _open(self, kind: str, **fields: Any) -> bytes:
        data = self._close()
        self._block = kind
        self._blocks += 1
        return data + _event("content_block_start", index=self._blocks - 1, content_block={"type": kind, **fields})

    def _close(self) -> bytes:
        if not self._block:
            return b""
        self._block = ""
        return _event("content_block_stop", index=self._blocks - 1)


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()
