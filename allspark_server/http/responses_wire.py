"""The wire form of /v1/responses, and the conversion of its input to messages of a chat.

https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from .chat_wire import Effort, FunctionName, JsonFormat, JsonSchema, TextFormat
from .errors import ApiError, bad_value, not_available
from .images import Detail, FileId, ImageSource, ImageUrl, ProcessorKwargs
from .replies import function_call, function_choice
from .wire import (
    CUT,
    INT32_MAX,
    Body,
    JsonObject,
    LogitBias,
    Many,
    Metadata,
    ModelName,
    Stop,
    Stops,
    StopTokenIds,
    StructuredOutputs,
    Wire,
)

#: beginnings of the types of tools that OpenAI's servers run themselves
_HOSTED_TOOLS = ("web_search", "file_search", "code_interpreter", "image_generation")

# --- input -------------------------------------------------------------------------------------------------------


class InputText(Wire):
    """A text part of an input."""

    type: Literal["input_text"]
    text: str


class InputImage(Wire):
    """An image of an input; `file_id` names one of the client's files."""

    type: Literal["input_image"]
    image_url: str | None = None
    detail: Detail | None = None
    file_id: FileId | None = None


class OutputText(Wire):
    """A text part of an earlier answer."""

    type: Literal["output_text"]
    text: str
    annotations: Many[JsonObject] | None = None
    logprobs: Many[JsonObject] | None = None


class Refusal(Wire):
    """A refusal in an earlier answer."""

    type: Literal["refusal"]
    refusal: str


class ReasoningText(Wire):
    """A part of the reasoning of an earlier answer."""

    type: Literal["reasoning_text"]
    text: str


MessagePart = Annotated[InputText | InputImage | OutputText | Refusal, Field(discriminator="type")]
CallOutput = Annotated[InputText | InputImage, Field(discriminator="type")]
Status = Literal["in_progress", "completed", "incomplete"] | None


class MessageItem(Wire):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Many[MessagePart]
    id: str | None = None
    phase: Literal["commentary", "final_answer"] | None = None
    status: Status = None


