"""The precedence of two names of one setting, where both were given."""

import enum
from collections.abc import Mapping


class Source(enum.IntEnum):
    """Source of a value. Higher ones override lower ones."""

    DEFAULT = 0
    FILE = 1
    ALIAS = 2  # a variable of another program
    VARIABLE = 3  # QUIRE_…
    OPTION = 4


class Precedence:
    """The source of each setting and flag."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = sources

    def __getitem__(self, name: str) -> Source:
        return self._sources.get(name, Source.DEFAULT)
