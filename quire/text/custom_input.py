"""Custom tools: functions with a single string argument."""

import json
import re
from typing import Any

INPUT = "input"
_BEFORE = re.compile(rf'\s*{{\s*"{INPUT}"\s*:\s*"')  # in messages to a function the blanks are the model's own
# Characters and escapes that are complete; the first half of a pair waits for what follows it.
_COMPLETE = re.compile(
    r"""(?: [^"\\] | \\[^u] | \\u(?![dD][89abAB])[0-9a-fA-F]{4}
      | \\u[dD][89abAB][0-9a-fA-F]{2} (?: \\u[0-9a-fA-F]{4} | (?=[^\\]) | (?=\\[^u]) ) )*""",
    re.DOTALL | re.VERBOSE,
)


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
            before = _BEFORE.match(self._held)
            if before is None:
                return ""
            self._is_inside = True
            self._held = self._held[before.end() :]
        found = _COMPLETE.match(self._held)
        assert found is not None, "nothing at all is complete too"
        text, self._held = found[0], self._held[found.end() :]
        self._is_inside = not self._held.startswith('"')
        decoded: str = json.loads(f'"{text}"', strict=False)
        return decoded.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
