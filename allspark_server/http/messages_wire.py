"""The wire form of /v1/messages, which is Anthropic's, and how it becomes messages of a chat."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Optional, Union

from pydantic import Field

from .chat_wire import Effort, FunctionName
from .errors import not_available
from .talk import effort_kwargs
from .wire import INT32_MAX, JsonObject, ModelName, Stop, Wire


class CacheControl(Wire):
    """Where a cached prefix may end: here any prefix is cached."""

    type: Literal["ephemeral"]
    ttl: Optional[Literal["5m", "1h"]] = None


class Block(Wire):
    cache_control: Optional[CacheControl] = None


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: Optional[list[JsonObject]] = None


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: FunctionName
    input: JsonObject


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Union[None, str, list[TextBlock]] = None
    is_error: Optional[bool] = None


class ThinkingBlock(Wire):
    type: Literal["thinking"]
    thinking: str
    signature: Optional[str] = None


UserBlock = Annotated[Union[TextBlock, ToolResultBlock], Field(discriminator="type")]
AssistantBlock = Annotated[Union[TextBlock, ToolUseBlock, ThinkingBlock], Field(discriminator="type")]


class UserMessage(Wire):
    role: Literal["user"]
    content: Union[str, Annotated[list[UserBlock], Field(min_length=1)]]


class AssistantMessage(Wire):
    role: Literal["assistant"]
    content: Union[str, list[AssistantBlock]]


Message = Annotated[Union[UserMessage, AssistantMessage], Field(discriminator="role")]


class Tool(Block):
    name: FunctionName
    input_schema: JsonObject
    description: Optional[str] = None
    type: Optional[Literal["custom"]] = None
    strict: Optional[bool] = None
    allowed_callers: Optional[list[Literal["direct"]]] = None
    defer_loading: Optional[Literal[False]] = None
    eager_input_streaming: Optional[bool] = None


class AnyToolChoice(Wire):
    type: Literal["auto", "any"]
    disable_parallel_tool_use: Optional[bool] = None


class NamedToolChoice(Wire):
    type: Literal["tool"]
    name: FunctionName
    disable_parallel_tool_use: Optional[bool] = None


class NoToolChoice(Wire):
    type: Literal["none"]


ToolChoice = Annotated[Union[AnyToolChoice, NamedToolChoice, NoToolChoice], Field(discriminator="type")]


class ThinkingOn(Wire):
    type: Literal["enabled"]
    #: at most so many: here as many as the answer may have
    budget_tokens: Annotated[int, Field(ge=1024, le=INT32_MAX)]
    display: Optional[Literal["summarized"]] = None


class ThinkingAdaptive(Wire):
    type: Literal["adaptive"]
    display: Optional[Literal["summarized"]] = None


class ThinkingOff(Wire):
    type: Literal["disabled"]


Thinking = Annotated[Union[ThinkingOn, ThinkingAdaptive, ThinkingOff], Field(discriminator="type")]


class SchemaFormat(Wire):
    type: Literal["json_schema"]
    schema_: Annotated[JsonObject, Field(alias="schema")]


class OutputConfig(Wire):
    effort: Optional[Effort] = None
    format: Optional[SchemaFormat] = None


class MessagesMetadata(Wire):
    user_id: Optional[Annotated[str, Field(max_length=512)]] = None


class Prompt(Wire):
    """What counting tokens takes, too."""

    model: ModelName
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    system: Union[None, str, list[TextBlock]] = None
    tools: Annotated[Optional[list[Tool]], Field(max_length=1024)] = None
    tool_choice: Optional[ToolChoice] = None
    thinking: Optional[Thinking] = None
    output_config: Optional[OutputConfig] = None
    cache_control: Optional[CacheControl] = None
    speed: Optional[Literal["standard"]] = None
    user_profile_id: Optional[str] = None
    workspace_id: Optional[str] = None


class MessagesRequest(Prompt):
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)]
    temperature: Annotated[Optional[float], Field(ge=0, le=1)] = None
    top_p: Annotated[Optional[float], Field(ge=0, le=1)] = None
    top_k: Annotated[Optional[int], Field(ge=0, le=INT32_MAX)] = None
    stop_sequences: Annotated[Optional[list[Stop]], Field(max_length=16)] = None
    stream: Optional[bool] = None
    metadata: Optional[MessagesMetadata] = None
    service_tier: Optional[Literal["auto", "standard_only"]] = None


# --- as messages of a chat ---------------------------------------------------------------------------------------


def messages_of(request: Prompt) -> list[dict[str, Any]]:
    """The prompt as messages of a chat; results of tools are messages of their own there."""
    found: list[dict[str, Any]] = []
    if request.system:
        found.append({"role": "system", "content": _text(request.system)})
    for i, message in enumerate(request.messages):
        if isinstance(message, AssistantMessage):
            found.append(_assistant(message))
        elif isinstance(message.content, str):
            found.append({"role": "user", "content": message.content})
        else:
            texts = [block for block in message.content if isinstance(block, TextBlock)]
            for block in message.content:
                if isinstance(block, ToolResultBlock):
                    found.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)})
            if texts:
                found.append({"role": "user", "content": _text(texts)})
    if found[-1]["role"] == "assistant":
        raise not_available(f"messages[{i}]", "it does not continue an assistant's message: the last must be a user's")
    return found


def _assistant(message: AssistantMessage) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    found: dict[str, Any] = {
        "role": "assistant", "content": _text([block for block in message.content if isinstance(block, TextBlock)])}
    thoughts = [block.thinking for block in message.content if isinstance(block, ThinkingBlock)]
    calls = [{"id": block.id, "type": "function",
              "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}}
             for block in message.content if isinstance(block, ToolUseBlock)]
    if thoughts:
        found["reasoning_content"] = "".join(thoughts)
    if calls:
        found["tool_calls"] = calls
    return found


def _text(content: None | str | list[TextBlock]) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content)


def options_of(request: Prompt) -> dict[str, Any]:
    """The rest of the prompt, as ChatOptions."""
    tools = [{"type": "function", "function": {
        "name": tool.name, "parameters": tool.input_schema, **({"strict": True} if tool.strict else {}),
        **({"description": tool.description} if tool.description is not None else {})}} for tool in request.tools or ()]
    choice, parallel = None, None
    if tools and request.tool_choice is not None:
        given = request.tool_choice
        if isinstance(given, NamedToolChoice):
            choice = {"type": "function", "function": {"name": given.name}}
        else:
            choice = {"auto": "auto", "any": "required", "none": "none"}[given.type]
        parallel = False if getattr(given, "disable_parallel_tool_use", None) else None
    kwargs = effort_kwargs(request.output_config.effort if request.output_config is not None else None)
    if request.thinking is not None and request.thinking.type != "adaptive":
        kwargs["enable_thinking"] = request.thinking.type == "enabled"
    return {"tools": tools or None, "tool_choice": choice, "parallel_tool_calls": parallel,
            "chat_template_kwargs": kwargs or None}


def response_format_of(request: Prompt) -> dict[str, Any] | None:
    """What the answer must be, as chats have it."""
    if request.output_config is None or request.output_config.format is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": request.output_config.format.schema_}}
