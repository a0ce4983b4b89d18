"""JSON objects in files."""

import json
from pathlib import Path
from typing import Any

from quire.errors import InvalidCheckpoint
from quire.files.regular_file import read_regular

MAX_BYTES = 32 << 20
MAX_VOCABULARY_BYTES = 256 << 20  # of the files with an entry for each token or tensor
MAX_DEPTH = 64  # of lists and objects in each other; real files have ten
# Each value takes up to a hundred bytes, of which a file of many small ones has two or three.
MAX_VALUES = 1 << 20
MAX_VOCABULARY_VALUES = 1 << 24  # the largest vocabularies have two million, pairs and all


def read_json(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The object in a file; damage is reported with the file's name."""
    try:
        text = read_regular(path, max_bytes)
    except OSError as error:
        raise InvalidCheckpoint(f"{path}: cannot be read: {error.strerror}") from error
    return parse_object(text, str(path), MAX_VOCABULARY_VALUES if max_bytes > MAX_BYTES else MAX_VALUES)


def read_json_if_present(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Like `read_json`; a missing file is an empty object."""
    return read_json(path, max_bytes) if path.exists() else {}


def parse_object(text: bytes, origin: str, max_values: int) -> dict[str, Any]:
    """Parse `text` as a JSON object of up to so many values. Errors name `origin`, the source of the text."""
    num_values = sum(map(text.count, (b",", b":", b"[", b"{")))  # or more
    if num_values > max_values:
        raise InvalidCheckpoint(f"{origin}: {num_values} values of JSON; at most {max_values} are read")
    try:
        found = json.loads(text.decode())
    except RecursionError as error:
        raise _too_deep(origin) from error
    except ValueError as error:
        raise InvalidCheckpoint(f"{origin}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidCheckpoint(f"{origin}: holds a {type(found).__name__}, not an object")
    _refuse_depth(found, origin)
    return found


def _refuse_depth(found: Any, origin: str) -> None:
    """Refuse deep nesting, so that recursive code such as repr and json.dumps is safe."""
    level = [found]
    for _ in range(MAX_DEPTH):
        items = (item for one in level for item in (one.values() if isinstance(one, dict) else one))
        level = [item for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise _too_deep(origin)


def _too_deep(origin: str) -> InvalidCheckpoint:
    return InvalidCheckpoint(f"{origin}: lists and objects are nested more than {MAX_DEPTH} deep")
