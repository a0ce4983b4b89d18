"""The engine's line in the log."""

import logging
from collections.abc import Callable, Mapping

from quire.core.stats import SchedulerStats
from quire.engine.observer import Observer, Step

log = logging.getLogger(__name__)

EVERY_S = 10.0  # of work


class WorkLog(Observer):
    """Writes a line after every ten seconds of steps, so that an idle engine writes none. Owned by the engine thread.

    `tokens` are those computed so far, by kind of step.
    """

    def __init__(self, stats: Callable[[], SchedulerStats], num_pages: int, tokens: Mapping[str, int]) -> None:
        self._stats = stats
        self._num_pages = num_pages
        self._tokens = tokens
        self._tokens_before = dict(tokens)
        self._cached_before = 0
        self._num_steps = 0
        self._worked_s = 0.0

    def step_ended(self, step: Step) -> None:
        self._num_steps += 1
        self._worked_s += step.took_s
        if self._worked_s >= EVERY_S:
            stats = self._stats()
            if log.isEnabledFor(logging.INFO):
                log.info("engine", extra=self._numbers(stats))
            self._tokens_before = dict(self._tokens)
            self._cached_before = stats.cached_tokens
            self._num_steps, self._worked_s = 0, 0.0

    def _numbers(self, stats: SchedulerStats) -> dict[str, float]:
        """Sequences and pages at this moment; rates and shares since the last line."""
        computed = {kind: count - self._tokens_before[kind] for kind, count in self._tokens.items()}
        num_used = self._num_pages - stats.free_pages - stats.cached_pages
        numbers: dict[str, float] = {"running": stats.num_running, "waiting": stats.num_waiting}
        for kind, count in computed.items():
            numbers[f"{kind}_tokens_per_s"] = _short(count / self._worked_s)
        numbers["step_ms"] = _short(1000 * self._worked_s / self._num_steps)
        numbers["pages_used_percent"] = _short(100 * num_used / self._num_pages)
        cached = stats.cached_tokens - self._cached_before
        asked = cached + computed["prefill"]
        if asked:
            numbers["prefix_hit_percent"] = _short(100 * cached / asked)
        return numbers


def _short(number: float) -> float:
    return round(number) if number >= 100 else round(number, 1)
