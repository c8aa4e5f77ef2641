"""The parts of an answer, in the order in which they come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Content:
    """More of the text for the user."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """More of the model's reasoning."""

    text: str


@dataclass(frozen=True)
class ToolCallBegin:
    """A call of a tool begins. `index`: the number of the call in this answer, from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    delta: str


Event = Content | Reasoning | ToolCallBegin | ToolCallArguments
