"""The engine's line in the log."""

import logging
from collections.abc import Mapping

from quire.core.scheduler import Scheduler

log = logging.getLogger(__name__)

EVERY_S = 10.0  # of work


class WorkLog:
    """Writes a line after every ten seconds of steps, so that an idle engine writes none. Owned by the engine thread.

    `tokens` are those computed so far, of prefills and decodes.
    """

    def __init__(self, scheduler: Scheduler, tokens: Mapping[str, int]) -> None:
        self._scheduler = scheduler
        self._tokens = tokens
        self._tokens_before = dict(tokens)
        self._cached_before = 0
        self._num_steps = 0
        self._worked_s = 0.0

    def add(self, took_s: float) -> None:
        """A step took so long."""
        self._num_steps += 1
        self._worked_s += took_s
        if self._worked_s >= EVERY_S:
            if log.isEnabledFor(logging.INFO):
                log.info("engine", extra=self._numbers())
            self._tokens_before = dict(self._tokens)
            self._cached_before = self._scheduler.counters.cached_tokens
            self._num_steps, self._worked_s = 0, 0.0

    def _numbers(self) -> dict[str, float]:
        """Of the time since the last line, but for those of this moment: sequences and pages."""
        scheduler = self._scheduler
        computed = {kind: count - self._tokens_before[kind] for kind, count in self._tokens.items()}
        num_pages = scheduler.limits.num_pages - 1
        num_used = num_pages - scheduler.num_free_pages - scheduler.num_cached_pages
        numbers: dict[str, float] = {"running": scheduler.num_running, "waiting": scheduler.num_waiting}
        for kind, count in computed.items():
            numbers[f"{kind}_tokens_per_s"] = _short(count / self._worked_s)
        numbers["step_ms"] = _short(1000 * self._worked_s / self._num_steps)
        numbers["pages_used_percent"] = _short(100 * num_used / num_pages)
        cached = scheduler.counters.cached_tokens - self._cached_before
        asked = cached + computed["prefill"]
        if asked:
            numbers["prefix_hit_percent"] = _short(100 * cached / asked)
        return numbers


def _short(number: float) -> float:
    return round(number) if number >= 100 else round(number, 1)
