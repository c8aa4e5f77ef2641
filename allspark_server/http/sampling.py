"""From the fields of a request to a GenerateConfig."""

from __future__ import annotations

from typing import Any

from allspark_client.config import GenerateConfig
from allspark_client.types import ModelInfo

from .errors import NAMES, ApiError, bad_value, not_available
from .wire import Generation, Wire

_SAME = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "cache_salt", "priority", "n")


def config_of(request: Wire, info: ModelInfo, max_tokens: int | None) -> GenerateConfig:
    """The config of a request, of the fields of Generation that it has; `max_tokens`: None for as many as there is room
    for. Raises ApiError.

    temperature and top_p of 0 are the limit that they stand for, the likeliest token always. The checkpoint's defaults
    hold for what the request leaves out; where they are greedy, only a temperature asks for draws.
    """
    values: dict[str, Any] = dict(info.sampling_defaults)
    if request.temperature is not None:
        values["do_sample"] = request.temperature > 0
        values.pop("temperature", None)
        if request.temperature > 0:
            values["temperature"] = request.temperature
    if request.top_p is not None:
        if request.top_p > 0:
            values["top_p"] = request.top_p
        else:
            values["do_sample"] = False
    if request.top_k is not None:
        values["top_k"] = max(request.top_k, 0)
    if (seed := getattr(request, "seed", None)) is not None:
        values["seed"] = seed & (2**64 - 1)
    if biases := getattr(request, "logit_bias", None):
        values["logit_bias"] = _biases(biases)
    if stop := getattr(request, "stop", None):
        values["stop"] = [stop] if isinstance(stop, str) else stop
    if guided := _guided(request):
        values["response_format"] = guided
    if getattr(request, "ignore_eos", None):
        values["early_stopping"] = False
    if max_tokens is not None:
        values["max_new_tokens"] = max_tokens
    for name in _SAME:
        if (value := getattr(request, name, None)) is not None:
            values[name] = value
    return checked(values)


def checked(values: dict[str, Any]) -> GenerateConfig:
    """A config of these values. Raises ApiError naming the one that is wrong."""
    try:
        return GenerateConfig(**values)
    except (ValueError, TypeError):     # once more, one by one
        for name, value in values.items():
            if name not in GenerateConfig.field_names():
                raise not_available(name, "its engine does not have it yet") from None
            try:
                GenerateConfig(**{name: value})
            except (ValueError, TypeError) as error:
                raise bad_value(NAMES.get(name, name), str(error)) from None
        raise


def _guided(request: Wire) -> dict[str, Any] | None:
    """What an answer must be, by vLLM's fields for it."""
    given = [name for name in ("json", "regex", "choice", "grammar")
             if getattr(request, f"guided_{name}", None) is not None]
    if not given:
        return None
    if len(given) > 1 or getattr(request, "response_format", None) is not None:
        raise bad_value(f"guided_{given[-1]}", "an answer has one form: there is another field that says it")
    name, value = given[0], getattr(request, f"guided_{given[0]}")
    if name == "json":
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": value}}
    return {"type": name, name: value}


def _biases(given: dict[str, float]) -> dict[int, float]:
    found = {}
    for key, value in given.items():
        if not key.isdecimal():
            raise bad_value("logit_bias", f"its keys are token ids, and {key!r} is none")
        found[int(key)] = value
    return found


def check_room(info: ModelInfo, prompt_tokens: int, max_tokens: int | None, param: str) -> None:
    """ApiError if prompt and wanted output exceed the context: what is promised is not cut short silently."""
    if max_tokens is not None and prompt_tokens + max_tokens > info.max_length:
        raise ApiError(
            400,
            f"This model's maximum context length is {info.max_length} tokens. However, you requested "
            f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the prompt, {max_tokens} in the completion). "
            f"Please reduce the length of the prompt or '{param}'.",
            param,
            "context_length_exceeded",
        )


def check_stream_options(request: Generation) -> None:
    """ApiError if there are some without a stream."""
    if request.stream_options is not None and not request.stream:
        raise bad_value("stream_options", "it is only allowed when 'stream' is true")


def response_format(given: Wire) -> dict[str, Any] | None:
    """What answers must be, in the engine's form; None for text of any kind."""
    found = given.model_dump(exclude_none=True, by_alias=True)
    return None if found == {"type": "text"} else found
