"""The wire form of /v1/messages, and its conversion to messages of a chat.

https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .chat_wire import Effort, FunctionName
from .errors import not_available
from .images import FileId, ImageSource
from .replies import effort_kwargs, function_call, function_choice
from .wire import CUT, INT32_MAX, Body, JsonObject, Many, ModelName, Stop, Wire


class CacheControl(Wire):
    """Where a cached prefix may end. It has no effect: every prefix is cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(Wire):
    """A part of a message, or a tool."""

    cache_control: CacheControl | None = None


class TextBlock(Block):
    """A text part of a message."""

    type: Literal["text"]
    text: str
    citations: Many[JsonObject] | None = None


class Base64Source(Wire):
    """An image itself."""

    type: Literal["base64"]
    media_type: Literal["image/png", "image/jpeg", "image/webp", "image/gif"]
    data: str


class UrlSource(Wire):
    """Where an image is."""

    type: Literal["url"]
    url: str


class FileSource(Wire):
    """One of the client's files (/v1/files), which must be an image."""

    type: Literal["file"]
    file_id: FileId


class ImageBlock(Block):
    """An image of a message."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource | FileSource, Field(discriminator="type")]


class ToolUseBlock(Block):
    """A tool call of the assistant."""

    type: Literal["tool_use"]
    id: str
    name: FunctionName
    input: JsonObject


SeenBlock = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]


class ToolResultBlock(Block):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Many[SeenBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(Wire):
    """The assistant's reasoning."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


UserBlock = Annotated[TextBlock | ImageBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ToolUseBlock | ThinkingBlock, Field(discriminator="type")]


class UserMessage(Wire):
    """A message of the user."""

    role: Literal["user"]
    content: str | Annotated[Many[UserBlock], Field(min_length=1)]


class AssistantMessage(Wire):
    """A message of the assistant."""

    role: Literal["assistant"]
    content: str | Many[AssistantBlock]


Message = Annotated[UserMessage | AssistantMessage, Field(discriminator="role")]


class Tool(Block):
    """A tool that the model may call."""

    name: FunctionName
    input_schema: JsonObject
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    allowed_callers: Many[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None
    eager_input_streaming: bool | None = None


class AnyToolChoice(Wire):
    """The model may (auto) or must (any) call a tool."""

    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool | None = None


class NamedToolChoice(Wire):
    """The model must call this tool."""

    type: Literal["tool"]
    name: FunctionName
    disable_parallel_tool_use: bool | None = None


class NoToolChoice(Wire):
    """The model must not call a tool."""

    type: Literal["none"]


ToolChoice = Annotated[AnyToolChoice | NamedToolChoice | NoToolChoice, Field(discriminator="type")]


class ThinkingOn(Wire):
    """Reasoning is on."""

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=1024, le=INT32_MAX, description="Most tokens of reasoning")]
    display: Literal["summarized"] | None = None


class ThinkingAdaptive(Wire):
    """The model decides whether to reason."""

    type: Literal["adaptive"]
    display: Literal["summarized"] | None = None


class ThinkingOff(Wire):
    """Reasoning is off."""

    type: Literal["disabled"]


Thinking = Annotated[ThinkingOn | ThinkingAdaptive | ThinkingOff, Field(discriminator="type")]


class SchemaFormat(Wire):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[JsonObject, Field(alias="schema")]


class OutputConfig(Wire):
    """The form of the answer, and the effort of reasoning."""

    effort: Effort | None = None
    format: SchemaFormat | None = None


class MessagesMetadata(Wire):
    """Metadata, without effect."""

    user_id: Annotated[str, Field(max_length=512), CUT] | None = None


def _texts_alone(system: Any) -> Any:
    """Refuses images in the system prompt, as Anthropic's API does, with what to do instead."""
    if isinstance(system, list) and any(isinstance(block, dict) and block.get("type") == "image" for block in system):
        raise ValueError("the system prompt is text; put images into a message of the role 'user'")
    return system


class Prompt(Body):
    """The fields that count_tokens has, too."""

    model: ModelName
    messages: Annotated[Many[Message], Field(min_length=1, max_length=4096)]
    system: Annotated[str | Many[TextBlock] | None, BeforeValidator(_texts_alone)] = None
    tools: Annotated[Many[Tool], Field(max_length=1024)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    speed: Literal["standard"] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    # Rejected unless it is empty.
    mcp_servers: Annotated[Many[JsonObject], Field(max_length=64)] | None = None


class MessagesRequest(Prompt):
    """A request for an answer to a chat."""

    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)]
    temperature: Annotated[float | None, Field(ge=0, le=1)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0, le=INT32_MAX)] = None
    stop_sequences: Annotated[Many[Stop], Field(max_length=16)] | None = None
    stream: bool | None = None
    metadata: MessagesMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


