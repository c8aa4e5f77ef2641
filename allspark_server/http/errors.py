"""Errors of HTTP answers, in OpenAI's form and in Anthropic's."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from allspark_client.errors import AllSparkError, AsStatus

#: OpenAI's error types by HTTP status
_TYPES = {429: "rate_limit_error", 401: "invalid_request_error", 403: "permission_error"}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
#: HTTP statuses by the status of the engine's error
_STATUSES = {
    AsStatus.ALLSPARK_PARAM_ERROR: 400,
    AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR: 400,
    AsStatus.ALLSPARK_CACHE_MEMORY_OUT: 400,
    AsStatus.ALLSPARK_INVALID_CALL_ERROR: 400,
    AsStatus.ALLSPARK_LORA_NOT_FOUND: 404,
    AsStatus.ALLSPARK_LORA_ALREADY_LOADED: 400,
    AsStatus.ALLSPARK_LORA_IN_USE: 409,
    AsStatus.ALLSPARK_LORA_NUM_EXCEED_LIMIT_ERROR: 400,
    AsStatus.ALLSPARK_LORA_RANK_EXCEED_LIMIT_ERROR: 400,
    AsStatus.ALLSPARK_REQUEST_DENIED: 403,
    AsStatus.ALLSPARK_RUNTIME_ERROR: 503,
    AsStatus.ALLSPARK_IO_ERROR: 503,
    AsStatus.ALLSPARK_MEMORY_ERROR: 503,
}
#: names of fields in HTTP requests by their names in the engine, where they differ
NAMES = {
    "input_ids": "prompt",
    "text": "prompt",
    "prompt": "prompt",
    "ids": "tokens",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_words_ids": "stop_token_ids",
    "eos_token_id": "stop_token_ids",
    "max_length": "max_tokens",
    "early_stopping": "ignore_eos",
    "lora_name": "model",
}
#: how the engine's errors of an image begin; the number counts images and videos
_OF_IMAGE = re.compile(r"(image|video) ([1-9][0-9]{0,3}) of the request ")
_MAX_VALUE = 80  # characters of a wrong value in an error
_SHOWN = reprlib.Repr()     # shows a large value without writing all of it
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = _MAX_VALUE


class ApiError(Exception):
    """An error that is sent as the answer.

    Args:
        status: the HTTP status.
        message: what is wrong.
        param: the field of the request that is wrong; None: none.
        code: OpenAI's code of the error.
        retry_after: seconds after which the same request may be accepted; 0: never. retry_after_ms: the same in
            milliseconds, if that is known.
        allow: the methods that the path accepts, for 405.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None,
                 retry_after: int = 0, allow: str = "", retry_after_ms: int = 0):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after, self.allow, self.retry_after_ms = retry_after, allow, retry_after_ms

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """The error in Anthropic's form."""
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def bad_value(param: str, why: str) -> ApiError:
    """The error of a field with a wrong value."""
    return ApiError(400, f"Invalid value for '{param}': {why}", param, "invalid_value")


def not_available(param: str, what: str) -> ApiError:
    """The error of one of OpenAI's fields that this server does not support."""
    return ApiError(400, f"'{param}' is not supported by this server: {what}", param, "unsupported_parameter")


INTERNAL = ApiError(500, "The server has a defect; its log says more", code="internal_error")


def from_engine(error: AllSparkError | ValueError | TypeError, places: Sequence[str] = ()) -> ApiError:
    """An engine's error as an HTTP error. `places`: the fields that the request's images and videos have come from."""
    text = error.message if isinstance(error, AllSparkError) else str(error)
    match = _OF_IMAGE.match(text)
    if match is not None and int(match[2]) <= len(places):
        found = bad_value(places[int(match[2]) - 1], f"the {match[1]} {text[match.end():]}")
        if isinstance(error, AllSparkError) and error.status is AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR:
            found.code = "context_length_exceeded"
        return found
    if isinstance(error, (ValueError, TypeError)):
        return ApiError(400, text, _param(text), "invalid_value")
    if error.retryable:
        busy = error.status is AsStatus.ALLSPARK_RUNTIME_ERROR
        return ApiError(503 if busy else 429, text, code="unavailable" if busy else "rate_limit_exceeded",
                        retry_after=1)
    status = _STATUSES.get(error.status, 500)
    if error.status is AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR:
        return ApiError(status, text, "prompt", "context_length_exceeded")
    if error.status is AsStatus.ALLSPARK_PARAM_ERROR and text.startswith("no model named"):
        return ApiError(404, text, "model", "model_not_found")
    if status == 503:
        return ApiError(503, text, code="unavailable", retry_after=1)
    return ApiError(status, text, _param(text) if status == 400 else None)


