"""Prompts as tokens."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from quire.errors import InvalidRequest
from quire.server.served_model import ServedModel
from quire.server.validation import shown

T = TypeVar("T")

LONG_CHARACTERS = 8192  # texts from here on are worked on in a thread, so that streams go on meanwhile
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


async def beside(size: int, work: Callable[[], T]) -> T:
    """`work()`, in a thread when it is about so much text that others would notice."""
    return await asyncio.to_thread(work) if size >= LONG_CHARACTERS else work()


async def encode_texts(model: ServedModel, texts: Sequence[str]) -> list[list[int]]:
    """Plain prompts, with the special tokens that the vocabulary puts around a text."""
    return await beside(sum(map(len, texts)), lambda: model.tokenizer.encode_batch(texts))


async def encode_conversation(
    model: ServedModel,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> tuple[str, list[int]]:
    """A conversation as its template has it, and the tokens of that."""
    size = sum(_check_message(index, message) for index, message in enumerate(messages))

    def work() -> tuple[str, list[int]]:
        text = model.templates.select(with_tools=bool(tools)).render(
            [_with_known_role(message) for message in messages],
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        return text, model.tokenizer.encode(text, add_special_tokens=False)

    return await beside(size, work)


def _check_message(index: int, message: Mapping[str, Any]) -> int:
    """Refuse what no template reads. Returns how long its text is."""
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise InvalidRequest(f"messages[{index}].role is {shown(role)}; it must be one of {', '.join(ROLES)}")
    if content is None:
        if not message.get("tool_calls"):
            raise InvalidRequest(f"messages[{index}].content is missing; only messages with tool_calls have none")
        return 0
    if isinstance(content, str):
        return len(content)
    if not isinstance(content, list):
        raise InvalidRequest(f"messages[{index}].content is {shown(content)}; it must be a string or a list of parts")
    return sum(_check_part(f"messages[{index}].content[{number}]", part) for number, part in enumerate(content))


def _check_part(where: str, part: Any) -> int:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else part
        raise InvalidRequest(f"{where}.type is {shown(kind)}; only 'text' is supported")
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where}.text is {shown(part.get('text'))}; it must be a string")
    return len(part["text"])


def _with_known_role(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Templates know the system role; developer is its newer name."""
    return {**message, "role": "system"} if message["role"] == "developer" else message
