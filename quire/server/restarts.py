"""When a process that ended is started again."""

QUICK_S = 30.0  # a process that was ready for longer had work to do, and its end says nothing about the next one
FIRST_DELAY_S, MAX_DELAY_S = 0.1, 5.0
MAX_FAILED_STARTS = 5


class Restarts:
    """Counts the quick ends of one process in a row, and backs off. Pure: it is told how long things took."""

    def __init__(self, max_quick: int) -> None:
        self._max_quick = max_quick
        self.num_quick = 0
        self._num_failed_starts = 0

    def delay_s(self, ready_s: float | None) -> float | None:
        """How long to wait before the next start; None to give up. `ready_s`: how long it was ready, None for never."""
        if ready_s is not None and ready_s >= QUICK_S:
            self.num_quick = 0
        self._num_failed_starts = self._num_failed_starts + 1 if ready_s is None else 0
        self.num_quick += 1
        if self.num_quick > self._max_quick or self._num_failed_starts > MAX_FAILED_STARTS:
            return None
        if self.num_quick == 1:
            return 0.0  # most ends are the only one
        return float(min(FIRST_DELAY_S * 2 ** (self.num_quick - 2), MAX_DELAY_S))
