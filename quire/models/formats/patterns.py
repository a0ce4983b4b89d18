"""Patterns of names of modules, as configs have them. Matching one takes little time, whatever the config says."""

import re

from quire.errors import InvalidCheckpoint, shown
from quire.models.fields import Fields

_MAX_PATTERN = 500
# The time of a match grows by a power with each repeat, and exponentially with a repeated group of repeats.
_MAX_REPEATS = 6
_REPEATED_GROUP = re.compile(r"\)[*+{]")


def checked_pattern(fields: Fields, name: str, text: str) -> re.Pattern[str]:
    """The pattern of a field. Raises with the field's name and the pattern."""
    repeats = sum(map(text.count, "*+{"))
    if len(text) > _MAX_PATTERN or repeats > _MAX_REPEATS or _REPEATED_GROUP.search(text):
        limits = f"{_MAX_PATTERN} characters, {_MAX_REPEATS} repeats and no repeated group"
        raise fields.unsupported(name, f"{shown(text)} is beyond what a pattern may have: {limits}")
    try:
        return re.compile(text)
    except re.error as error:
        raise InvalidCheckpoint(f"config: {name}: {shown(text)} is no pattern: {error}") from error
