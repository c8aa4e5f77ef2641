"""Types of flags for argparse: parsers whose ValueError becomes an error of the command line."""
from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


def checked(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """A flag's type: `parse`, which raises ValueError."""
    def convert(text: str) -> Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return convert


def list_of(parse: Callable[[str], Value]) -> Callable[[str], list[Value]]:
    """A flag's type: values of `parse`, separated by commas."""
    return checked(lambda text: [parse(part) for part in text.split(",") if part])