def _param(text: str) -> str | None:
    """The field that an engine's error begins with, by its name in HTTP requests."""
    match = re.match(r"([a-z_]+)((?:\[[^\]]*\])*)[ =.:]", text)
    if match is None or match[1] in ("the", "model", "a", "only"):
        return None
    name = NAMES.get(match[1])
    return match[1] + match[2] if name is None else name


# --- validation --------------------------------------------------------------------------------------------------


def invalid_json(error: ValidationError) -> ApiError:
    """The error of a body that is no JSON."""
    return ApiError(400, f"The body is not valid JSON: {error.errors()[0]['msg'].removeprefix('Invalid JSON: ')}",
                    code="invalid_json")


def from_validation(error: ValidationError, value: Any) -> ApiError:
    """The first error that pydantic found in a body, which holds `value`; it names the field by its path."""
    problems = error.errors(include_url=False)
    if not isinstance(value, dict):
        return ApiError(400, "The body must be a JSON object", code="invalid_json")
    paths = [(_path(problem, value), problem) for problem in problems]
    # Each alternative of a union reports an error; the one that matched most of the value is taken.
    first = paths[0][0].split("[")[0].split(".")[0]
    param, _ = max(((path, problem) for path, problem in paths if path.split("[")[0].split(".")[0] == first),
                   key=lambda entry: (entry[0].count("[") + entry[0].count("."), _indices(entry[1])))
    of_param = [problem for path, problem in paths if path == param]
    kind = of_param[0]["type"]
    if kind in ("missing", "union_tag_not_found"):
        return ApiError(400, f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    if kind == "extra_forbidden":
        return ApiError(400, f"Unknown parameter: '{param}'.", param, "unknown_parameter")
    reasons = dict.fromkeys(_reason(problem) for problem in of_param)
    why = " or ".join([*reasons][:1] + [reason.removeprefix("Input should be ") for reason in [*reasons][1:]])
    shown = _SHOWN.repr(of_param[0]["input"])
    shown = shown if len(shown) <= _MAX_VALUE else shown[:_MAX_VALUE] + "…"
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return ApiError(400, f"Invalid value for '{param}': {why}, but got {shown}", param, code)


def _reason(problem: ErrorDetails) -> str:
    """What is wrong, without the whole of a long tag of a union."""
    reason = problem["msg"].removeprefix("Value error, ")
    tag = (problem.get("ctx") or {}).get("tag", "")
    return reason.replace(tag, tag[:_MAX_VALUE] + "…") if len(tag) > _MAX_VALUE else reason


def _indices(problem: ErrorDetails) -> list[int]:
    return [part for part in problem["loc"] if isinstance(part, int)]


def _names_alternative(problem: ErrorDetails, i: int, at: dict[str, Any]) -> bool:
    """Whether part `i` of a location is the type of the object `at`, as which it was tried, although a field has the
    same name, as in {"type": "text", "text": …}.
    """
    part, rest = problem["loc"][i], problem["loc"][i + 1:]
    if not rest or at.get("type") != part:
        return False
    inner = at.get(str(part))
    return rest[0] == part or not isinstance(inner, (dict, list)) \
        or (problem["type"] == "extra_forbidden" and rest[0] not in inner)


def _path(problem: ErrorDetails, body: Any) -> str:
    """The path of a field, such as messages[0].content. A location also has the names of tried alternatives."""
    path = ""
    at = body
    skipped = False     # an alternative's name, since the last field
    for i, part in enumerate(problem["loc"]):
        if isinstance(part, int):
            path += f"[{part}]"
            at = at[part] if isinstance(at, list) and part < len(at) else None
            skipped = False
        elif isinstance(at, dict) and (part in at or (problem["type"] == "missing" and part == problem["loc"][-1])):
            if not skipped and _names_alternative(problem, i, at):
                skipped = True
                continue
            path += f".{part}" if path else part
            at = at.get(part)
            skipped = False
    if problem["type"].startswith("union_tag_"):
        name = problem["ctx"]["discriminator"].strip("'")
        path += "." + ("type" if name.endswith("()") else name)
    return path or "body"
