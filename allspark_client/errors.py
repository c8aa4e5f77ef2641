"""Status codes, the exception of the API, and errors that Engine and ClientEngine share."""
from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum
from typing import Any


class AsStatus(IntEnum):
    """The result of a call. Methods return ALLSPARK_SUCCESS, or raise AllSparkError with one of the others."""

    ALLSPARK_SUCCESS = 0
    ALLSPARK_UNKNOWN_ERROR = 1
    ALLSPARK_PARAM_ERROR = 2
    ALLSPARK_IO_ERROR = 3
    ALLSPARK_MEMORY_ERROR = 4
    ALLSPARK_RUNTIME_ERROR = 5
    ALLSPARK_EXCEED_LIMIT_ERROR = 6
    ALLSPARK_INVALID_CALL_ERROR = 7
    ALLSPARK_EMPTY_REQUEST = 8
    ALLSPARK_ILLEGAL_REQUEST_ID = 9
    ALLSPARK_CACHE_MEMORY_OUT = 10
    ALLSPARK_REQUEST_DENIED = 11
    ALLSPARK_LORA_NOT_FOUND = 12
    ALLSPARK_LORA_ALREADY_LOADED = 13
    ALLSPARK_LORA_IN_USE = 14
    ALLSPARK_LORA_NUM_EXCEED_LIMIT_ERROR = 15
    ALLSPARK_LORA_RANK_EXCEED_LIMIT_ERROR = 16
    ALLSPARK_STREAMING = 17


class AllSparkError(RuntimeError):
    """A refused or failed call or request. Its text is the status' name, a colon, and `message`.

    Attributes:
        status: an AsStatus, never ALLSPARK_SUCCESS.
        message: what went wrong, with the names and values concerned.
        retryable: whether the same call may succeed a little later, because a queue is full, say.
    """

    def __init__(self, status: AsStatus, message: str, retryable: bool = False):
        self.status = AsStatus(status)
        self.message = message
        self.retryable = retryable
        super().__init__(f"{self.status.name}: {message}")

    def __reduce__(self) -> tuple[Any, ...]:
        return AllSparkError, (self.status, self.message, self.retryable)


class Draining(AllSparkError):
    """A server takes no new requests because it is about to stop. Another server may, or this one after a restart."""

    def __init__(self, message: str = "this server takes no new requests: it is about to stop"):
        super().__init__(AsStatus.ALLSPARK_REQUEST_DENIED, message, retryable=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return Draining, (self.message,)


class NotLoaded(AllSparkError):
    """A model that is loaded on demand is not loaded: load_model loads it."""

    def __init__(self, model: str):
        self.model = model
        super().__init__(AsStatus.ALLSPARK_INVALID_CALL_ERROR,
                         f"model {model!r} is loaded on demand, and is not loaded now; load_model loads it",
                         retryable=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return NotLoaded, (self.model,)


def not_available(what: str) -> AllSparkError:
    """The error for a feature that the API names but that does not exist yet."""
    return AllSparkError(AsStatus.ALLSPARK_INVALID_CALL_ERROR, f"{what} is not available yet")


def embeddings_not_available(what: str) -> AllSparkError:
    """The error for embeddings of images that a caller has computed."""
    return not_available(f"{what} (embeddings of images; give the images themselves, as parts of inputs['messages'] or "
                         "as inputs['images'])")


def closed_engine() -> AllSparkError:
    """The error of calls on a closed engine."""
    return AllSparkError(AsStatus.ALLSPARK_INVALID_CALL_ERROR, "the engine is closed")


def forked_engine() -> AllSparkError:
    """The error of calls in a forked child on its parent's engine, whose threads do not exist in the child."""
    return AllSparkError(AsStatus.ALLSPARK_INVALID_CALL_ERROR,
                         "the engine belongs to the parent of this forked process; create another engine")


def unknown_model(name: str, known: Iterable[str]) -> AllSparkError:
    """The error of a call that names a model which is not installed. `known`: the installed names."""
    names = ", ".join(repr(n) for n in sorted(known)) or "none"
    return AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"no model named {name!r} is installed; installed: {names}")


def illegal_handle(name: str, handle: int) -> AllSparkError:
    """The error of a handle that this model never had, or that was released."""
    return AllSparkError(AsStatus.ALLSPARK_ILLEGAL_REQUEST_ID,
                         f"model {name!r} has no request with handle {handle}: it was released, or never started")


def nearest_name(name: str, known: Iterable[str]) -> str:
    """"; did you mean 'top_k'?" for a misspelt `name`; an empty string if no known name is similar."""
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
