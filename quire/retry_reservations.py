"""Reserves places in the queue for refused clients that retry at their given time."""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

# Range of Retry-After. Clients ignore longer times and retry when they like.
MIN_WAIT_S, MAX_WAIT_S = 1.0, 60.0
LEAD_S = 2.0  # a place is kept from this long before it is due, so that one is free by then
GRACE_S = 10.0  # until this long after
TOGETHER_S = 1.25  # Retry-After has whole seconds, so clients due this close together may arrive at once
MAX_RESERVATIONS = 16_384


class Reservation(NamedTuple):
    due_s: float
    num_places: int


class RetryReservations:
    """Places of a full queue, reserved for clients that retry at their given time.

    Each refused client gets a later time than the one before. Around that time the places it needs are kept from
    newcomers: at most `max_kept`, so that clients that never retry cost the others no more. A client is identified by
    its request, which is the same on a retry; it has one reservation however often it asks. Clients for which there is
    no time within MAX_WAIT_S all get MAX_WAIT_S, and nothing is reserved for them in particular.

    Reservations are in the order in which they are due.
    """

    def __init__(self, max_kept: int, clock: Callable[[], float]) -> None:
        self._max_kept = max_kept
        self._clock = clock
        self._by_client: OrderedDict[int, Reservation] = OrderedDict()
        self._last_due_s = 0.0

    def __len__(self) -> int:
        return len(self._by_client)

    def num_kept_from(self, client: int) -> int:
        """Number of places that `client` may not take: 0 for a client that retries on time."""
        now = self._clock()
        own = self._by_client.get(client)
        if own is not None and own.due_s <= now <= own.due_s + GRACE_S:
            return 0
        self._forget_until(now - GRACE_S)
        num_kept = 0
        for reservation in self._by_client.values():
            if num_kept >= self._max_kept or reservation.due_s > now + LEAD_S:
                break
            num_kept += reservation.num_places
        return min(num_kept, self._max_kept)

    def admitted(self, client: int) -> None:
        """`client` got its places; its reservation ends."""
        self._by_client.pop(client, None)

    def refused(self, client: int, num_places: int, wait_s: float, interval_s: float) -> float:
        """Seconds after which `client` should retry: at least `wait_s`, plus `interval_s` for each place reserved for
        others."""
        now = self._clock()
        self._forget_until(now - GRACE_S)
        own = self._by_client.get(client)
        if own is not None and own.due_s > now:
            return max(MIN_WAIT_S, own.due_s - now)  # it retried too early
        apart_s = num_places * max(interval_s, TOGETHER_S / max(1, self._max_kept))
        due_s = min(max(now + max(MIN_WAIT_S, wait_s), self._last_due_s + apart_s), now + MAX_WAIT_S)
        self._by_client.pop(client, None)
        if len(self._by_client) < MAX_RESERVATIONS:
            self._by_client[client] = Reservation(due_s, num_places)
            self._last_due_s = due_s
        return due_s - now

    def _forget_until(self, due_s: float) -> None:
        while self._by_client and next(iter(self._by_client.values())).due_s < due_s:
            self._by_client.popitem(last=False)

    def check(self) -> None:
        dues = [reservation.due_s for reservation in self._by_client.values()]
        assert dues == sorted(dues), "reservations are not in order"
        assert len(dues) <= MAX_RESERVATIONS
