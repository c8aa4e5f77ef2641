"""What the wire forms share: strict types, bounds, and the fields of requests that generate.

Nothing that a body may hold makes its validation slow: `bodies.py` bounds the number of values and containers, each
list and dict ends at its first wrong entry, and each object has at most one unknown field. So a body has at most about
as many errors as its form has fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    model_validator,
)

from allspark_client.generate_checks import MAX_STOPS
from allspark_server.json_structure import MAX_CONTAINERS

from .errors import from_validation, invalid_json

INT64_MAX = 2**63 - 1
INT32_MAX = 2**31 - 1
_MOST_IGNORED, _LONGEST_NAME = 10, 40   # names of unknown fields in a header, and characters of each


@dataclass
class UnknownFields:
    """What becomes of unknown fields of a body: they are refused, or ignored. `ignored`: their names, at most ten."""

    refused: bool = True
    ignored: list[str] = field(default_factory=list)

    def ignore(self, name: str) -> None:
        """Notes the name of an ignored field, as far as a header can hold it."""
        if len(self.ignored) < _MOST_IGNORED:
            self.ignored.append(re.sub(r"[^\w.-]", "?", name[:_LONGEST_NAME], flags=re.ASCII))


class Wire(BaseModel):
    """Base of the wire forms: no conversions ("1" is not a number), no unknown fields, no NaN.

    Unknown fields of the body are ignored if the validation's context, UnknownFields, says so. Those below it are
    ignored if they are null: clients send answers back with all the fields of their own types.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
    _names: ClassVar[frozenset[str]] = frozenset()
    _top: ClassVar[bool] = False

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """As pydantic's; notes the names of the fields."""
        cls._names = frozenset(field.alias or name for name, field in cls.model_fields.items())

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, value: Any, info: ValidationInfo) -> Any:
        """Keeps one unknown field, for the error, or none: each costs microseconds."""
        if not isinstance(value, dict) or value.keys() <= cls._names:
            return value
        unknown: UnknownFields = info.context or UnknownFields()
        known = {name: inner for name, inner in value.items() if name in cls._names}
        for name, inner in value.items():
            if name in cls._names:
                continue
            if cls._top and not unknown.refused:
                unknown.ignore(name)
            elif inner is not None or cls._top:
                return {**known, name: inner}
        return known


