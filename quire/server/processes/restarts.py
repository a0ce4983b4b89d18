"""Delays between restarts of a process."""

QUICK_S = 30.0  # a process that was ready for longer than this has worked; its end does not count as quick
FIRST_DELAY_S, MAX_DELAY_S = 0.1, 5.0
MAX_FAILED_STARTS = 5
SEARCH_FACTOR = 3  # ends during a search that are not counted, in units of `max_quick`


class Restarts:
    """Counts the quick ends of one process in a row, and backs off. Has no clock."""

    def __init__(self, max_quick: int) -> None:
        self._max_quick = max_quick
        self.num_quick = 0
        self._num_searches = 0
        self._num_failed_starts = 0

    def delay_s(self, ready_s: float | None, was_searching: bool = False) -> float | None:
        """Seconds until the next start; None to give up. `ready_s`: how long it was ready, None for never.

        An engine that ended while it searched for the request that ends engines came closer to it. A number of those
        ends are not counted.
        """
        if ready_s is not None and ready_s >= QUICK_S:
            self.num_quick = self._num_searches = 0
        if ready_s is not None and was_searching and self._num_searches < SEARCH_FACTOR * self._max_quick:
            self._num_searches += 1
            return 0.0
        self._num_failed_starts = self._num_failed_starts + 1 if ready_s is None else 0
        self.num_quick += 1
        if self.num_quick > self._max_quick or self._num_failed_starts > MAX_FAILED_STARTS:
            return None
        if self.num_quick == 1:
            return 0.0  # most processes end only once
        return float(min(FIRST_DELAY_S * 2 ** (self.num_quick - 2), MAX_DELAY_S))
