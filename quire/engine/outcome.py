"""The result of a step, for the requests in it."""

from typing import NamedTuple

from quire.core.plan import Failure, Update


class Outcome(NamedTuple):
    """Changes of requests."""

    updates: list[Update] = []  # noqa: RUF012
    failures: list[Failure] = []  # noqa: RUF012
    finished: list[int] = []  # noqa: RUF012  # requests of which every sample has its last update
