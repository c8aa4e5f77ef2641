"""Makes a GenerateConfig of the fields of a request."""

from __future__ import annotations

from typing import Any, Protocol

from allspark_client.config import GenerateConfig
from allspark_client.types import ModelInfo

from .errors import NAMES, ApiError, bad_value, not_available
from .wire import Wire


class SamplingFields(Protocol):
    """The fields that every request for text has."""

    temperature: float | None
    top_p: float | None
    top_k: int | None


_SAME = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "cache_salt", "priority", "n",
         "bad_words", "include_stop_str_in_output", "skip_special_tokens", "prompt_logprobs")

_BUDGETS = ("thinking_token_budget", "thinking_budget", "thinking_budget_tokens")


def config_of(request: SamplingFields, info: ModelInfo, max_tokens: int | None) -> GenerateConfig:
    """The config of a request, from those fields of Generation that it has. Raises ApiError.

    A temperature or top_p of 0 means greedy decoding. The checkpoint's defaults apply to fields that are missing; if
    they are greedy, only a temperature turns sampling on. `max_tokens`: None for as many as fit.
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
    if ignore_eos := getattr(request, "ignore_eos", None):
        values["early_stopping"] = False
    if ids := getattr(request, "stop_token_ids", None):
        if ignore_eos:
            values["stop_words_ids"] = [[i] for i in ids]
        else:
            values["eos_token_id"] = [*info.eos_token_ids, *ids]
    if max_tokens is not None:
        values["max_new_tokens"] = max_tokens
    if fewest := getattr(request, "min_tokens", None):
        if max_tokens is not None and fewest > max_tokens:
            raise bad_value("min_tokens", f"it is {fewest}, and at most {max_tokens} tokens are generated")
        values["min_new_tokens"] = fewest
    if (kept := getattr(request, "truncate_prompt_tokens", None)) is not None:
        if not kept:
            raise bad_value("truncate_prompt_tokens", "it must be at least 1, or -1")
        values["truncate_prompt_tokens"] = kept if kept > 0 else max(1, info.max_length - (max_tokens or 1))
    if allowed := getattr(request, "allowed_token_ids", None):
        _allow(allowed, info, values)
    if (budget := _thinking_budget(request, info)) is not None:
        values["thinking_token_budget"] = budget
    for name in _SAME:
        if (value := getattr(request, name, None)) is not None:
            values[name] = value
    return checked(values)


def checked(values: dict[str, Any]) -> GenerateConfig:
    """A config with these values. Raises ApiError naming the value that is wrong."""
    try:
        return GenerateConfig(**values)
    except (ValueError, TypeError):     # find it by checking each alone
        for name, value in values.items():
            if name not in GenerateConfig.field_names():
                raise not_available(name, "its engine does not have it yet") from None
            try:
                GenerateConfig(**{name: value})
            except (ValueError, TypeError) as error:
                raise bad_value(NAMES.get(name, name), str(error)) from None
        raise


def _guided(request: SamplingFields) -> dict[str, Any] | None:
    """The response format by vLLM's fields guided_json, guided_regex, guided_choice, guided_grammar, and those of
    structured_outputs.
    """
    structured = getattr(request, "structured_outputs", None)
    kinds = ("json", "regex", "choice", "grammar")
    given: dict[str, Any] = {f"guided_{kind}": getattr(request, f"guided_{kind}", None) for kind in kinds}
    if structured is not None:
        inner = {"json": structured.json_, **{kind: getattr(structured, kind) for kind in kinds[1:]},
                 "json_object": structured.json_object or None}
        given |= {f"structured_outputs.{kind}": value for kind, value in inner.items()}
        if all(value is None for value in inner.values()):
            raise bad_value("structured_outputs", f"one of {', '.join(inner)} must be given")
    given = {field: value for field, value in given.items() if value is not None}
    if not given:
        return None
    if len(given) > 1 or getattr(request, "response_format", None) is not None:
        raise bad_value([*given][-1], "another field already constrains the answer")
    (field, value), = given.items()
    kind = field.removeprefix("guided_").removeprefix("structured_outputs.")
    found = {"type": kind, kind: value}
    if kind == "json":
        schema = value if isinstance(value, str) else {"name": "answer", "schema": value}
        found = {"type": "json_schema", "json_schema": schema}
    elif kind == "json_object":
        found = {"type": kind}
    elif kind == "grammar" and "::=" in value:
        found["syntax"] = "ebnf"
    if structured is not None and structured.disable_any_whitespace:
        if not kind.startswith("json"):
            raise bad_value("structured_outputs.disable_any_whitespace", "it needs 'json' or 'json_object'")
        found["disable_any_whitespace"] = True
    return found


def _thinking_budget(request: SamplingFields, info: ModelInfo) -> int | None:
    """The most tokens of reasoning, by any of the names that servers have for it; None: no limit."""
    params = getattr(request, "custom_params", None)
    named = {name: getattr(request, name, None) for name in _BUDGETS}
    named["custom_params.thinking_budget"] = params.thinking_budget if params is not None else None
    given: dict[str, int] = {name: value for name, value in named.items() if value is not None}
    if len(set(given.values())) > 1:
        names = [*given]
        raise bad_value(names[-1], f"it is {given[names[-1]]}, and '{names[0]}' is {given[names[0]]}")
    name, value = next(iter(given.items()), ("", -1))
    if value >= 0 and not info.reasoning:
        raise not_available(name, "the chat template of this model has no reasoning")
    return value if value >= 0 else None


def _allow(ids: list[int], info: ModelInfo, values: dict[str, Any]) -> None:
    """Allow only these tokens, by a grammar."""
    if "response_format" in values:
        raise bad_value("allowed_token_ids", "another field already constrains the answer")
    if too_large := [i for i in ids if i >= info.vocab_size]:
        raise bad_value("allowed_token_ids", f"the vocabulary has {info.vocab_size} ids; {too_large[0]} is not one")
    ends = set(values.get("eos_token_id", info.eos_token_ids))
    if ends & set(ids):
        values["eos_token_id"] = sorted(ends & set(ids))    # a grammar allows all of these where it may end
    else:
        values["min_new_tokens"] = values.get("max_new_tokens", info.max_length)
    plain = sorted(set(ids) - ends)
    grammar = f"start: <[{','.join(map(str, plain))}]>*" if plain else 'start: ""'
    values["response_format"] = {"type": "grammar", "grammar": grammar}


def _biases(given: dict[str, float]) -> dict[int, float]:
    biases = {}
    for key, value in given.items():
        if not key.isdecimal():
            raise bad_value("logit_bias", f"its keys must be token ids, and {key!r} is not one")
        biases[int(key)] = value
    return biases


def check_room(info: ModelInfo, prompt_tokens: int, max_tokens: int | None, param: str) -> None:
    """Raises ApiError if prompt and `max_tokens` exceed the context: an answer is never shortened silently."""
    if max_tokens is not None and prompt_tokens + max_tokens > info.max_length:
        raise ApiError(
            400,
            f"This model's maximum context length is {info.max_length} tokens. However, you requested "
            f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the prompt, {max_tokens} in the completion). "
            f"Please reduce the length of the prompt or '{param}'.",
            param,
            "context_length_exceeded",
        )


def check_prompt_logprobs(request: Any) -> None:
    """Raises ApiError if a stream should have the log probabilities of its prompt: as in vLLM, it cannot."""
    if request.prompt_logprobs is not None and request.stream:
        raise bad_value("prompt_logprobs", "it is not allowed when 'stream' is true")


def check_stream_options(request: Any) -> None:
    """Raises ApiError if a request has stream_options without a stream."""
    if request.stream_options is not None and not request.stream:
        raise bad_value("stream_options", "it is only allowed when 'stream' is true")


def response_format(given: Wire) -> dict[str, Any] | None:
    """A response format in the engine's form; None for any text."""
    plain = given.model_dump(exclude_none=True, by_alias=True)
    return None if plain == {"type": "text"} else plain
