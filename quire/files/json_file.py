"""JSON objects in files."""

import json
from pathlib import Path
from typing import Any

from quire.errors import InvalidCheckpoint


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; damage is reported with the file's name."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidCheckpoint(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InvalidCheckpoint(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidCheckpoint(f"{path}: holds a {type(found).__name__}, not an object")
    return found


def read_json_if_present(path: Path) -> dict[str, Any]:
    """As `read_json`; an absent file is an empty object."""
    return read_json(path) if path.is_file() else {}
