"""JSON objects that were cut off, as the arguments of a call in an answer that became too long."""

import json
import re
from typing import Any

_BLANKS = re.compile(r"\s*")


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refused, parse_int=float)  # integers may have any length
_decode = _DECODER.raw_decode


def complete_object(text: str) -> str:
    """The JSON object in `text`, unchanged. A truncated object is closed after its last complete field."""
    try:
        if isinstance(_DECODER.decode(text), dict):
            return text
    except (ValueError, RecursionError):
        pass
    begin = at = _next(text, 0) + 1
    end = begin  # of the last complete field
    try:
        while text[begin - 1 : begin] == "{":
            key, at = _decode(text, _next(text, at))
            at = _next(text, at)
            if not isinstance(key, str) or text[at : at + 1] != ":":
                break
            _, at = _decode(text, _next(text, at + 1))
            after = _next(text, at)
            if text[after : after + 1] not in (",", "}"):
                break  # a number may go on
            end = at
            at = after + 1
    except (ValueError, RecursionError):
        pass
    return f"{{{text[begin:end]}}}"


def _next(text: str, at: int) -> int:
    """Position of the first character from `at` on that is not whitespace."""
    found = _BLANKS.match(text, at)
    return at if found is None else found.end()
