"""Custom tools: functions whose one argument is a text."""

import json
import re
from typing import Any

INPUT = "input"
_BEFORE = f'{{"{INPUT}": "'
_INCOMPLETE = re.compile(r"\\(u[0-9a-fA-F]{0,3})?$|\\u[dD][89abAB][0-9a-fA-F]{2}(\\(u[0-9a-fA-F]{0,3})?)?$")
_END = re.compile(r'(?:[^"\\]|\\.)*"', re.DOTALL)


def input_parameters(pattern: str | None = None) -> dict[str, Any]:
    """The parameters of the function that a custom tool is for the model."""
    text: dict[str, Any] = {"type": "string"} if pattern is None else {"type": "string", "pattern": f"^(?:{pattern})$"}
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}


class InputText:
    """The text in the arguments of a custom tool's call, as they come."""

    def __init__(self) -> None:
        self._held = ""
        self._is_inside = False

    def push(self, arguments: str) -> str:
        """The text that `arguments`, more of them, complete."""
        self._held += arguments
        if not self._is_inside:
            if not self._held.startswith(_BEFORE):
                return ""
            self._is_inside = True
            self._held = self._held[len(_BEFORE) :]
        found = _END.match(self._held)
        if found is not None:
            text, self._held = found[0][:-1], self._held[found.end() :]
            self._is_inside = False
        else:
            incomplete = _INCOMPLETE.search(self._held[-12:])
            size = 0 if incomplete is None else len(incomplete[0])
            text, self._held = self._held[: len(self._held) - size], self._held[len(self._held) - size :]
        decoded: str = json.loads(f'"{text}"', strict=False)
        return decoded.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
