"""The phase of an engine's start, for /health, the page and the log."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.files.progress import Progress, Report

log = logging.getLogger(__name__)

TELL_S = 0.5  # between two messages about one phase
LOG_S = 10.0  # between two lines of the log about it


class StartPhase:
    """Tells the phase of a start, and how far it is. Owned by the thread that builds the engine."""

    def __init__(
        self,
        tell: Callable[[str], None],
        *,
        logs: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`logs`: the log has the phases too."""
        self._tell = tell
        self._logs = logs
        self._clock = clock
        self._told_s = self._logged_s = 0.0

    def begin(self, phase: str) -> None:
        """A new phase, which is told at once."""
        self._told_s = self._logged_s = self._clock()
        self._tell(f"the engine is starting: {phase}")

    def note(self, progress: str) -> None:
        """Tell how far the phase is, at most so often."""
        now = self._clock()
        if now - self._told_s >= TELL_S:
            self._told_s = now
            self._tell(f"the engine is starting: {progress}")
        if self._logs and now - self._logged_s >= LOG_S:
            self._logged_s = now
            log.info("starting: %s", progress)

    def told(self, progress: Progress) -> Progress:
        """`progress`, with each piece of work told as a phase."""

        @contextmanager
        def opened(label: str) -> Iterator[Report]:
            phase = label[:1].lower() + label[1:]
            self.begin(phase)
            with progress(label) as report:

                def both(done: int, total: int) -> None:
                    report(done, total)
                    self.note(f"{phase}, {100 * done // total} %" if total else phase)

                yield both

        return opened
