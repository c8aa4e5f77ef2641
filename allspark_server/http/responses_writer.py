"""Writes a response of /v1/responses, as a whole or as events."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from allspark_client.types import GeneratedElements, ModelInfo
from allspark_server.chat import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin

from .call import Call, new_id
from .choices import token_bytes
from .errors import ApiError
from .logprobs import chat_logprobs
from .pieces import quoted
from .replies import ChatReplies
from .responses_wire import ResponsesRequest

#: stores a response with its status; returns whether it could
Keep = Callable[[dict[str, Any], str], Awaitable[bool]]
LOGPROBS = "message.output_text.logprobs"


class ResponseWriter:
    """Writes a response, as a whole or as events. `id`: the response's. `stored`: whether clients can fetch it.

    `_output` has the items that are complete, `_item` the one that is being generated.
    """

    def __init__(self, call: Call, request: ResponsesRequest, info: ModelInfo, replies: ChatReplies, name: str,
                 keep: Keep | None):
        """`keep`: stores the response at its end; returns whether it could. None: it is not stored."""
        self._call, self._request, self._info, self._replies = call, request, info, replies
        self.id, self._keep, self.stored = name, keep, keep is not None
        self._wants_logprobs = LOGPROBS in (request.include or ())
        self._sequence = 0
        self._output: list[dict[str, Any]] = []
        self._item: dict[str, Any] | None = None
        self._parts: list[str] = []             # the text, reasoning or arguments of `_item`
        # Log probabilities are kept as JSON, which is small, and stand in items as keys of `_json`.
        self._logprobs: list[tuple[str, str]] = []     # of the text of `_item`: as events and as items have them
        self._written: dict[str, str] = {}
        self._tokens = replies.all[0].logprobs()
        self._place = ""                        # where `_item` is in the response, as JSON
        self._events: list[str] = []            # to be sent

    async def whole(self) -> None:
        """Write the response as a whole."""
        async for elements in self._replies.choices.answer:
            await self._take(elements)
        self._end()
        await self._call.reply((await self._finished()).encode())

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
            kind = f"response.{self._status()}"
            response = await self._finished()
            self._events.append(f'event: {kind}\ndata: {{"type": "{kind}", "sequence_number": {self._sequence}, '
                                f'"response": {response}}}\n\n')
            await self._send(more=False)
        except ApiError as error:
            self._emit("error", code=error.code, message=error.message, param=error.param)
            await self._send(more=False)

    async def _finished(self) -> str:
        """The complete response as JSON, which is stored if that is wanted."""
        status = self._status()
        response = await self._response(status)
        text = self._json(response)
        if self._keep is not None and not await self._keep(json.loads(text), status):
            self.stored = False
            text = self._json({**response, "store": False})
        return text

    async def _send(self, more: bool = True) -> None:
        events, self._events = self._events, []
        if events or not more:
            await self._call.write("".join(events).encode(errors="replace"), more)

    def _emit(self, kind: str, **fields: Any) -> None:
        if not self._request.stream:
            return
        data = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        self._events.append(f"event: {kind}\ndata: {self._json(data)}\n\n")

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
        if self._wants_logprobs:
            tokens = await token_bytes(self._call.pool, self._info, elements)
            self._tokens.add(chat_logprobs(elements, tokens, self._request.top_logprobs or 0))
        for event in events:
            self._note(event)

    def _note(self, event: Event) -> None:
        text = event.delta if isinstance(event, ToolCallArguments) else getattr(event, "text", "")
        logprobs = self._tokens.take(text) if text and self._wants_logprobs else []
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
            plain = [json.dumps(one) for one in _plain(logprobs)]
            self._delta("response.output_text.delta", event.text,
                        f',"content_index":0,"logprobs":[{",".join(plain)}]')
            self._logprobs += zip(plain, map(json.dumps, logprobs))
        elif isinstance(event, Reasoning):
            if self._item is None or self._item["type"] != "reasoning":
                self._close()
                self._open({"type": "reasoning", "id": new_id("rs_"), "summary": [], "content": [],
                            "status": "in_progress"})
                self._part("added", {"type": "reasoning_text", "text": ""})
            self._delta("response.reasoning_text.delta", event.text, ',"content_index":0')
        else:
            self._delta("response.function_call_arguments.delta", event.delta)

    def _open(self, item: dict[str, Any]) -> None:
        self._item, self._parts, self._logprobs = item, [], []
        self._place = f'"item_id":"{item["id"]}","output_index":{len(self._output)}'
        self._emit("response.output_item.added", output_index=len(self._output), item=item)

    def _at(self) -> dict[str, Any]:
        """Where the current item is in the response."""
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self._output)}

    def _part(self, event: str, part: dict[str, Any]) -> None:
        self._emit(f"response.content_part.{event}", **self._at(), content_index=0, part=part)

    def _delta(self, kind: str, text: str, more: str = "") -> None:
        """New text of the current item: one event for each token, so its JSON is written by hand. `more`: fields."""
        self._parts.append(text)
        if self._request.stream:
            self._events.append(f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":{self._sequence},'
                                f'{self._place},"delta":{quoted(text)}{more}}}\n\n')
            self._sequence += 1

    def _close(self, status: str = "completed") -> None:
        """Complete the current item, if there is one."""
        item = self._item
        if item is None:
            return
        text, at = "".join(self._parts), self._at()
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
        if status == "in_progress":
            return response_object(self._request, self.id, self._call.created, status, self.stored)
        choices = self._replies.choices
        prompt, generated = len(choices.answer.prompt_ids), choices.tokens
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": choices.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": await self._replies.reasoning_tokens()},
            "total_tokens": prompt + generated,
        }
        return response_object(self._request, self.id, self._call.created, status, self.stored, self._output, usage)


def response_object(
    request: ResponsesRequest, name: str, created: int, status: str, stored: bool,
    output: list[dict[str, Any]] | None = None, usage: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A response in OpenAI's form. `stored`: whether clients can fetch it."""
    tools = [tool.model_dump() for tool in request.tools or ()]
    choice = request.tool_choice
    text = request.text.model_dump(exclude_none=True, by_alias=True) if request.text is not None else {}
    reasoning = request.reasoning
    return {
        "id": name,
        "object": "response",
        "created_at": created,
        "status": status,
        "background": bool(request.background),
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "model": request.model,
        "output": output or [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "service_tier": "default",
        "store": stored,
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
