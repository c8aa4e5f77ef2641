"""The wire form of /v1/messages, which is Anthropic's, and how it becomes messages of a chat."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from .chat_wire import Effort, FunctionName
from .errors import not_available
from .talk import effort_kwargs
from .wire import INT32_MAX, JsonObject, ModelName, Stop, Wire


class CacheControl(Wire):
    """Where a cached prefix may end: here any prefix is cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(Wire):
    cache_control: CacheControl | None = None


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: list[JsonObject] | None = None


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: FunctionName
    input: JsonObject


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(Wire):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ToolUseBlock | ThinkingBlock, Field(discriminator="type")]


class UserMessage(Wire):
    role: Literal["user"]
    content: str | Annotated[list[UserBlock], Field(min_length=1)]


class AssistantMessage(Wire):
    role: Literal["assistant"]
    content: str | list[AssistantBlock]


Message = Annotated[UserMessage | AssistantMessage, Field(discriminator="role")]


class Tool(Block):
    name: FunctionName
    input_schema: JsonObject
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None
    eager_input_streaming: bool | None = None


class AnyToolChoice(Wire):
    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool | None = None


class NamedToolChoice(Wire):
    type: Literal["tool"]
    name: FunctionName
    disable_parallel_tool_use: bool | None = None


class NoToolChoice(Wire):
    type: Literal["none"]


ToolChoice = Annotated[AnyToolChoice | NamedToolChoice | NoToolChoice, Field(discriminator="type")]


class ThinkingOn(Wire):
    type: Literal["enabled"]
    #: at most so many: here as many as the answer may have
    budget_tokens: Annotated[int, Field(ge=1024, le=INT32_MAX)]
    display: Literal["summarized"] | None = None


class ThinkingAdaptive(Wire):
    type: Literal["adaptive"]
    display: Literal["summarized"] | None = None


class ThinkingOff(Wire):
    type: Literal["disabled"]


Thinking = Annotated[ThinkingOn | ThinkingAdaptive | ThinkingOff, Field(discriminator="type")]


class SchemaFormat(Wire):
    type: Literal["json_schema"]
    schema_: Annotated[JsonObject, Field(alias="schema")]


class OutputConfig(Wire):
    effort: Effort | None = None
    format: SchemaFormat | None = None


class MessagesMetadata(Wire):
    user_id: Annotated[str, Field(max_length=512)] | None = None


class Prompt(Wire):
    """What counting tokens takes, too."""

    model: ModelName
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[Tool] | None, Field(max_length=1024)] = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    speed: Literal["standard"] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class MessagesRequest(Prompt):
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)]
    temperature: Annotated[float | None, Field(ge=0, le=1)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0, le=INT32_MAX)] = None
    stop_sequences: Annotated[list[Stop] | None, Field(max_length=16)] = None
    stream: bool | None = None
    metadata: MessagesMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


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


def _text(content: str | list[TextBlock] | None) -> str:
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
