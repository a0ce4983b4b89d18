"""Requests that are on their way into the engine."""

from collections.abc import Callable, Container, Iterable
from typing import NamedTuple

from quire.core.deadlines import Deadline, Deadlines
from quire.core.plan import Failure
from quire.errors import DeadlineExceeded, queue_limit, time_limit
from quire.ipc.messages import PORT_SHIFT, Submit

GATHER_S = 2.0  # for the requests of an engine that ended to come back


class Prepared(NamedTuple):
    """The adapter of a request is read, its grammar compiled, or its pages have come."""

    submit: Submit
    sent_s: float
    stage: int  # that is next


class Preparations:
    """Requests that wait until an adapter is read, a grammar is compiled, or a peer has computed their pages.

    Deadlines count from their arrival. Owned by the engine thread.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[int, tuple[Submit, float]] = {}  # and when its time began, by request
        self._deadlines = Deadlines(clock)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting

    def begin(self, submit: Submit, waited_s: float) -> None:
        """`waited_s`: since its arrival."""
        self._waiting[submit.request.request_id] = submit, self._clock() - waited_s
        self._deadlines.add(submit.request, waited_s)

    def waited_s(self, submit: Submit) -> float | None:
        """Time since the arrival of `submit`; None if it does not wait any more. Another request may have its id."""
        waiting, since_s = self._waiting.get(submit.request.request_id, (None, 0.0))
        return self._clock() - since_s if waiting is submit else None

    def forget(self, request_id: int) -> None:
        if self._waiting.pop(request_id, None) is not None:
            self._deadlines.forget(request_id)

    @property
    def due_in_s(self) -> float | None:
        """Time until the first deadline, 0 or less if it has passed; None if there is none."""
        due_s = self._deadlines.next_s
        return None if due_s is None else due_s - self._clock()

    def expire(self) -> list[Failure]:
        """Failures of the requests past their deadline. They stay until they are forgotten."""
        failures: dict[int, Failure] = {}
        while (due := self._deadlines.pop_due()) is not None:
            request_id, which = due
            request = self._waiting[request_id][0].request
            limit = time_limit(request.timeout_s) if which is Deadline.END else queue_limit(request.queue_timeout_s)
            error = DeadlineExceeded(
                f"{limit} passed before the request's adapter was read, its grammar compiled or its pages received"
            )
            failures.setdefault(request_id, Failure(request_id, error))
        return list(failures.values())


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

    def must_wait(self, live: Container[int], preparing: Container[int]) -> bool:
        """True while requests are missing: they may come, or are being prepared, and there is time."""

        def is_missing(request_id: int) -> bool:
            may_come = request_id not in live and request_id >> PORT_SHIFT not in self._complete_ports
            return request_id in preparing or may_come

        self._missing = set(filter(is_missing, self._missing))
        if self._until_s is None:
            self._until_s = self._clock() + GATHER_S
        return bool(self._missing) and self._clock() < self._until_s

    def end(self) -> None:
        self._missing.clear()
