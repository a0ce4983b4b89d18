"""A request on its way to the engine."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

from quire.errors import QuireError
from quire.server.caller import key_name, request_id
from quire.server.observe.times import RequestTimes

TIMINGS_HEADER = "x-quire-timings"
_YES = ("1", "true", "yes")


class Arrival:
    """A request's times, route and headers, before it has a stream."""

    def __init__(self, headers: Mapping[str, str], route: str = "", opened_s: float | None = None) -> None:
        """`opened_s`: its moment of arrival; None for now."""
        self.times = RequestTimes(time.monotonic() if opened_s is None else opened_s)
        self.headers = headers
        self.route = route
        self.request_id = request_id.get()
        self.key_name = key_name.get()
        self.status_of: Callable[[QuireError], int] = lambda error: error.status  # of an answer that is this error
        self.wants_timings = headers.get(TIMINGS_HEADER, "").lower() in _YES

    @contextlib.contextmanager
    def tokenising(self) -> Iterator[None]:
        """Count the time inside as tokenising."""
        begun_s = time.monotonic()
        try:
            yield
        finally:
            self.times.tokenising_s += time.monotonic() - begun_s
