"""A log line for each refused request, limited in rate."""

import logging
import time
from collections.abc import Callable

from quire.errors import QuireError
from quire.server.caller import key_name, request_id

log = logging.getLogger(__name__)

MAX_LINES = 50  # at once; as many again within `REFILL_S`
REFILL_S = 10.0
_MAX_PARAM = 100
_MAX_PATH = 200


class RefusalLog:
    """Writes what was refused and why, never the values that the client sent: of an address the beginning of its path,
    where no route has it, and never its query. Owned by the event loop.

    A client in a loop does not fill the disk: beyond `MAX_LINES` refusals are counted, and the next line has their
    number.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lines_left = float(MAX_LINES)
        self._looked_s = clock()
        self._num_unwritten = 0

    def note(self, route: str, status: int, error: QuireError, *, path: str | None = None) -> None:
        now = self._clock()
        self._lines_left = min(MAX_LINES, self._lines_left + (now - self._looked_s) * MAX_LINES / REFILL_S)
        self._looked_s = now
        if self._lines_left < 1:
            self._num_unwritten += 1
            return
        self._lines_left -= 1
        details: dict[str, object] = {"route": route, "status": status, "kind": error.kind}
        if path is not None:
            details["path"] = path[:_MAX_PATH]
        if error.param is not None:
            details["param"] = error.param[:_MAX_PARAM]
        if key_name.get():
            details["key"] = key_name.get()
        details["request_id"] = request_id.get()
        if self._num_unwritten:
            details["refused_without_a_line"], self._num_unwritten = self._num_unwritten, 0
        log.log(logging.WARNING if status >= 500 else logging.INFO, "request refused", extra=details)
