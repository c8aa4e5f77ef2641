"""/v1/chat/completions, OpenAI's."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Iterator
from typing import Any

from allspark_client.types import ModelInfo
from allspark_server.chat import Content, Event, Reasoning, ToolCallBegin

from .call import Call, new_id
from .chat_wire import ChatRequest, plain_messages, plain_tools
from .choices import DONE, fingerprint, ids_field, logprobs_json, prompt_field, timings, token_bytes, usage
from .errors import bad_value, not_available
from .images import read_images
from .logprobs import chat_logprobs, chat_logprobs_json
from .pieces import joined, json_list, json_object, quoted
from .replies import ChatReplies, ChatReply, chat_spec, template_kwargs
from .sampling import check_prompt_logprobs, check_room, check_stream_options, config_of, response_format

_END = "}\n\n"    # of a chunk
_REFUSED = {
    "audio": "it generates text",
    "web_search_options": "it has no web search",
    "moderation": "it moderates nothing",
    "functions": "use tools",
    "function_call": "use tool_choice",
}


def _check(request: ChatRequest) -> None:
    for name, why in _REFUSED.items():
        if getattr(request, name) is not None:
            raise not_available(name, why)
    if request.modalities is not None and request.modalities != ["text"]:
        raise not_available("modalities", "it generates only text")
    if request.verbosity not in (None, "medium"):
        raise not_available("verbosity", "no model of this server knows it")
    if request.tools is None and request.tool_choice not in (None, "none"):
        raise bad_value("tool_choice", "it is only allowed when 'tools' are specified")
    if request.tools is None and request.parallel_tool_calls is not None:
        raise bad_value("parallel_tool_calls", "it is only allowed when 'tools' are specified")
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_value("top_logprobs", "it needs 'logprobs' to be true")
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise bad_value("max_tokens", "it cannot be set together with 'max_completion_tokens'")
    if request.max_tokens == 0:
        raise bad_value("max_tokens", "it must be at least 1")
    check_prompt_logprobs(request)
    check_stream_options(request)


async def chat(call: Call, request: ChatRequest) -> None:
    """Answers a chat."""
    _check(request)
    info = await call.model(request.model)
    wanted = request.max_completion_tokens or request.max_tokens
    config = config_of(request, info, wanted)
    if request.logprobs:
        config.logprobs, config.top_logprobs = True, request.top_logprobs or 0
    if request.response_format is not None:
        config.response_format = response_format(request.response_format)
    if request.prediction is not None:
        text = request.prediction.content
        config.prediction = text if isinstance(text, str) else "".join(part.text for part in text)
    choice = request.tool_choice
    spec = chat_spec(
        request.model, plain_messages(request.messages), config,
        tools=plain_tools(request.tools),
        tool_choice=choice if choice is None or isinstance(choice, str) else choice.model_dump(),
        parallel_tool_calls=request.parallel_tool_calls,
        chat_template_kwargs=template_kwargs(request.chat_template_kwargs, request.add_generation_prompt,
                                             request.reasoning_effort),
        continue_final_message=request.continue_final_message, chat_template=request.chat_template)
    await read_images(call, info, spec, request.mm_processor_kwargs)
    async with call.generate(spec) as answer:
        check_room(info, len(answer.prompt_ids), wanted,
                   "max_tokens" if request.max_tokens else "max_completion_tokens")
        replies = ChatReplies(call, answer, info, keep_logprobs=not request.stream)
        if request.stream:
            await _Stream(call, request, info, replies).run()
        else:
            await call.reply_in_pieces(await _whole(call, request, info, await replies.collect()))


async def _whole(call: Call, request: ChatRequest, info: ModelInfo, replies: ChatReplies) -> Iterator[str]:
    usage_ = usage([replies.choices], reasoning=await replies.reasoning_tokens())
    tokens = []
    for reply in replies.all:
        tokens.append(await token_bytes(call.pool, info, reply.choice.elements))
        await asyncio.sleep(0)      # others' turn: they are many
    return json_object({
        "id": new_id("chatcmpl-"),
        "object": "chat.completion",
        "created": call.created,
        "model": request.model,
        "choices": joined(_choice(request, replies, *both) for both in zip(replies.all, tokens)),
        "usage": usage_,
        "service_tier": "default",
        "system_fingerprint": fingerprint(info),
        **({"prompt_token_ids": replies.choices.answer.prompt_ids} if request.return_token_ids else {}),
        **({"timings": timings(replies.choices)} if request.timings_per_token else {}),
        **await prompt_field(call.pool, replies.choices, request.prompt_logprobs),
    })


def _choice(request: ChatRequest, replies: ChatReplies, reply: ChatReply, tokens: dict[int, bytes]) -> Iterator[str]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None, "annotations": []}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["content"] = reply.content or None
        message["tool_calls"] = reply.calls
    logprobs = None
    if request.logprobs:
        entries = chat_logprobs(reply.choice.elements, tokens, request.top_logprobs or 0)
        logprobs = json_object({"content": json_list(entries, 16), "refusal": None})
    more = {"token_ids": reply.choice.ids} if request.return_token_ids else {}
    return json_object({"index": reply.choice.index, "message": message, "logprobs": logprobs,
                        "finish_reason": reply.finish_reason(replies.choices), **more})


class _Stream:
    """Writes chunks. The text that all chunks share is made once, so that a token costs little."""

    def __init__(self, call: Call, request: ChatRequest, info: ModelInfo, replies: ChatReplies):
        self._call, self._request, self._info, self._replies = call, request, info, replies
        options = request.stream_options
        self._wants_usage = bool(options and options.include_usage)
        self._usage_in_each = bool(self._wants_usage and options and options.continuous_usage_stats)
        self._head = (f'data: {{"id":"{new_id("chatcmpl-")}","object":"chat.completion.chunk","created":{call.created},'
                      f'"model":{quoted(request.model)},"service_tier":"default",'
                      f'"system_fingerprint":"{fingerprint(info)}","choices":[')
        self._tail = "]" + (',"usage":null' if self._wants_usage else "") + _END

    async def run(self) -> None:
        """Write the whole stream."""
        call, replies = self._call, self._replies
        await call.stream()
        begin = "".join(self._chunk(reply, '{"role":"assistant","content":"","refusal":null}') for reply in replies.all)
        if self._request.return_token_ids:
            ids = ids_field("prompt_token_ids", replies.choices.answer.prompt_ids)
            begin = f"{begin.removesuffix(_END)}{ids}{_END}"
        await call.write(begin.encode())
        async for elements in replies.choices.answer:
            reply, events = replies.take(elements)
            logprobs = "null"
            if self._request.logprobs:
                make = functools.partial(chat_logprobs_json, elements, top=self._request.top_logprobs or 0)
                logprobs = await logprobs_json(call.pool, self._info, elements, make)
                events = events or [Content("")]    # the text is held back until more is known
            more = ""
            if self._request.return_token_ids:
                more = ids_field("token_ids", elements.ids_from_generate)
                events = events or [Content("")]
            if self._usage_in_each:
                self._tail = f'],"usage":{json.dumps(usage([replies.choices]))}{_END}'
            chunks = self._events(reply, events, logprobs, more)
            if elements.finish_reason is not None:
                chunks += self._last(reply)
            if chunks:      # none for a part of a character, or a special token
                await call.write(chunks.encode())
        last = [self._last(reply) for reply in replies.all if reply.choice.ended is None]
        more = f',"timings":{json.dumps(timings(replies.choices))}' if self._request.timings_per_token else ""
        if self._wants_usage:
            counts = usage([replies.choices], reasoning=await replies.reasoning_tokens())
            last.append(f'{self._head}],"usage":{json.dumps(counts)}{more}{_END}')
        elif more:
            last.append(f"{self._head}]{more}{_END}")
        await call.write("".join(last).encode() + DONE, more=False)

    def _last(self, reply: ChatReply) -> str:
        reason = reply.finish_reason(self._replies.choices)
        return self._events(reply, reply.finish()) + self._chunk(reply, "{}", reason=f'"{reason}"')

    def _events(self, reply: ChatReply, events: list[Event], logprobs: str = "null", more: str = "") -> str:
        """One chunk per event; the first has the log probabilities, and further fields."""
        chunks = []
        for event in events:
            chunks.append(self._chunk(reply, _delta(event), logprobs, more=more))
            logprobs, more = "null", ""
        return "".join(chunks)

    def _chunk(self, reply: ChatReply, delta: str, logprobs: str = "null", reason: str = "null", more: str = "") -> str:
        return (f'{self._head}{{"index":{reply.choice.index},"delta":{delta},"logprobs":{logprobs},'
                f'"finish_reason":{reason}{more}}}{self._tail}')


def _delta(event: Event) -> str:
    if isinstance(event, Content):
        return '{"content":' + quoted(event.text) + '}'
    if isinstance(event, Reasoning):
        return '{"reasoning_content":' + quoted(event.text) + '}'
    if isinstance(event, ToolCallBegin):
        return (f'{{"tool_calls":[{{"index":{event.index},"id":"{event.id}","type":"function",'
                f'"function":{{"name":{quoted(event.name)},"arguments":""}}}}]}}')
    return f'{{"tool_calls":[{{"index":{event.index},"function":{{"arguments":{quoted(event.delta)}}}}}]}}'