class Body(Wire):
    """Base of the forms of whole bodies."""

    _top: ClassVar[bool] = True

    @model_validator(mode="wrap")
    @classmethod
    def _named_errors(cls, value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            raise from_validation(error, value) from None


Form = TypeVar("Form", bound=Body)


def parse(form: type[Form], body: bytes, unknown: UnknownFields | None = None) -> Form:
    """A body as a form. Raises ApiError naming the field that is wrong. `unknown`: None refuses unknown fields."""
    try:
        return form.model_validate_json(body, context=unknown)
    except ValidationError as error:
        raise invalid_json(error) from None


T = TypeVar("T")
#: a list that is checked up to its first wrong item
Many = Annotated[list[T], Field(max_length=MAX_CONTAINERS, fail_fast=True)]


def _one_by_one(value: Any, handler: Callable[[Any], Any]) -> Any:
    """Checks the entries of a dict up to the first wrong one."""
    if isinstance(value, dict):
        for name, inner in value.items():
            handler({name: inner})
    return handler(value)


#: for dicts with typed entries: Annotated[dict[…], FirstError]
FirstError = WrapValidator(_one_by_one)


class StreamOptions(Wire):
    """OpenAI's options of streams."""

    include_usage: bool | None = None
    continuous_usage_stats: Annotated[
        bool | None, Field(description="With `include_usage`: each chunk has the usage so far")
    ] = None
    #: OpenAI pads chunks to hide their lengths; this server does not
    include_obfuscation: bool | None = None


def _cut(value: Any) -> Any:
    """Shortens a text that is too long in any case: pydantic makes UTF-8 of it to count, 35 ms for 16 MiB."""
    return value[:_MAX_EXPRESSION + 1] if isinstance(value, str) else value


_MAX_EXPRESSION = 1 << 20       # characters, as on the wire to the pool
JsonObject = dict[str, Any]
#: after the limit of a text, which is at most _MAX_EXPRESSION
CUT = BeforeValidator(_cut)
#: a regular expression, a grammar or the text of a schema
Expression = Annotated[str, Field(min_length=1, max_length=_MAX_EXPRESSION), CUT]
ModelName = Annotated[str, Field(min_length=1, max_length=1024), CUT]
Stop = Annotated[str, Field(min_length=1, max_length=1024), CUT]
#: OpenAI takes 4, but clients of other servers send more: Continue 12 to complete code with Qwen, lm_eval what its
#: task has
Stops = Annotated[Many[Stop], Field(max_length=MAX_STOPS)]
Metadata = Annotated[dict[str, Annotated[str, Field(max_length=512), CUT]], Field(max_length=16), FirstError]

LogitBias = Annotated[
    dict[Annotated[str, Field(max_length=10), CUT], Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024),
    FirstError,
]
StopTokenIds = Annotated[
    Many[Annotated[int, Field(ge=0, le=INT32_MAX)]],
    Field(max_length=256, description="Token ids that end the answer, beside the model's own"),
]


class StructuredOutputs(Wire):
    """vLLM's field for constrained answers: one of its fields is given."""

    json_: Annotated[JsonObject | Expression | None,
                     Field(alias="json", description="A JSON schema")] = None
    regex: Expression | None = None
    choice: Annotated[Many[str], Field(min_length=1, max_length=4096)] | None = None
    grammar: Annotated[Expression | None, Field(description="Lark, or EBNF")] = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None


class CustomParams(Wire):
    """SGLang's parameters of its own processors of logits."""

    thinking_budget: Annotated[int | None, Field(ge=-1, le=INT32_MAX)] = None


class Generation(Body):
    """Fields of chats and completions: OpenAI's, and this server's own in GenerateConfig's spelling.

    A field that is missing or null has the checkpoint's recommended value if there is one, otherwise OpenAI's default.
    """

    model: ModelName
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    n: Annotated[int | None, Field(ge=1, le=128)] = None
    seed: Annotated[int | None, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] = None
    stop: Stop | Stops | None = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    logit_bias: LogitBias | None = None
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
        Field(max_length=1024, description="Cached prefixes are shared only between requests with the same salt"), CUT,
    ] = None
    priority: Annotated[
        int | None, Field(ge=-INT32_MAX, le=INT32_MAX, description="Higher first; a level is worth 30 s of waiting")
    ] = None
    guided_json: Annotated[
        JsonObject | None, Field(description="A JSON schema of the answer, as in 'response_format'")
    ] = None
    guided_regex: Expression | None = None
    guided_choice: Annotated[Many[str], Field(min_length=1, max_length=4096)] | None = None
    guided_grammar: Annotated[Expression | None, Field(description="Lark, or EBNF")] = None
    structured_outputs: StructuredOutputs | None = None
    min_tokens: Annotated[
        int | None, Field(ge=0, le=INT32_MAX, description="Fewest tokens before one that ends the answer")
    ] = None
    stop_token_ids: StopTokenIds | None = None
    return_token_ids: Annotated[
        bool | None, Field(description="Add `prompt_token_ids`, and to each choice `token_ids`")
    ] = None
    thinking_token_budget: Annotated[
        int | None, Field(ge=-1, le=INT32_MAX, description="Most tokens of reasoning, which then is ended; -1: any")
    ] = None
    thinking_budget: Annotated[
        int | None, Field(ge=-1, le=INT32_MAX, description="Qwen's name of `thinking_token_budget`")
    ] = None
    thinking_budget_tokens: Annotated[
        int | None, Field(ge=-1, le=INT32_MAX, description="llama-server's name of `thinking_token_budget`")
    ] = None
    custom_params: Annotated[
        CustomParams | None, Field(description="SGLang's: its `thinking_budget` is `thinking_token_budget`")
    ] = None
    bad_words: Annotated[
        Many[Stop] | None, Field(max_length=64, description="Words that are not generated")
    ] = None
    allowed_token_ids: Annotated[
        Many[Annotated[int, Field(ge=0, le=INT32_MAX)]] | None,
        Field(min_length=1, max_length=4096, description="Only these tokens are generated; an end only if it is one"),
    ] = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: Annotated[
        bool | None, Field(description="`false`: special tokens have text, but for the one that ends the answer")
    ] = None
    #: ignored
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[
        int | None, Field(ge=-1, le=INT32_MAX,
                          description="Only so many tokens at the end of the prompt are used; -1: as many as fit")
    ] = None
    prompt_logprobs: Annotated[
        int | None, Field(ge=0, le=20, description="Log probabilities of the prompt's tokens, and of so many others")
    ] = None


