"""/v1/responses, OpenAI's. Nothing is stored: clients send earlier items again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from allspark_client.types import GeneratedElements, ModelInfo
from allspark_server.chat import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin

from .call import Call, new_id
from .choices import token_bytes
from .errors import ApiError, bad_value, not_available
from .logprobs import chat_logprobs
from .replies import ChatReplies, chat_spec, effort_kwargs
from .responses_wire import ResponsesRequest, messages_of, tools_of
from .sampling import check_room, check_stream_options, config_of

_LOGPROBS = "message.output_text.logprobs"
#: values of `include` that are accepted: the first is honoured, the second has no effect
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")
_REFUSED = {
    "previous_response_id": "nothing is stored; send what came before as 'input'",
    "conversation": "nothing is stored; send what came before as 'input'",
    "background": "nothing is stored; wait for the answer, or stream it",
    "prompt": "it has no stored prompts; use 'instructions'",
    "access_programs": "it has none",
    "background_options": "it has no background",
    "context_management": "it drops nothing of an input",
    "image": "it takes and gives text",
    "moderation": "it moderates nothing",
}


def _check(request: ResponsesRequest) -> None:
    for name, why in _REFUSED.items():
        if getattr(request, name) not in (None, False):
            raise not_available(name, why)
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


def _wants_logprobs(request: ResponsesRequest) -> bool:
    return _LOGPROBS in (request.include or ())


async def responses(call: Call, request: ResponsesRequest) -> None:
    """Answers an input."""
    _check(request)
    info = await call.model(request.model)
    config = config_of(request, info, request.max_output_tokens)
    if _wants_logprobs(request):
        config.logprobs, config.top_logprobs = True, request.top_logprobs or 0
    config.response_format = _format(request)
    tools, choice = tools_of(request)
    kwargs = dict(request.chat_template_kwargs or {})
    if request.reasoning is not None:
        kwargs = {**effort_kwargs(request.reasoning.effort), **kwargs}
    spec = chat_spec(request.model, messages_of(request), config, tools=tools, tool_choice=choice if tools else None,
                     parallel_tool_calls=request.parallel_tool_calls, chat_template_kwargs=kwargs or None)
    async with call.generate(spec) as answer:
        check_room(info, len(answer.prompt_ids), request.max_output_tokens, "max_output_tokens")
        replies = ChatReplies(call, answer, info)
        writer = _Writer(call, request, info, replies)
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


class _Writer:
    """Writes a response, as a whole or as events.

    `_output` has the items that are complete, `_item` the one that is being generated.
    """

    def __init__(self, call: Call, request: ResponsesRequest, info: ModelInfo, replies: ChatReplies):
        self._call, self._request, self._info, self._replies = call, request, info, replies
        self._id = new_id("resp_")
        self._sequence = 0
        self._output: list[dict[str, Any]] = []
        self._item: dict[str, Any] | None = None
        self._parts: list[str] = []             # the text, reasoning or arguments of `_item`
        # Log probabilities are kept as JSON, which is small, and stand in items as keys of `_json`.
        self._logprobs: list[tuple[str, str]] = []     # of the text of `_item`: as events and as items have them
        self._written: dict[str, str] = {}
        self._tokens = replies.all[0].logprobs()
        self._events: list[bytes] = []          # to be sent

    async def whole(self) -> None:
        """Write the response as a whole."""
        async for elements in self._replies.choices.answer:
            await self._take(elements)
        self._end()
        response = self._json(await self._response(self._status()))
        await self._call.reply(response.encode())

    async def stream(self) -> None:
        """Write the response as events."""
        await self._call.stream()
        try:
            for name in ("created", "in_progress"):
                self._emit(f"response.{name}", response=await self._response("in_progress"))
            async for elements in self._replies.choices.answer:
                await self._take(elements)
                await self._send()
            self._end()
            status = self._status()
            self._emit(f"response.{status}", response=await self._response(status))
            await self._send(more=False)
        except ApiError as error:
            self._emit("error", code=error.code, message=error.message, param=error.param)
            await self._send(more=False)

    async def _send(self, more: bool = True) -> None:
        events, self._events = self._events, []
        if events or not more:
            await self._call.write(b"".join(events), more)

    def _emit(self, kind: str, **fields: Any) -> None:
        if not self._request.stream:
            return
        data = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        self._events.append(f"event: {kind}\ndata: {self._json(data)}\n\n".encode())

    def _json(self, data: dict[str, Any]) -> str:
        text = json.dumps(data)
        for key, written in self._written.items():
            text = text.replace(f'"{key}"', written)
        return text

    def _as_key(self, logprobs: Iterable[str]) -> str:
        """A key that stands for log probabilities in JSON."""
        key = new_id("logprobs_")
        self._written[key] = f"[{','.join(logprobs)}]"
        return key

    # --- items ---

    async def _take(self, elements: GeneratedElements) -> None:
        _, events = self._replies.take(elements)
        if _wants_logprobs(self._request):
            tokens = await token_bytes(self._call.pool, self._info, elements)
            self._tokens.add(chat_logprobs(elements, tokens, self._request.top_logprobs or 0))
        for event in events:
            self._note(event)

    def _note(self, event: Event) -> None:
        text = event.delta if isinstance(event, ToolCallArguments) else getattr(event, "text", "")
        logprobs = self._tokens.take(text) if text and _wants_logprobs(self._request) else []
        if isinstance(event, ToolCallBegin):
            self._close()
            self._open({"type": "function_call", "id": new_id("fc_"), "call_id": event.id, "name": event.name,
                        "arguments": "", "status": "in_progress"})
        elif isinstance(event, Content):
            if self._item is None or self._item["type"] != "message":
                self._close()
                self._open({"type": "message", "id": new_id("msg_"), "role": "assistant", "status": "in_progress",
                            "content": []})
                self._part("added", _text_part(""))
            plain = _plain(logprobs)
            self._delta("response.output_text.delta", event.text, content_index=0, logprobs=plain)
            self._logprobs += [(json.dumps(one), json.dumps(other)) for one, other in zip(plain, logprobs)]
        elif isinstance(event, Reasoning):
            if self._item is None or self._item["type"] != "reasoning":
                self._close()
                self._open({"type": "reasoning", "id": new_id("rs_"), "summary": [], "content": [],
                            "status": "in_progress"})
                self._part("added", {"type": "reasoning_text", "text": ""})
            self._delta("response.reasoning_text.delta", event.text, content_index=0)
        else:
            self._delta("response.function_call_arguments.delta", event.delta)

    def _open(self, item: dict[str, Any]) -> None:
        self._item, self._parts, self._logprobs = item, [], []
        self._emit("response.output_item.added", output_index=len(self._output), item=item)

    def _place(self) -> dict[str, Any]:
        """Where the current item is in the response."""
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self._output)}

    def _part(self, event: str, part: dict[str, Any]) -> None:
        self._emit(f"response.content_part.{event}", **self._place(), content_index=0, part=part)

    def _delta(self, kind: str, text: str, **fields: Any) -> None:
        self._parts.append(text)
        self._emit(kind, **self._place(), delta=text, **fields)

    def _close(self, status: str = "completed") -> None:
        """Complete the current item, if there is one."""
        item = self._item
        if item is None:
            return
        text, at = "".join(self._parts), self._place()
        if item["type"] == "function_call":
            item["arguments"] = text
            self._emit("response.function_call_arguments.done", **at, name=item["name"], arguments=text)
        else:
            if item["type"] == "message":
                logprobs: list[Any] | str = []
                plain: list[Any] | str = []
                if self._logprobs:
                    plain, logprobs = (self._as_key(texts) for texts in zip(*self._logprobs))
                part = _text_part(text, logprobs)
                self._emit("response.output_text.done", **at, content_index=0, text=text, logprobs=plain)
            else:
                part = {"type": "reasoning_text", "text": text}
                self._emit("response.reasoning_text.done", **at, content_index=0, text=text)
            item["content"] = [part]
            self._part("done", part)
        item["status"] = status
        self._emit("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._item = None

    def _end(self) -> None:
        for event in self._replies.all[0].finish():
            self._note(event)
        if self._item is None and not self._output:     # an empty answer is a message, too
            self._note(Content(""))
        self._close(self._status())

    # --- the response ---

    def _status(self) -> str:
        choices = self._replies.choices
        return "incomplete" if choices.finish_reason(choices.all[0]) == "length" else "completed"

    async def _response(self, status: str) -> dict[str, Any]:
        request, choices = self._request, self._replies.choices
        tools = [tool.model_dump() for tool in request.tools or ()]
        choice = request.tool_choice
        text = request.text.model_dump(exclude_none=True, by_alias=True) if request.text is not None else {}
        reasoning = request.reasoning
        usage = None
        if status != "in_progress":
            prompt, generated = len(choices.answer.prompt_ids), choices.tokens
            usage = {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": choices.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": generated,
                "output_tokens_details": {"reasoning_tokens": await self._replies.reasoning_tokens()},
                "total_tokens": prompt + generated,
            }
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._call.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "model": request.model,
            "output": self._output if usage else [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": request.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump(),
            "tools": tools,
            "top_logprobs": request.top_logprobs or 0,
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": usage,
            "user": request.user,
            "metadata": request.metadata or {},
        }


def _plain(logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Log probabilities as events have them, without bytes."""
    return [{"token": entry["token"], "logprob": entry["logprob"],
             "top_logprobs": [{"token": top["token"], "logprob": top["logprob"]} for top in entry["top_logprobs"]]}
            for entry in logprobs]


def _text_part(text: str, logprobs: list[Any] | str = "") -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}
