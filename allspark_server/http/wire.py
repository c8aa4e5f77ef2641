"""What the wire's models share: strict types, and the fields of every request that generates."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import from_validation

INT64_MAX = 2**63 - 1
INT32_MAX = 2**31 - 1


class Wire(BaseModel):
    """A message: no conversions ("1" is no number), no unknown fields, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


Message = TypeVar("Message", bound=Wire)


def parse(kind: type[Message], body: bytes) -> Message:
    """The message of a body. Raises ApiError naming the field that is wrong. Within messages and items, unknown fields
    that are null count as absent: clients send answers back with all that their types know.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        try:
            if (rest := _without_nulls(error, body)) is not None:
                return kind.model_validate_json(rest)
        except ValidationError as second:
            error, body = second, rest
        raise from_validation(error, body) from None


def _without_nulls(error: ValidationError, body: bytes) -> bytes | None:
    """The body without unknown fields that are null, below its own; None if there are none."""
    nulls = [problem["loc"] for problem in error.errors(include_url=False)
             if problem["type"] == "extra_forbidden" and problem["input"] is None and len(problem["loc"]) > 1]
    if not nulls:
        return None
    value = json.loads(body)
    for *path, name in nulls:
        at = value
        for part in path:   # the names of alternatives are no part of the value
            at = at[part] if isinstance(part, int) else at.get(part, at) if isinstance(at, dict) else at
        if isinstance(at, dict):
            at.pop(name, None)
    return json.dumps(value).encode()


class StreamOptions(Wire):
    include_usage: bool | None = None
    #: OpenAI pads its chunks against those who measure their lengths; nothing is padded here
    include_obfuscation: bool | None = None


JsonObject = dict[str, Any]
ModelName = Annotated[str, Field(min_length=1, max_length=1024)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Metadata = Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)]


class Generation(Wire):
    """OpenAI's fields that chat and completions share, and this server's own, in GenerateConfig's spelling. What is
    absent or null has the checkpoint's own value, where that has one, or OpenAI's.
    """

    model: ModelName
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    n: Annotated[int | None, Field(ge=1, le=128)] = None
    seed: Annotated[int | None, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    logit_bias: Annotated[
        dict[Annotated[str, Field(max_length=10)], Annotated[float, Field(ge=-100, le=100)]] | None,
        Field(max_length=1024),
    ] = None
    max_tokens: Annotated[int | None, Field(ge=0, le=INT32_MAX)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    #: only noted by OpenAI for its own purposes, and not at all here
    user: str | None = None

    top_k: Annotated[
        int | None, Field(ge=-1, le=INT32_MAX, description="Among how many tokens to draw; 0 and -1: all")
    ] = None
    min_p: Annotated[
        float | None, Field(ge=0, le=1, description="Least probability, as a part of the likeliest token's")
    ] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=100)] = None
    ignore_eos: Annotated[
        bool | None, Field(description="Go on after an end-of-sequence token, up to the wanted length")
    ] = None
    cache_salt: Annotated[
        str | None,
        Field(max_length=1024, description="Cached prefixes are shared among requests of one salt only"),
    ] = None
    priority: Annotated[
        int | None, Field(ge=-INT32_MAX, le=INT32_MAX, description="Higher goes first; 30 s of waiting a level")
    ] = None
    guided_json: Annotated[
        JsonObject | None, Field(description="The answer is JSON of this schema, as by 'response_format'")
    ] = None
    guided_regex: Annotated[str | None, Field(min_length=1)] = None
    guided_choice: Annotated[list[str] | None, Field(min_length=1, max_length=4096)] = None
    guided_grammar: Annotated[str | None, Field(min_length=1, description="Lark, or EBNF")] = None


