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


def _asserted(function: F, other_thread: Callable[[tuple[Any, ...]], str | None]) -> F:
    """The function; in debug builds it raises AssertionError if it is called on a wrong thread.

    `other_thread`: given the arguments of a call, names the right thread; None if that is the current one.
    """
    if not enabled:
        return function

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        where = other_thread(args)
        if where is not None:
            raise AssertionError(f"{function.__qualname__} runs on {where}, not on {_current()!r}")
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


def one_thread(function: F) -> F:
    """For methods of an object that belongs to one thread, the first that calls one: ENGINE in an Engine."""
    def other_thread(args: tuple[Any, ...]) -> str | None:
        owner = vars(args[0]).setdefault("_owner_thread", threading.current_thread())
        return None if threading.current_thread() is owner else f"the thread {owner.name!r}"

    return _asserted(function, other_thread)


def output_only(function: F) -> F:
    """For functions of the output stage: OUTPUT, or ENGINE if steps are delivered inline or the OUTPUT thread has
    failed.
    """
    return _asserted(function, lambda _: None if _current() in (OUTPUT, ENGINE) else "the output stage's thread")


def callers_only(function: F) -> F:
    """For functions of the input stage, which may take long: they must not run on the engine's own threads. A server's
    event loop may run them for short prompts of ids, which take microseconds.
    """
    return _asserted(function, lambda _: "a caller's thread" if _current() in (ENGINE, OUTPUT, MASKS) else None)


def _current() -> str:
    return threading.current_thread().name
