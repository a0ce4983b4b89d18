"""Waits for the requests of an engine that ended to come back."""

from collections.abc import Callable, Container, Iterable

from quire.ipc.messages import PORT_SHIFT

GATHER_S = 2.0


class Gathering:
    """The requests that have not come back, and how long they are waited for. Owned by the engine thread."""

    def __init__(self, request_ids: Iterable[int], clock: Callable[[], float]) -> None:
        self._missing = set(request_ids)
        self._clock = clock
        self._complete_ports: set[int] = set()
        self._until_s: float | None = None  # from the first command on

    def __bool__(self) -> bool:
        return bool(self._missing)

    @property
    def due_in_s(self) -> float | None:
        """Seconds until it ends; None before the first command."""
        return None if self._until_s is None else self._until_s - self._clock()

    def note_all_resumed(self, number: int) -> None:
        """A front end has sent all requests that it brings back."""
        self._complete_ports.add(number)

    def goes_on(self, live: Container[int], preparing: Container[int]) -> bool:
        """True while requests are missing: they may come, or are being prepared, and there is time."""
        self._missing = {
            one
            for one in self._missing
            if one in preparing or (one not in live and one >> PORT_SHIFT not in self._complete_ports)
        }
        if self._until_s is None:
            self._until_s = self._clock() + GATHER_S
        return bool(self._missing) and self._clock() < self._until_s

    def end(self) -> None:
        self._missing.clear()
