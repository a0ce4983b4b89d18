"""The pieces that an answer is cut into."""

from typing import NamedTuple


class Reasoning(NamedTuple):
    """More of the model's thinking."""

    text: str


class CallBegins(NamedTuple):
    number: int  # from 0
    name: str


class Arguments(NamedTuple):
    """More of the arguments of a call, which are JSON; of a custom tool, more of its input."""

    number: int  # from 0
    text: str


Piece = str | Reasoning | CallBegins | Arguments  # a str is text for the reader
