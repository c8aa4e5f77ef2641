"""The wire form of /v1/responses: its request, and how its input becomes messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Optional

from pydantic import Discriminator, Field, Tag

from .chat_wire import Effort, FunctionName, JsonFormat, JsonSchema, TextFormat
from .errors import not_available
from .wire import INT32_MAX, JsonObject, Metadata, ModelName, Wire

# --- input -------------------------------------------------------------------------------------------------------


class InputText(Wire):
    type: Literal["input_text"]
    text: str


class OutputText(Wire):
    type: Literal["output_text"]
    text: str
    annotations: list[JsonObject] | None = None
    logprobs: list[JsonObject] | None = None


class Refusal(Wire):
    type: Literal["refusal"]
    refusal: str


class ReasoningText(Wire):
    type: Literal["reasoning_text"]
    text: str


MessagePart = Annotated[InputText | OutputText | Refusal, Field(discriminator="type")]
Status = Optional[Literal["in_progress", "completed", "incomplete"]]


class MessageItem(Wire):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[MessagePart]
    id: str | None = None
    phase: Literal["commentary", "final_answer"] | None = None
    status: Status = None


class CallItem(Wire):
    type: Literal["function_call"]
    call_id: str
    name: FunctionName
    arguments: str
    id: str | None = None
    status: Status = None


class CallOutputItem(Wire):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[InputText], Field(min_length=1)]
    id: str | None = None
    status: Status = None


class ReasoningItem(Wire):
    type: Literal["reasoning"]
    id: str | None = None
    summary: list[JsonObject] = []
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: Status = None


def _kind(item: Any) -> Any:
    """Of an item; a message need not say that it is one."""
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


Item = Annotated[
    Annotated[MessageItem, Tag("message")] | Annotated[CallItem, Tag("function_call")] | Annotated[CallOutputItem, Tag("function_call_output")] | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


# --- tools and text ----------------------------------------------------------------------------------------------


class FunctionTool(Wire):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class FunctionToolChoice(Wire):
    type: Literal["function"]
    name: FunctionName


class JsonSchemaFormat(JsonSchema):
    type: Literal["json_schema"]


class TextOptions(Wire):
    format: Annotated[TextFormat | JsonFormat | JsonSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Wire):
    effort: Effort | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(Wire):
    include_obfuscation: bool | None = None


class ResponsesRequest(Wire):
    model: ModelName
    input: Annotated[str, Field(min_length=1)] | Annotated[list[Item], Field(min_length=1, max_length=4096)]
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1, le=INT32_MAX)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: Annotated[list[FunctionTool] | None, Field(max_length=1024)] = None
    tool_choice: Literal["none", "auto", "required"] | FunctionToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int | None, Field(ge=1)] = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    #: nothing is stored, and the answer says so
    store: bool | None = None
    metadata: Metadata | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: JsonObject | None = None
    # Refused by name, whatever they hold.
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None
    access_programs: Any = None
    background_options: Any = None
    context_management: Any = None
    image: Any = None
    moderation: Any = None
    # This server's own, as for chats.
    seed: Annotated[int | None, Field(ge=-(2**63), le=2**63 - 1)] = None
    top_k: Annotated[int | None, Field(ge=-1, le=INT32_MAX)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=100)] = None
    cache_salt: Annotated[str | None, Field(max_length=1024)] = None
    priority: Annotated[int | None, Field(ge=-INT32_MAX, le=INT32_MAX)] = None
    chat_template_kwargs: JsonObject | None = None


# --- as messages -------------------------------------------------------------------------------------------------


def messages_of(request: ResponsesRequest) -> list[dict[str, Any]]:
    """The input as messages of a chat. What one answer consisted of (reasoning, text, calls) is one message again."""
    found: list[dict[str, Any]] = []
    if request.instructions is not None:
        found.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*found, {"role": "user", "content": request.input}]
    answer: dict[str, Any] | None = None    # the assistant's, while it goes on
    for i, item in enumerate(request.input):
        if isinstance(item, MessageItem) and item.role != "assistant":
            answer = None
            role = "system" if item.role == "developer" else item.role
            found.append({"role": role, "content": _text(item.content)})
            continue
        if isinstance(item, CallOutputItem):
            answer = None
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            continue
        if answer is None or (isinstance(item, MessageItem) and answer["content"]):
            answer = {"role": "assistant", "content": ""}
            found.append(answer)
        if isinstance(item, MessageItem):
            answer["content"] = _text(item.content)
        elif isinstance(item, CallItem):
            function = {"name": item.name, "arguments": item.arguments}
            answer.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        elif item.encrypted_content is not None and not item.content:
            raise not_available(f"input[{i}].encrypted_content", "it has no key for what others encrypted")
        elif item.content:
            answer["reasoning_content"] = "".join(part.text for part in item.content)
    return found


def _text(content: str | list[Any]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.refusal if isinstance(part, Refusal) else part.text for part in content)


def tools_of(request: ResponsesRequest) -> tuple[list[dict[str, Any]] | None, Any]:
    """Tools and the choice of one, as chats have them."""
    tools = [{"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}
             for tool in request.tools or ()]
    choice = request.tool_choice
    if isinstance(choice, FunctionToolChoice):
        choice = {"type": "function", "function": {"name": choice.name}}
    return tools or None, choice
