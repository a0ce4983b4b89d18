"""Metrics of HTTP workers, as the supervisor and each worker know them."""

from collections.abc import Mapping

import msgspec


class Counts(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Metrics of one HTTP worker, for the others: each of them can answer for all."""

    turn: int  # counts up, so that later ones are known from earlier ones
    numbers: dict[str, int]
    histograms: dict[str, tuple[list[int], float]]  # counts by bucket, and the sum
    failures: dict[str, int]
    keys: dict[str, dict[str, int]] = {}  # counts by the name of the API key


class WorkerCounts(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Counts by the numbers of workers. A worker sends its own, the supervisor those to the others, and all that it
    knows to a new one."""

    counts: dict[int, Counts]


class KnownCounts:
    """The latest counts of each worker by its number. Those of a worker that has ended stay: Prometheus reads a counter
    that falls as a restart of the server, and counts what is left of it once more."""

    def __init__(self) -> None:
        self.by_worker: dict[int, Counts] = {}

    def hear(self, counts: Mapping[int, Counts]) -> None:
        for number, heard in counts.items():
            known = self.by_worker.get(number)
            if known is None or heard.turn > known.turn:
                self.by_worker[number] = heard
