"""Subcommands of `allspark`, one module each: the flags, and the function that runs the command."""
from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Protocol

#: what a command runs; returns the exit status
Handler = Callable[[argparse.Namespace], int]


class AddCommand(Protocol):
    """Adds a subcommand to the parser of `allspark`; `details` go to argparse."""

    def __call__(self, name: str, handler: Handler | None, summary: str, /, **details: Any) -> argparse.ArgumentParser:
        """The subcommand's parser."""
