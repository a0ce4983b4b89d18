"""Prompts: a string, token ids, or a chat."""

from array import array
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, SupportsIndex, TypeGuard, TypeVar

import numpy as np

from quire.errors import InvalidRequest, invalid

Message = dict[str, Any]  # role, content and other fields, as the chat template expects them
Prompt = str | Sequence[int] | Sequence[Message]
T = TypeVar("T")


def is_chat(prompt: Prompt) -> TypeGuard[Sequence[Message]]:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts. A list of ids or messages is one prompt; any other list is several."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | np.integer | Mapping)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def for_each(name: str, given: T | Sequence[T], count: int) -> list[T]:
    """One value for every prompt, or one for each."""
    if not isinstance(given, list | tuple):
        return [given] * count  # type: ignore[list-item]
    if len(given) != count:
        raise invalid(name, f"has {len(given)} entries; there are {count} prompts")
    return list(given)


def as_ids(prompt: Sequence[int], limit: int) -> tuple[int, ...]:
    """The token ids, each of them at least 0 and below `limit`."""
    if isinstance(prompt, bytes | bytearray):
        raise InvalidRequest(f"prompt is {type(prompt).__name__}; it must be a text, token ids or a chat")
    try:
        packed = array("i", prompt)
        numbers = np.frombuffer(packed, np.intc)  # fast minimum and maximum
        are_valid = not packed or (numbers.min() >= 0 and numbers.max() < limit)
    except (TypeError, OverflowError):
        are_valid = False
    if not are_valid:
        wrong = next(token for token in prompt if not _is_id(token, limit))
        raise InvalidRequest(f"token id {wrong!r} is not between 0 and {limit - 1}")
    return tuple(packed)


def _is_id(token: object, limit: int) -> bool:
    return isinstance(token, SupportsIndex) and 0 <= index(token) < limit
