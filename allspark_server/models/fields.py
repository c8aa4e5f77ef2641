"""Typed access to a checkpoint's JSON files, and upper limits for the sizes of a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from allspark_client.errors import AllSparkError, AsStatus

# No known network is near these limits. With them, sizes fit 32 bits and building the op list takes no time.
MAX_LAYERS, MAX_HEAD_DIM, MAX_SIZE, MAX_POSITIONS = 10_000, 1 << 13, 1 << 24, 1 << 30
MAX_EOS_IDS = 1000
MAX_EXPERTS = 1 << 14
MAX_NUMBER = 1e30
MAX_PATCHES = 1 << 17   # of an image


class Fields:
    """Typed access to a JSON object; errors name the field and the file."""

    def __init__(self, values: dict[str, Any], path: Path, prefix: str = ""):
        self.values, self.path, self.prefix = values, path, prefix

    def error(self, name: str, problem: str) -> AllSparkError:
        """An error that names the field and the file; `problem` follows, as in "is 3: it must be even"."""
        return AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"field {self.prefix + name!r} of {self.path} {problem}")

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """The field as `kind`; `default` if it is absent or null. AllSparkError if it has another type."""
        value = self.values.get(name)
        if value is None:
            return default
        right = isinstance(value, kind) or (kind is float and isinstance(value, int))
        if not right or (isinstance(value, bool) and kind is not bool):
            raise self.error(name, f"is {value!r}: expected {kind.__name__}")
        if kind in (int, float) and not abs(value) <= MAX_NUMBER:  # JSON has 1e400, NaN and integers of any length
            raise self.error(name, f"is {value!r}: expected a number of at most {MAX_NUMBER:g}")
        return kind(value)

    def need(self, name: str, kind: type) -> Any:
        """The field as `kind`. AllSparkError if it is absent or null."""
        value = self.get(name, kind)
        if value is None:
            raise self.error(name, f"is missing: expected {kind.__name__}")
        return value

    def inner(self, name: str, default: dict[str, Any] | None = None) -> Fields:
        """The fields of the object that a field is; those of `default` if it is absent or null. AllSparkError if it is
        no object, or there is neither.
        """
        values = self.need(name, dict) if default is None else self.get(name, dict, default)
        return Fields(values, self.path, f"{self.prefix}{name}.")

    def need_positive(self, name: str, kind: type = int, most: float = MAX_SIZE) -> Any:
        """A number above 0 and up to `most`. AllSparkError otherwise."""
        value = self.need(name, kind)
        if not 0 < value <= most:
            raise self.error(name, f"is {value!r}: it must be positive and at most {most}")
        return value
