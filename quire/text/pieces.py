"""The pieces of an answer: text, reasoning and calls."""

from typing import NamedTuple


class Reasoning(NamedTuple):
    """More of the model's thinking."""

    text: str


class CallBegins(NamedTuple):
    number: int  # from 0
    name: str


class CallArguments(NamedTuple):
    """More of the arguments of a call, which are JSON; of a custom tool, more of its input."""

    number: int  # from 0
    text: str


Piece = str | Reasoning | CallBegins | CallArguments  # a str is text for the reader