class CallItem(Wire):
    """A tool call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: FunctionName
    arguments: str
    id: str | None = None
    status: Status = None


class CallOutputItem(Wire):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[Many[CallOutput], Field(min_length=1)]
    id: str | None = None
    status: Status = None


class ReasoningItem(Wire):
    """The reasoning of an earlier answer."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Many[JsonObject] = []
    content: Many[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: Status = None


def _kind(item: Any) -> Any:
    """The type of an item; it may be missing in a message."""
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


Item = Annotated[
    Annotated[MessageItem, Tag("message")] | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")] | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


# --- tools and text ----------------------------------------------------------------------------------------------


def _no_hosted_tool(kind: Any) -> Any:
    """Refuses the tools that OpenAI's servers run themselves, with what to do instead."""
    if kind == "mcp":
        raise ValueError("this server calls no MCP servers; let the client list their tools and call them, and pass "
                         "them as tools of type 'function'")
    if isinstance(kind, str) and kind.startswith(_HOSTED_TOOLS):
        raise ValueError("this server runs no tools itself; allowed: 'function'")
    return kind


class FunctionTool(Wire):
    """A function that the model may call."""

    type: Annotated[Literal["function"], BeforeValidator(_no_hosted_tool)]
    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class FunctionToolChoice(Wire):
    """The function that the model must call."""

    type: Literal["function"]
    name: FunctionName


class JsonSchemaFormat(JsonSchema):
    """JSON that matches a schema."""

    type: Literal["json_schema"]


class TextOptions(Wire):
    """The form of the answer's text."""

    format: Annotated[TextFormat | JsonFormat | JsonSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Wire):
    """How the model reasons."""

    effort: Effort | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(Wire):
    """Options of streams."""

    include_obfuscation: bool | None = None


class ResponsesRequest(Body):
    """A request for an answer to an input."""

    model: ModelName
    input: Annotated[str, Field(min_length=1)] | Annotated[Many[Item], Field(min_length=1, max_length=4096)]
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1, le=INT32_MAX)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: Annotated[Many[FunctionTool], Field(max_length=1024)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int | None, Field(ge=1)] = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Many[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: Annotated[
        bool | None, Field(description="`false`: the response cannot be fetched later; without `--store` none can")
    ] = None
    background: Annotated[
        bool | None, Field(description="Answer at once; the response is fetched by its id")
    ] = None
    previous_response_id: Annotated[
        str | None, Field(max_length=200, description="The response that the input continues"), CUT
    ] = None
    metadata: Metadata | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: JsonObject | None = None
    # Rejected with any value.
    conversation: Any = None
    prompt: Any = None
    access_programs: Any = None
    background_options: Any = None
    context_management: Any = None
    image: Any = None
    moderation: Any = None
    # This server's own fields, as for chats.
    thinking_token_budget: Annotated[
        int | None, Field(ge=-1, le=INT32_MAX, description="Most tokens of reasoning, which then is ended; -1: any")
    ] = None
    seed: Annotated[int | None, Field(ge=-(2**63), le=2**63 - 1)] = None
    top_k: Annotated[int | None, Field(ge=-1, le=INT32_MAX)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=100)] = None
    cache_salt: Annotated[str | None, Field(max_length=1024), CUT] = None
    priority: Annotated[int | None, Field(ge=-INT32_MAX, le=INT32_MAX)] = None
    chat_template_kwargs: JsonObject | None = None
    # vLLM's fields of responses, as for chats.
    mm_processor_kwargs: ProcessorKwargs | None = None
    stop: Stop | Stops | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: Annotated[
        bool | None, Field(description="Continue after an end-of-sequence token, up to max_output_tokens")
    ] = None
    min_tokens: Annotated[
        int | None, Field(ge=0, le=INT32_MAX, description="Fewest tokens before one that ends the answer")
    ] = None
    stop_token_ids: StopTokenIds | None = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    logit_bias: LogitBias | None = None
    skip_special_tokens: Annotated[
        bool | None, Field(description="`false`: special tokens have text, but for the one that ends the answer")
    ] = None
    structured_outputs: StructuredOutputs | None = None


# --- as messages -------------------------------------------------------------------------------------------------


def messages_of(request: ResponsesRequest, earlier: list[Item]) -> list[dict[str, Any]]:
    """The input as messages of a chat, after `earlier` items. The items of one answer (reasoning, text, calls) become
    one message. Images are as `read_images` takes them.
    """
    chat: list[dict[str, Any]] = []
    if request.instructions is not None:
        chat.append({"role": "system", "content": request.instructions})
    new = [MessageItem(role="user", content=request.input)] if isinstance(request.input, str) else request.input
    items = [*((item, "previous_response_id") for item in earlier), *((x, f"input[{i}]") for i, x in enumerate(new))]
    answer: dict[str, Any] | None = None    # the current message of the assistant
    for item, place in items:
        if isinstance(item, MessageItem) and item.role != "assistant":
            answer = None
            role = "system" if item.role == "developer" else item.role
            chat.append({"role": role, "content": _content(item.content, f"{place}.content")})
            continue
        if isinstance(item, CallOutputItem):
            answer = None
            chat.append({"role": "tool", "tool_call_id": item.call_id,
                         "content": _content(item.output, f"{place}.output")})
            continue
        if answer is None or (isinstance(item, MessageItem) and answer["content"]):
            answer = {"role": "assistant", "content": ""}
            chat.append(answer)
        if isinstance(item, MessageItem):
            answer["content"] = _content(item.content, f"{place}.content")
        elif isinstance(item, CallItem):
            answer.setdefault("tool_calls", []).append(function_call(item.call_id, item.name, item.arguments))
        elif item.encrypted_content is not None and not item.content:
            raise not_available(f"{place}.encrypted_content", "it cannot decrypt the reasoning of other servers")
        elif item.content:
            answer["reasoning_content"] = "".join(part.text for part in item.content)
    return chat


def _content(content: str | list[Any], place: str) -> str | list[dict[str, Any]]:
    """The content of an item as that of a message: a text if no part is an image."""
    if isinstance(content, str):
        return content
    if not any(isinstance(part, InputImage) for part in content):
        return "\n".join(map(_text, content))
    return [_image(part, f"{place}[{i}]") if isinstance(part, InputImage) else {"type": "text", "text": _text(part)}
            for i, part in enumerate(content)]


def _text(part: Any) -> str:
    return str(part.refusal if isinstance(part, Refusal) else part.text)


def _image(part: InputImage, place: str) -> dict[str, Any]:
    if part.file_id is not None:
        if part.image_url is not None:
            raise bad_value(f"{place}.file_id", "only one of 'image_url' and 'file_id' is allowed")
        return ImageSource.of_file(f"{place}.file_id", part.file_id, part.detail).part()
    if part.image_url is None:
        raise ApiError(400, f"Missing required parameter: '{place}.image_url'.", f"{place}.image_url",
                       "missing_required_parameter")
    return ImageSource.of_url(f"{place}.image_url", ImageUrl(url=part.image_url, detail=part.detail)).part()


def tools_of(request: ResponsesRequest) -> tuple[list[dict[str, Any]] | None, Any]:
    """The tools and tool_choice, in the form of chats."""
    tools = [{"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}
             for tool in request.tools or ()]
    choice = request.tool_choice
    return tools or None, function_choice(choice.name) if isinstance(choice, FunctionToolChoice) else choice
