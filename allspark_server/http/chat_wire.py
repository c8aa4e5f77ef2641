"""The wire form of /v1/chat/completions: messages, tools and response formats.

https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from .images import FileId, ImageSource, ImageUrl, ProcessorKwargs, VideoUrl
from .wire import CUT, INT32_MAX, Expression, Generation, JsonObject, Many, Metadata, Wire

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]+$", min_length=1, max_length=128), CUT]


# --- messages ----------------------------------------------------------------------------------------------------


class TextPart(Wire):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class ImagePart(Wire):
    """An image in a message."""

    type: Literal["image_url"]
    image_url: ImageUrl | str


class VideoPart(Wire):
    """A video in a message."""

    type: Literal["video_url"]
    video_url: VideoUrl | str


class FileReference(Wire):
    """One of the client's files, which must be an image."""

    file_id: FileId
    filename: str | None = None


class FilePart(Wire):
    """An uploaded image in a message."""

    type: Literal["file"]
    file: FileReference


class RefusalPart(Wire):
    """A refusal in a message of the assistant."""

    type: Literal["refusal"]
    refusal: str


Seen = Annotated[TextPart | ImagePart | FilePart | VideoPart, Field(discriminator="type")]
Part = Annotated[TextPart | ImagePart | FilePart | VideoPart | RefusalPart, Field(discriminator="type")]
Content = str | Annotated[Many[Seen], Field(min_length=1)]


class SystemMessage(Wire):
    """Instructions to the model."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Wire):
    """A message of the user."""

    role: Literal["user"]
    content: Content
    name: str | None = None


class CalledFunction(Wire):
    """The function of a tool call; `arguments` is JSON."""

    name: FunctionName
    arguments: str


class ToolCall(Wire):
    """A tool call of the assistant."""

    id: str
    type: Literal["function"]
    function: CalledFunction
    #: the number that a stream gave it, which clients that join chunks send back
    index: Annotated[int | None, Field(ge=0, le=INT32_MAX)] = None


class AssistantMessage(Wire):
    """An answer that a client sends back; it has all the fields of this server's answers."""

    role: Literal["assistant"]
    content: str | Annotated[Many[Part], Field(min_length=1)] | None = None
    name: str | None = None
    tool_calls: Annotated[Many[ToolCall], Field(max_length=1024)] | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    function_call: None = None
    audio: None = None
    annotations: Many[JsonObject] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> AssistantMessage:
        if self.content is None and not self.tool_calls and self.refusal is None and self.reasoning_content is None:
            raise ValueError("must have content or tool_calls")
        return self


class ToolMessage(Wire):
    """The result of a tool call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]
Messages = Annotated[Many[Message], Field(min_length=1, max_length=4096)]


def _plain_part(place: str, part: Part) -> dict[str, Any]:
    if isinstance(part, ImagePart):
        return ImageSource.of_url(f"{place}.image_url", part.image_url).part()
    if isinstance(part, FilePart):
        return ImageSource.of_file(f"{place}.file.file_id", part.file.file_id).part()
    if isinstance(part, VideoPart):
        return ImageSource.of_video(f"{place}.video_url", part.video_url).part()
    return part.model_dump()


def plain_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages in the form of chat templates, with images as `read_images` takes them."""
    plain_chat = []
    for i, message in enumerate(messages):
        plain = message.model_dump(exclude_none=True, exclude={
            "content": True, "refusal": True, "annotations": True, "tool_calls": {"__all__": {"index"}}})
        if isinstance(message.content, list):
            plain["content"] = [_plain_part(f"messages[{i}].content[{j}]", part)
                                for j, part in enumerate(message.content)]
        elif message.content is not None:
            plain["content"] = message.content
        if message.role == "developer":     # templates know only the older name
            plain["role"] = "system"
        if message.role == "assistant":
            plain.setdefault("content", message.refusal or "")
        plain_chat.append(plain)
    return plain_chat


# --- tools and formats -------------------------------------------------------------------------------------------


class Function(Wire):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    #: forced calls follow the schema in any case
    strict: bool | None = None


class Tool(Wire):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


def plain_tools(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    """Tools in the form of chat templates; None if there are none."""
    return [tool.model_dump(exclude_none=True) for tool in tools or ()] or None


class FunctionChoice(Wire):
    """The name of the function that the model must call."""

    name: FunctionName


class ToolChoice(Wire):
    """The tool that the model must call."""

    type: Literal["function"]
    function: FunctionChoice


class TextFormat(Wire):
    """Any text."""

    type: Literal["text"]


class JsonFormat(Wire):
    """A JSON object."""

    type: Literal["json_object"]


class JsonSchema(Wire):
    """A named JSON schema."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$"), CUT]
    description: str | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None


class JsonSchemaFormat(Wire):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class RegexFormat(Wire):
    """Text that matches a regular expression."""

    type: Literal["regex"]
    regex: Expression


class GrammarFormat(Wire):
    """Text that a grammar derives."""

    type: Literal["grammar"]
    grammar: Expression
    syntax: Literal["lark", "ebnf"] | None = None


class ChoiceFormat(Wire):
    """One of several strings."""

    type: Literal["choice"]
    choice: Annotated[Many[str], Field(min_length=1, max_length=4096)]


#: the first three are OpenAI's, the others this server's own
ResponseFormat = Annotated[
    TextFormat | JsonFormat | JsonSchemaFormat | RegexFormat | GrammarFormat | ChoiceFormat,
    Field(discriminator="type"),
]


class Prediction(Wire):
    """A text that the answer is expected to resemble."""

    type: Literal["content"]
    content: str | Annotated[Many[TextPart], Field(min_length=1)]


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(Generation):
    """A request for an answer to a chat."""

    messages: Messages
    max_completion_tokens: Annotated[int | None, Field(ge=1, le=INT32_MAX)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    tools: Annotated[Many[Tool], Field(min_length=1, max_length=1024)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: Annotated[
        JsonObject | None, Field(description="Variables for the checkpoint's chat template")
    ] = None
    chat_template: Annotated[
        Expression | None, Field(description="A template in place of the model's, if the server allows that")
    ] = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: Annotated[
        bool | None, Field(description="`false`: the prompt ends with the last message")
    ] = None
    continue_final_message: Annotated[
        bool | None, Field(description="The answer continues the last message, which is the assistant's")
    ] = None
    timings_per_token: Annotated[
        bool | None, Field(description="llama-server's: the answer, of a stream its last chunk, has `timings`")
    ] = None
    mm_processor_kwargs: Annotated[
        ProcessorKwargs | None,
        Field(description="vLLM's: the least and most pixels of images, and the fps of videos, that set none")
    ] = None
    modalities: Many[Literal["text", "audio"]] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    # Rejected with any value.
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None
    moderation: Any = None
    prediction: Prediction | None = None
    # OpenAI's fields for storage, billing and speed. They have no effect.
    store: bool | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: JsonObject | None = None
