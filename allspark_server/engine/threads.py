"""Which thread runs what, asserted in debug builds (docs/architecture/threads.md has the table).

The checks exist if Python runs in development mode (`python -X dev`) or `enabled` is set before the modules that use
them are imported, as the tests do. Otherwise the decorators return the function itself: they cost nothing.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

ENGINE, OUTPUT, MASKS = "allspark-engine", "allspark-output", "allspark-masks"
enabled = sys.flags.dev_mode


def one_thread(function: F) -> F:
    """For methods of an object that belongs to one thread, the first that calls one: ENGINE in an Engine."""
    if not enabled:
        return function

    @functools.wraps(function)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        owner = vars(self).setdefault("_owner_thread", threading.current_thread())
        _check(function, threading.current_thread() is owner, f"the thread {owner.name!r}")
        return function(self, *args, **kwargs)

    return checked  # type: ignore[return-value]


def output_only(function: F) -> F:
    """For functions of the output stage: OUTPUT, or ENGINE if steps are delivered inline or the OUTPUT thread has
    failed.
    """
    if not enabled:
        return function

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check(function, threading.current_thread().name in (OUTPUT, ENGINE), "the output stage's thread")
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


def callers_only(function: F) -> F:
    """For functions of the input stage, which may take long: they must not run on the engine's own threads. A server's
    event loop may run them for short prompts of ids, which take microseconds.
    """
    if not enabled:
        return function

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check(function, threading.current_thread().name not in (ENGINE, OUTPUT, MASKS), "a caller's thread")
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


def _check(function: Callable[..., Any], holds: bool, where: str) -> None:
    if not holds:
        raise AssertionError(f"{function.__qualname__} runs on {where}, not on {threading.current_thread().name!r}")
