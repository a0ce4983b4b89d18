"""Work for an engine without requests."""

import logging
from collections.abc import Callable

from quire.engine.engine import Engine

log = logging.getLogger(__name__)


class IdleUpkeep:
    """Audits the accounts of pages while the engine is idle: briefly at once, thoroughly after `audit_after_s`.

    Owned by the engine thread.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float], audit_after_s: float) -> None:
        self._engine = engine
        self._clock = clock
        self._audit_after_s = audit_after_s
        self._audits: list[tuple[float, bool]] = []  # when, and whether thoroughly

    def begin(self) -> None:
        """The engine may be idle from here on."""
        now = self._clock()
        self._audits = [(now, False), (now + self._audit_after_s, True)]

    def run(self) -> float | None:
        """Do what is due. Returns the seconds until there is more to do, None where there is not."""
        while self._audits and self._audits[0][0] <= self._clock():
            self._audit(self._audits.pop(0)[1])
        return max(0.0, self._audits[0][0] - self._clock()) if self._audits else None

    def _audit(self, thorough: bool) -> None:
        try:
            self._engine.audit(thorough)
        except Exception:  # a search for faults must not be one
            log.exception("the accounts of pages cannot be looked through")
