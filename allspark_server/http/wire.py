"""What the wire forms share: strict types, and the fields of requests that generate."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import from_validation

INT64_MAX = 2**63 - 1
INT32_MAX = 2**31 - 1


class Wire(BaseModel):
    """Base of the wire forms: no conversions ("1" is not a number), no unknown fields, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


Message = TypeVar("Message", bound=Wire)


def parse(kind: type[Message], body: bytes) -> Message:
    """A body as a message. Raises ApiError naming the field that is wrong.

    Unknown fields below the top level are ignored if they are null: clients send answers back with all the fields of
    their own types.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        rest = _without_nulls(error, body)
        if rest is None:
            raise from_validation(error, body) from None
    try:
        return kind.model_validate_json(rest)
    except ValidationError as error:
        raise from_validation(error, rest) from None


def _without_nulls(error: ValidationError, body: bytes) -> bytes | None:
    """The body without unknown fields that are null, below the top level; None if it has none."""
    nulls = [problem["loc"] for problem in error.errors(include_url=False)
             if problem["type"] == "extra_forbidden" and problem["input"] is None and len(problem["loc"]) > 1]
    if not nulls:
        return None
    value = json.loads(body)
    for *path, name in nulls:
        at = value
        for part in path:   # skips the names of a union's alternatives
            at = at[part] if isinstance(part, int) else at.get(part, at) if isinstance(at, dict) else at
        if isinstance(at, dict):
            at.pop(name, None)
    return json.dumps(value).encode()


class StreamOptions(Wire):
    """OpenAI's options of streams."""

    include_usage: bool | None = None
    #: OpenAI pads chunks to hide their lengths; this server does not
    include_obfuscation: bool | None = None


JsonObject = dict[str, Any]
ModelName = Annotated[str, Field(min_length=1, max_length=1024)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Metadata = Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)]


class Generation(Wire):
    """Fields of chats and completions: OpenAI's, and this server's own in GenerateConfig's spelling.

    A field that is missing or null has the checkpoint's recommended value if there is one, otherwise OpenAI's default.
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
    #: ignored
    user: str | None = None

    top_k: Annotated[
        int | None, Field(ge=-1, le=INT32_MAX, description="Number of most likely tokens to sample from; 0 and -1: all")
    ] = None
    min_p: Annotated[
        float | None, Field(ge=0, le=1, description="Least probability, relative to that of the most likely token")
    ] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=100)] = None
    ignore_eos: Annotated[
        bool | None, Field(description="Continue after an end-of-sequence token, up to max_tokens")
    ] = None
    cache_salt: Annotated[
        str | None,
        Field(max_length=1024, description="Cached prefixes are shared only between requests with the same salt"),
    ] = None
    priority: Annotated[
        int | None, Field(ge=-INT32_MAX, le=INT32_MAX, description="Higher first; a level is worth 30 s of waiting")
    ] = None
    guided_json: Annotated[
        JsonObject | None, Field(description="A JSON schema of the answer, as in 'response_format'")
    ] = None
    guided_regex: Annotated[str | None, Field(min_length=1)] = None
    guided_choice: Annotated[list[str] | None, Field(min_length=1, max_length=4096)] = None
    guided_grammar: Annotated[str | None, Field(min_length=1, description="Lark, or EBNF")] = None


