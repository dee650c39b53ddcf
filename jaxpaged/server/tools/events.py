"""What a parser finds in a model's text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolStart:
    """A call of the function `name` begins."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next part of the arguments, JSON text, of the call that began last."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolEnd:
    """The call that began last is over; its arguments are whole unless the text was cut off or malformed."""


Event = Content | Reasoning | ToolStart | Arguments | ToolEnd
