"""Custom tools: functions with a single string argument."""

from string import hexdigits
from typing import Any

from quire.text.call_scanner import Malformed, Reads, Scanner

INPUT = "input"
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "/": "/"}


def input_parameters(pattern: str | None = None) -> dict[str, Any]:
    """The parameters of the function that a custom tool is for the model."""
    text: dict[str, Any] = {"type": "string"} if pattern is None else {"type": "string", "pattern": f"^(?:{pattern})$"}
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}


class InputText(Scanner):
    """The input in the arguments of a custom tool's call, as they come. What a model writes in place of such arguments
    is the input as it stands, and so is an escape that JSON does not have."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[str] | None = []  # that may be the beginning of arguments
        self._reader = self._read()
        next(self._reader)

    def push(self, arguments: str) -> str:
        """The text that `arguments`, more of them, complete."""
        for char in arguments:
            if self._held is not None:
                self._held.append(char)
            self._reader.send(char)
        return self._taken()

    def flush(self) -> str:
        """The text that was held back, at the end of the arguments."""
        self._give_up()
        return self._taken()

    def _taken(self) -> str:
        text = "".join(self.out)
        self.out.clear()
        return text

    def _give_up(self) -> None:
        held, self._held = self._held or (), None
        self.out += held

    def _read(self) -> Reads[None]:
        try:
            is_empty = yield from self._beginning()
        except Malformed:
            self._give_up()
            while True:
                self.out.append((yield))
        self._held = None
        if not is_empty:
            yield from self.characters('"', self._escape, self.out.append)
        while True:
            yield

    def _beginning(self) -> Reads[bool]:
        """Read up to the text; true if there is none. Blanks are the model's own."""
        yield from self.literal_after_blanks("{")
        char = yield from self.blank()
        if char == "}":
            return True
        self.back(char)
        for part in (f'"{INPUT}"', ":", '"'):
            yield from self.literal_after_blanks(part)
        return False

    def _escape(self) -> Reads[str]:
        char = yield from self.next()
        if char != "u":
            return _ESCAPED.get(char, "\\" + char)
        digits = ""
        while len(digits) < 4:
            char = yield from self.next()
            if char not in hexdigits:
                self.back(char)
                return f"\\u{digits}"
            digits += char
        return chr(int(digits, 16))
