"""The keys of messages besides role and content: which are refused, and which nothing reads."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from quire.errors import invalid
from quire.server.api.validation import MAX_NAME, Refusal

_CONTINUE = "see continue_final_message, which can say the same"
_TEXT_ONLY = "only text is supported"
_REFUSED = {
    "audio": Refusal(_TEXT_ONLY),
    "images": Refusal(_TEXT_ONLY, ([],)),
    "videos": Refusal(_TEXT_ONLY, ([],)),
    "function_call": Refusal("see tool_calls, which took its place"),
    "prefix": Refusal(_CONTINUE, (False,)),
    "partial": Refusal(_CONTINUE, (False,)),
}
# Rendered for any template: in its own form, or as text.
_RENDERED = frozenset(
    {"role", "content", "refusal", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking"}
)
_OF_PARTS = frozenset({"type", "text", "refusal"})
_ASKS_NOTHING: tuple[Any, ...] = (None, "", [], {}, False)


def unread_keys(messages: Sequence[Mapping[str, Any]], words: Collection[str], *, strict: bool) -> list[str]:
    """The keys that no template reads, each once. `words` are all words of the templates. In strict mode an error."""
    unread: dict[str, None] = {}
    for index, message in enumerate(messages):
        for key, place in _unread(index, message, words):
            if strict:
                raise invalid(place, "is not a field of messages")
            unread[key] = None
    return list(unread)


def _unread(index: int, message: Mapping[str, Any], words: Collection[str]) -> Iterator[tuple[str, str]]:
    """Each unread key with its path in any message, and in this one."""
    for key, value in message.items():
        if key in _REFUSED:
            _REFUSED[key].check(f"messages[{index}].{key}", value)
        if key in _RENDERED or key in words or value in _ASKS_NOTHING or _is_name_of_result(key, message):
            continue
        yield f"messages[].{key[:MAX_NAME]}", f"messages[{index}].{key[:MAX_NAME]}"
    parts = message.get("content")
    for number, part in enumerate(parts if isinstance(parts, list) else ()):
        for key, value in part.items() if isinstance(part, dict) else ():
            if not (key in _OF_PARTS or key in words or value in _ASKS_NOTHING):
                place = f"messages[{index}].content[{number}].{key[:MAX_NAME]}"
                yield f"messages[].content[].{key[:MAX_NAME]}", place


def _is_name_of_result(key: str, message: Mapping[str, Any]) -> bool:
    """True for the function name of a tool result. The call that it answers has the name too."""
    return key == "name" and message.get("role") in ("tool", "function")


def with_refusals_as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Move the text of an earlier refusal to the content, where the model reads it like any other answer."""
    content = message.get("content")
    if isinstance(content, list) and any(_is_refusal(part) for part in content):
        content = [{"type": "text", "text": part["refusal"]} if _is_refusal(part) else part for part in content]
        message = {**message, "content": content}
    refusal = message.get("refusal")
    if not isinstance(refusal, str) or not refusal:
        return message
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": refusal}]}
    return {**message, "content": f"{content or ''}{refusal}"} if isinstance(content, str | None) else message


def _is_refusal(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "refusal" and isinstance(part.get("refusal"), str)
