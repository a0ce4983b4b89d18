"""Who was told to come back, and when."""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

# Of what anybody is told. Clients take longer times for no advice at all, and come back when they like.
MIN_WAIT_S, MAX_WAIT_S = 1.0, 60.0
LEAD_S = 2.0  # so long before it is due a place is kept, for one to be free by then
GRACE_S = 10.0  # so long after it is due
TOGETHER_S = 1.25  # times are told in whole seconds: who is due so soon after another may come with it
MAX_APPOINTMENTS = 16_384


class Appointment(NamedTuple):
    due_s: float
    num_places: int


class Appointments:
    """Places of a line that is full, for those who come back when they were told to.

    Each who is refused is told a later time than the one before, and around that time the places it needs are kept from
    newcomers: `max_kept` at most, so that a crowd that never comes back costs the others no more. A client is known by
    its request, which is the same when it comes back; it has one appointment however often it asks. Nothing is promised
    to those for whom there is no time within MAX_WAIT_S: they are told that, all of them.

    Appointments are kept in the order they are due.
    """

    def __init__(self, max_kept: int, clock: Callable[[], float]) -> None:
        self._max_kept = max_kept
        self._clock = clock
        self._by_client: OrderedDict[int, Appointment] = OrderedDict()
        self._last_due_s = 0.0

    def __len__(self) -> int:
        return len(self._by_client)

    def num_kept_from(self, client: int) -> int:
        """The places that `client` may not take; all are there for one that comes when it was told to."""
        now = self._clock()
        own = self._by_client.get(client)
        if own is not None and own.due_s <= now <= own.due_s + GRACE_S:
            return 0
        self._forget_until(now - GRACE_S)
        num_kept = 0
        for appointment in self._by_client.values():
            if num_kept >= self._max_kept or appointment.due_s > now + LEAD_S:
                break
            num_kept += appointment.num_places
        return min(num_kept, self._max_kept)

    def admitted(self, client: int) -> None:
        """`client` has its places."""
        self._by_client.pop(client, None)

    def refused(self, client: int, num_places: int, wait_s: float, interval_s: float) -> float:
        """In how many seconds `client` is to come back: `wait_s` at least, and `interval_s` more for each place that is
        promised to others."""
        now = self._clock()
        self._forget_until(now - GRACE_S)
        own = self._by_client.get(client)
        if own is not None and own.due_s > now:
            return max(MIN_WAIT_S, own.due_s - now)  # it came too early
        apart_s = num_places * max(interval_s, TOGETHER_S / max(1, self._max_kept))
        due_s = min(max(now + max(MIN_WAIT_S, wait_s), self._last_due_s + apart_s), now + MAX_WAIT_S)
        self._by_client.pop(client, None)
        if len(self._by_client) < MAX_APPOINTMENTS:
            self._by_client[client] = Appointment(due_s, num_places)
            self._last_due_s = due_s
        return due_s - now

    def _forget_until(self, due_s: float) -> None:
        while self._by_client and next(iter(self._by_client.values())).due_s < due_s:
            self._by_client.popitem(last=False)

    def check(self) -> None:
        dues = [appointment.due_s for appointment in self._by_client.values()]
        assert dues == sorted(dues), "appointments are not in order"
        assert len(dues) <= MAX_APPOINTMENTS
