"""Checked dataclass fields, of which AsModelConfig and GenerateConfig are made.

Every assignment to a field, in the constructor or later, runs the field's check. A wrong value is therefore reported
where it is written, with the field, the value and what is allowed.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, field, fields
from enum import IntEnum
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np

from .errors import nearest_name

Check = Callable[[str, Any], Any]
C = TypeVar("C", bound="Checked")


def _typed(check: Check, default: Any, optional: bool, factory: Callable[[], Any] | None = None) -> Any:
    def checked(name: str, value: Any) -> Any:
        return None if optional and value is None else check(name, value)

    if factory is not None:
        return field(default_factory=factory, metadata={"check": checked})
    return field(default=default, metadata={"check": checked})


def wrong_type(name: str, value: Any, allowed: str) -> TypeError:
    """The error for a value of a wrong type."""
    return TypeError(f"{name} must be {allowed}, not {type(value).__name__} ({value!r:.80})")


def as_int(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """`value` as an int in [low, high]; bool and float are rejected."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise wrong_type(name, value, "an int")
    number = int(value)
    if (low is not None and number < low) or (high is not None and number > high):
        allowed = f"{low} to {high}" if low is not None and high is not None else f"at least {low}"
        raise ValueError(f"{name}={number} is out of range; allowed: {allowed}")
    return number


def as_float(name: str, value: Any, low: float = -math.inf, high: float = math.inf, above: bool = False,
             hint: str = "") -> float:
    """`value` as a finite float in [low, high], or in (low, high] with `above`; bool is rejected."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise wrong_type(name, value, "a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number < low or number > high or (above and number == low):
        lower = f"above {low:g}" if above else f"at least {low:g}" if low != -math.inf else "finite"
        upper = f" and at most {high:g}" if high != math.inf else ""
        advice = f"; {hint}" if hint and number <= low else ""
        raise ValueError(f"{name}={number:g} is out of range; allowed: {lower}{upper}{advice}")
    return number


def valid_unicode(name: str, text: str) -> str:
    """`text`, if it can be encoded as UTF-8; ValueError for half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise ValueError(f"{name} is not valid Unicode: half of a surrogate pair at position {e.start}") from None
    return text


def bool_field(default: bool) -> Any:
    """A field for True or False. 0 and 1 are rejected: they are more often a misplaced argument."""
    def check(name: str, value: Any) -> bool:
        if not isinstance(value, (bool, np.bool_)):
            raise wrong_type(name, value, "a bool")
        return bool(value)

    return _typed(check, default, False)


def int_field(default: int | None, low: int | None = None, high: int | None = None) -> Any:
    """A field for an int in [low, high]; None is allowed if it is the default."""
    return _typed(lambda name, value: as_int(name, value, low, high), default, default is None)


def float_field(default: float, low: float = -math.inf, high: float = math.inf, above: bool = False,
                hint: str = "") -> Any:
    """A field for a finite number in [low, high], or in (low, high] with `above`.

    `hint`: what to do instead of giving a value that is too small; it ends the error.
    """
    return _typed(partial(as_float, low=low, high=high, above=above, hint=hint), default, False)


def str_field(default: str | None) -> Any:
    """A field for a str; None is allowed if it is the default."""
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise wrong_type(name, value, "a str")
        return valid_unicode(name, value)

    return _typed(check, default, default is None)


def path_field(default: str) -> Any:
    """A field for a path, a str or os.PathLike, kept as str."""
    def check(name: str, value: Any) -> str:
        if hasattr(value, "__fspath__"):
            value = value.__fspath__()
        if not isinstance(value, str):
            raise wrong_type(name, value, "a path (str or os.PathLike)")
        return value

    return _typed(check, default, False)


def choice_field(default: Any, choices: tuple[Any, ...]) -> Any:
    """A field for one of `choices`, which are all str or all int."""
    kind = type(choices[0])

    def check(name: str, value: Any) -> Any:
        value = as_int(name, value) if kind is int else value
        if not isinstance(value, kind):
            raise wrong_type(name, value, f"a {kind.__name__}")
        if value not in choices:
            hint = nearest_name(value, choices) if kind is str else ""
            raise ValueError(f"{name}={value!r} is not known; allowed: {', '.join(map(repr, choices))}{hint}")
        return value

    return _typed(check, default, False)


def enum_field(enum: type[IntEnum], default: IntEnum | None) -> Any:
    """A field for a member of `enum`, its name or its number; None is allowed if it is the default."""
    def check(name: str, value: Any) -> IntEnum:
        if isinstance(value, enum):
            return value
        if isinstance(value, str) and value in enum.__members__:
            return enum[value]
        allowed = ", ".join(f"{enum.__name__}.{member}" for member in enum.__members__)
        if isinstance(value, str):
            raise ValueError(f"{name}={value!r} is not known; allowed: {allowed}"
                             f"{nearest_name(value, enum.__members__)}")
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type(name, value, f"one of {allowed}")
        if value not in [int(member) for member in enum]:
            raise ValueError(f"{name}={value} is not known; allowed: {allowed}")
        return enum(value)

    return _typed(check, default, default is None)


def custom_field(check: Check, default: Any = None, factory: Callable[[], Any] | None = None) -> Any:
    """A field with a check of its own, (name, value) → value; None is allowed if it is the default."""
    return _typed(check, default, factory is None and default is None, factory)


class Checked:
    """Base of dataclasses whose fields are made by the functions above (use @dataclass(init=False)).

    Unknown names are rejected with the nearest known one, in the constructor, in update() and by assignment.
    Values are also available as items, since DashInfer's configs are dicts.
    """

    #: keys that are accepted and dropped, at these values only: {name: (allowed values, why others are rejected)}
    NEUTRAL: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {}
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __init__(self, *args: Any, **values: Any):
        known = fields(self)
        if len(args) > len(known):
            raise TypeError(f"{type(self).__name__} takes at most {len(known)} positional arguments, got {len(args)}")
        for f in known:
            object.__setattr__(self, f.name, f.default_factory() if f.default_factory is not MISSING else f.default)
        for f, value in zip(known, args):
            if f.name in values:
                raise TypeError(f"{type(self).__name__} got {f.name} twice")
            setattr(self, f.name, value)
        self.update(values)

    @classmethod
    def field_names(cls) -> list[str]:
        """The names of all fields, in order."""
        return [f.name for f in fields(cls)]

    def update(self: C, values: dict[str, Any]) -> C:
        """Assign every item of `values`; returns self. Raises ValueError for an unknown name."""
        for name, value in values.items():
            self[name] = value
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        field_ = type(self).__dataclass_fields__.get(name)
        if field_ is None:
            raise AttributeError(self._unknown(name))
        object.__setattr__(self, name, field_.metadata["check"](name, value))

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self.NEUTRAL:
            allowed, why = self.NEUTRAL[name]
            if not any(value is a or (type(value) in (type(a), int, float) and value == a) for a in allowed):
                raise ValueError(f"{name}={value!r} is not possible: {why}; allowed: {', '.join(map(repr, allowed))}")
        elif name not in type(self).__dataclass_fields__:
            raise ValueError(self._unknown(name))
        else:
            setattr(self, name, value)

    def __getitem__(self, name: str) -> Any:
        if name not in type(self).__dataclass_fields__:
            raise KeyError(name)
        return getattr(self, name)

    def keys(self) -> Iterator[str]:
        """The names of the fields. Together with item access it makes dict(config) work."""
        return iter(self.field_names())

    def _unknown(self, name: str) -> str:
        known = self.field_names() + list(self.NEUTRAL)
        return f"{type(self).__name__} has no key {name!r}{nearest_name(name, known)}"
