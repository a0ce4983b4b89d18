"""A request on its way to the engine."""

import contextlib
import time
from collections.abc import Iterator, Mapping

TIMINGS_HEADER = "x-quire-timings"
_YES = ("1", "true", "yes")


class Arrival:
    """When a request came, what its tokens took, and what its headers ask for."""

    def __init__(self, headers: Mapping[str, str], route: str = "", opened_s: float | None = None) -> None:
        """`opened_s`: when it came; None for now."""
        self.opened_s = time.monotonic() if opened_s is None else opened_s
        self.tokenising_s = 0.0
        self.headers = headers
        self.route = route
        self.wants_timings = headers.get(TIMINGS_HEADER, "").lower() in _YES

    @property
    def age_s(self) -> float:
        """How long ago it came."""
        return time.monotonic() - self.opened_s

    @contextlib.contextmanager
    def tokenising(self) -> Iterator[None]:
        """What happens inside turns text into tokens."""
        begun_s = time.monotonic()
        try:
            yield
        finally:
            self.tokenising_s += time.monotonic() - begun_s
