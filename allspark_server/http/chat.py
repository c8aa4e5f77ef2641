"""/v1/chat/completions."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any, Literal, Optional, Union

from pydantic import Field

from allspark_client.request import RequestSpec
from allspark_client.types import GeneratedElements, ModelInfo

from .call import Call, new_id
from .choices import DONE, Choice, Choices, fingerprint, quoted, token_bytes, usage
from .errors import bad_value, not_available
from .logprobs import chat_logprobs
from .sampling import check_room, config_of
from .wire import INT32_MAX, Generation, JsonObject, Metadata, Wire


class TextPart(Wire):
    type: Literal["text"]
    text: str


Content = Union[str, Annotated[list[TextPart], Field(min_length=1)]]


class SystemMessage(Wire):
    role: Literal["system", "developer"]
    content: Content
    name: Optional[str] = None


class UserMessage(Wire):
    role: Literal["user"]
    content: Content
    name: Optional[str] = None


class AssistantMessage(Wire):
    role: Literal["assistant"]
    content: Optional[Content] = None
    name: Optional[str] = None
    refusal: Optional[str] = None
    tool_calls: Optional[list[JsonObject]] = None
    function_call: Optional[JsonObject] = None
    audio: Optional[JsonObject] = None
    annotations: Optional[list[JsonObject]] = None


class ToolMessage(Wire):
    role: Literal["tool"]
    content: Content
    tool_call_id: str


Message = Annotated[Union[SystemMessage, UserMessage, AssistantMessage, ToolMessage], Field(discriminator="role")]


class ChatRequest(Generation):
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[Optional[int], Field(ge=1, le=INT32_MAX)] = None
    logprobs: Optional[bool] = None
    top_logprobs: Annotated[Optional[int], Field(ge=0, le=20)] = None
    tools: Optional[list[JsonObject]] = None
    tool_choice: Union[None, Literal["none", "auto", "required"], JsonObject] = None
    parallel_tool_calls: Optional[bool] = None
    functions: Optional[list[JsonObject]] = None
    function_call: Union[None, str, JsonObject] = None
    response_format: Optional[JsonObject] = None
    chat_template_kwargs: Optional[JsonObject] = None
    reasoning_effort: Optional[str] = None
    modalities: Optional[list[Literal["text", "audio"]]] = None
    audio: Optional[JsonObject] = None
    prediction: Optional[JsonObject] = None
    web_search_options: Optional[JsonObject] = None
    verbosity: Optional[Literal["low", "medium", "high"]] = None
    # What OpenAI keeps or bills by: nothing of it changes an answer.
    store: Optional[bool] = None
    metadata: Optional[Metadata] = None
    service_tier: Optional[str] = None
    safety_identifier: Optional[str] = None
    prompt_cache_key: Optional[str] = None
    prompt_cache_retention: Optional[str] = None


_UNSUPPORTED = {
    "audio": "it generates text",
    "web_search_options": "it has no web search",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "tools": "its engine does not have them yet",
    "tool_choice": "it is for tools",
    "parallel_tool_calls": "it is for tools",
    "chat_template_kwargs": "its engine does not have them yet",
    "reasoning_effort": "its engine does not have it yet",
}


def _check(request: ChatRequest) -> None:
    for name, why in _UNSUPPORTED.items():
        if getattr(request, name) is not None:
            raise not_available(name, why)
    if request.modalities is not None and request.modalities != ["text"]:
        raise not_available("modalities", "it generates text alone")
    if request.verbosity not in (None, "medium"):
        raise not_available("verbosity", "no model of this server knows it")
    if request.response_format is not None and request.response_format != {"type": "text"}:
        raise not_available("response_format", "its engine does not have it yet")
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_value("top_logprobs", "it needs 'logprobs' to be true")
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise bad_value("max_tokens", "it cannot be set together with 'max_completion_tokens'")
    if request.max_tokens == 0:
        raise bad_value("max_tokens", "it must be at least 1")
    check_stream_options(request)


def check_stream_options(request: Generation) -> None:
    """ApiError if there are some without a stream."""
    if request.stream_options is not None and not request.stream:
        raise bad_value("stream_options", "it is only allowed when 'stream' is true")


def plain_messages(messages: list[Message]) -> list[dict[str, str]]:
    """The messages as the engine takes them. Raises ApiError for what it does not take."""
    found = []
    for i, message in enumerate(messages):
        if isinstance(message, ToolMessage) or getattr(message, "tool_calls", None):
            raise not_available(f"messages[{i}]", "its engine does not have tools yet")
        content = message.content or ""
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        found.append({"role": "system" if message.role == "developer" else message.role, "content": content})
    return found


async def chat(call: Call, request: ChatRequest) -> None:
    """Answers a chat."""
    _check(request)
    info = await call.model(request.model)
    wanted = request.max_completion_tokens or request.max_tokens
    config = config_of(request, info, wanted)
    if request.logprobs:
        config.logprobs, config.top_logprobs = True, request.top_logprobs or 0
    spec = RequestSpec(request.model, messages=plain_messages(request.messages), config=config, want_text=True)
    async with call.generate(spec) as answer:
        check_room(info, len(answer.prompt_ids), wanted,
                   "max_tokens" if request.max_tokens else "max_completion_tokens")
        choices = Choices(answer, info)
        if request.stream:
            await _Stream(call, request, info, choices).run()
        else:
            await call.reply(await _whole(call, request, info, await choices.collect()))
        call.ended(choices)


async def _whole(call: Call, request: ChatRequest, info: ModelInfo, choices: Choices) -> dict[str, Any]:
    found = []
    for choice in choices.all:
        logprobs = await _logprobs(call, request, info, choice.elements) if request.logprobs else None
        found.append({
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None, "annotations": []},
            "logprobs": logprobs,
            "finish_reason": choices.finish_reason(choice),
        })
    return {
        "id": new_id("chatcmpl-"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": found,
        "usage": usage([choices]),
        "service_tier": "default",
        "system_fingerprint": fingerprint(info),
    }


async def _logprobs(call: Call, request: ChatRequest, info: ModelInfo, elements: GeneratedElements) -> dict[str, Any]:
    tokens = await token_bytes(call.pool, info, elements)
    return {"content": chat_logprobs(elements, tokens, request.top_logprobs or 0), "refusal": None}


class _Stream:
    """Writes chunks. All that chunks share is written once; a token's cost is its text."""

    def __init__(self, call: Call, request: ChatRequest, info: ModelInfo, choices: Choices):
        self._call, self._request, self._info, self._choices = call, request, info, choices
        self._wants_usage = bool(request.stream_options and request.stream_options.include_usage)
        self._head = (f'data: {{"id":"{new_id("chatcmpl-")}","object":"chat.completion.chunk","created":{call.created},'
                      f'"model":{quoted(request.model)},"service_tier":"default",'
                      f'"system_fingerprint":"{fingerprint(info)}","choices":[')
        self._tail = ']' + (',"usage":null' if self._wants_usage else '') + '}\n\n'

    async def run(self) -> None:
        """Writes all of it."""
        call, choices = self._call, self._choices
        await call.stream()
        first = "".join(self._chunk(choice, '{"role":"assistant","content":"","refusal":null}')
                        for choice in choices.all)
        await call.write(first.encode())
        async for elements in choices.answer:
            choice = choices.take(elements)
            logprobs = "null"
            if self._request.logprobs:
                logprobs = json.dumps(await _logprobs(call, self._request, self._info, elements))
            elif not elements.text:     # a part of a character, or a special token
                continue
            await call.write(self._chunk(choice, '{"content":' + quoted(elements.text) + '}', logprobs).encode())
        last = [self._chunk(choice, "{}", reason=f'"{choices.finish_reason(choice)}"') for choice in choices.all]
        if self._wants_usage:
            last.append(f'{self._head}],"usage":{json.dumps(usage([choices]))}}}\n\n')
        await call.write("".join(last).encode() + DONE, more=False)

    def _chunk(self, choice: Choice, delta: str, logprobs: str = "null", reason: str = "null") -> str:
        return (f'{self._head}{{"index":{choice.index},"delta":{delta},"logprobs":{logprobs},'
                f'"finish_reason":{reason}}}{self._tail}')
