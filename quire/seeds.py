"""The seeds of requests that name none."""

import hashlib
import secrets
from collections.abc import Iterator
from itertools import count


class Seeds:
    """Random seeds; with a seed of its own, those that follow from it, one after the other."""

    def __init__(self, seed: int | None = None, numbers: Iterator[int] | None = None) -> None:
        """`numbers` are 0, 1, 2 and so on, where others count along."""
        self._seed = seed
        self._numbers = None if seed is None else numbers or count()

    def draw(self) -> int:
        if self._numbers is None:
            return secrets.randbits(63)
        digest = hashlib.sha256(f"{self._seed} {next(self._numbers)}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1