# --- as messages of a chat ---------------------------------------------------------------------------------------


def messages_of(request: Prompt) -> list[dict[str, Any]]:
    """The prompt as messages of a chat, in which each tool result is a message of its own; images are as `read_images`
    takes them.
    """
    chat: list[dict[str, Any]] = []
    if request.system:
        chat.append({"role": "system", "content": _text(request.system)})
    for i, message in enumerate(request.messages):
        if isinstance(message, AssistantMessage):
            chat.append(_assistant(message))
        elif isinstance(message.content, str):
            chat.append({"role": "user", "content": message.content})
        else:
            shown: dict[str, TextBlock | ImageBlock] = {}   # by place
            for j, block in enumerate(message.content):
                place = f"messages[{i}].content[{j}]"
                if isinstance(block, ToolResultBlock):
                    parts = block.content if isinstance(block.content, list) else []
                    content = _content({f"{place}.content[{k}]": part for k, part in enumerate(parts)})
                    chat.append({"role": "tool", "tool_call_id": block.tool_use_id,
                                 "content": block.content if isinstance(block.content, str) else content})
                else:
                    shown[place] = block
            if shown:
                chat.append({"role": "user", "content": _content(shown)})
    if chat[-1]["role"] == "assistant":
        raise not_available(f"messages[{len(request.messages) - 1}]",
                            "it does not continue an assistant's message: the last must be a user's")
    return chat


def _assistant(message: AssistantMessage) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    plain: dict[str, Any] = {
        "role": "assistant", "content": _text([block for block in message.content if isinstance(block, TextBlock)])}
    thoughts = [block.thinking for block in message.content if isinstance(block, ThinkingBlock)]
    calls = [function_call(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
             for block in message.content if isinstance(block, ToolUseBlock)]
    if thoughts:
        plain["reasoning_content"] = "".join(thoughts)
    if calls:
        plain["tool_calls"] = calls
    return plain


def _text(content: str | list[TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content)


def _content(blocks: dict[str, TextBlock | ImageBlock]) -> str | list[dict[str, Any]]:
    """Blocks, by their places, as the content of a message: a text if none is an image."""
    texts = [block for block in blocks.values() if isinstance(block, TextBlock)]
    if len(texts) == len(blocks):
        return _text(texts)
    parts = []
    for place, block in blocks.items():
        if isinstance(block, TextBlock):
            parts.append({"type": "text", "text": block.text})
        elif isinstance(block.source, UrlSource):
            parts.append(ImageSource(f"{place}.source.url", block.source.url).part())
        elif isinstance(block.source, FileSource):
            parts.append(ImageSource.of_file(f"{place}.source.file_id", block.source.file_id).part())
        else:
            parts.append(ImageSource(f"{place}.source.data", base64=block.source.data).part())
    return parts


def options_of(request: Prompt) -> dict[str, Any]:
    """The fields of ChatOptions that the prompt sets."""
    tools = [{"type": "function", "function": {
        "name": tool.name, "parameters": tool.input_schema, **({"strict": True} if tool.strict else {}),
        **({"description": tool.description} if tool.description is not None else {})}} for tool in request.tools or ()]
    choice: str | dict[str, Any] | None = None
    parallel = None
    if tools and request.tool_choice is not None:
        given = request.tool_choice
        if isinstance(given, NamedToolChoice):
            choice = function_choice(given.name)
        else:
            choice = {"auto": "auto", "any": "required", "none": "none"}[given.type]
        parallel = False if getattr(given, "disable_parallel_tool_use", None) else None
    kwargs = effort_kwargs(request.output_config.effort if request.output_config is not None else None)
    if request.thinking is not None and request.thinking.type != "adaptive":
        kwargs["enable_thinking"] = request.thinking.type == "enabled"
    return {"tools": tools or None, "tool_choice": choice, "parallel_tool_calls": parallel,
            "chat_template_kwargs": kwargs or None}


def response_format_of(request: Prompt) -> dict[str, Any] | None:
    """The response format of the answer, in the form of chats; None for any text."""
    if request.output_config is None or request.output_config.format is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": request.output_config.format.schema_}}
