"""What an answer consists of, in the order in which it comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union


@dataclass(frozen=True)
class Content:
    """More of the text for the user."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """More of the text that the model has written for itself."""

    text: str


@dataclass(frozen=True)
class ToolCallBegin:
    """A tool is called; index: which call of this answer, from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    delta: str


Event = Union[Content, Reasoning, ToolCallBegin, ToolCallArguments]
