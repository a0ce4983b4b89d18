"""Types of the message fields, besides role and content, that any chat template may read."""

from collections.abc import Mapping
from typing import Any

from quire.errors import invalid, shown

_TEXTS = ("name", "tool_call_id", "refusal", "reasoning_content", "reasoning", "thinking")


def check_fields(where: str, message: Mapping[str, Any]) -> None:
    """Refuse fields of the message at `where` that have another type than the API gives them."""
    for key in _TEXTS:
        _check_text(f"{where}.{key}", message.get(key))
    calls = message.get("tool_calls")
    if calls is None:
        return
    if not isinstance(calls, (list, tuple)):
        raise invalid(f"{where}.tool_calls", f"is a {type(calls).__name__}; it must be a list of calls")
    for number, call in enumerate(calls):
        _check_call(f"{where}.tool_calls[{number}]", call)


def _check_call(where: str, call: Any) -> None:
    """Calls of functions, of custom tools, and a name and arguments without an object around them."""
    kind = next((kind for kind in ("function", "custom") if isinstance(call, Mapping) and kind in call), None)
    called = call if kind is None else call[kind]
    if not isinstance(called, Mapping) or (kind is None and "name" not in called):
        raise invalid(where, "is no call; it must be an object with a function")
    for key in ("id", "type"):
        _check_text(f"{where}.{key}", call.get(key))
    inside = where if kind is None else f"{where}.{kind}"
    if not isinstance(called.get("name"), str):
        raise invalid(f"{inside}.name", f"is {shown(called.get('name'))}; it must be a string")
    if kind == "custom":
        _check_text(f"{inside}.input", called.get("input"))
    elif not isinstance(called.get("arguments"), (str, Mapping, type(None))):
        problem = f"is {shown(called['arguments'])}; it must be an object, or a string that is the JSON of one"
        raise invalid(f"{inside}.arguments", problem)


def _check_text(where: str, value: Any) -> None:
    if value is not None and not isinstance(value, str):
        raise invalid(where, f"is {shown(value)}; it must be a string")
