"""What can be completed: a text, token ids, or a chat."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

from quire.errors import InvalidRequest

Message = dict[str, Any]  # role, content, ... as the chat template wants it
Prompt = str | Sequence[int] | Sequence[Message]
T = TypeVar("T")


def is_chat(prompt: Prompt) -> TypeGuard[Sequence[Message]]:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt is a batch of one. What is in a list tells: ids and messages make one prompt, the rest are several."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | Mapping)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def for_each(name: str, given: T | Sequence[T], count: int) -> list[T]:
    """One value for every prompt, or one for each."""
    if not isinstance(given, list | tuple):
        return [given] * count  # type: ignore[list-item]
    if len(given) != count:
        raise InvalidRequest(f"{name} has {len(given)} entries; there are {count} prompts")
    return list(given)
