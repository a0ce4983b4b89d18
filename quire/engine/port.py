"""A front end's connection to the driver."""

from collections.abc import Callable, Iterator
from enum import Enum, auto

import msgspec

from quire.ipc.messages import PORT_SHIFT, Command, Event, StepTrace

Deliver = Callable[[list[Event]], None]  # called on the engine thread, so it must return at once
Post = Callable[["Port", "Command | Order"], None]


class Order(Enum):
    """A port opens or closes."""

    OPEN = auto()
    CLOSE = auto()


class Port:
    """One front end's connection to the driver. Any thread may use it."""

    def __init__(self, post: Post, number: int, deliver: Deliver) -> None:
        self.number = number
        self.deliver = deliver
        self._post = post

    def request_id(self, count: int) -> int:
        """The id of this port's `count`-th request: unique among all ports, and tells whose it is."""
        return self.number << PORT_SHIFT | count

    def send(self, command: Command) -> None:
        """Every Submit is answered: by events that end with a finished update for each sample, or by Failed."""
        self._post(self, command)

    def close(self) -> None:
        """Abort what this port asked for, ignore what it still sends, and deliver nothing more."""
        self._post(self, Order.CLOSE)


def by_port(trace: StepTrace | None) -> Iterator[tuple[int, StepTrace]]:
    """The numbers of the ports whose requests `trace` names, each with its part of it."""
    if trace is None:
        return
    for number in dict.fromkeys(one >> PORT_SHIFT for one in trace.request_ids):
        request_ids = [one for one in trace.request_ids if one >> PORT_SHIFT == number]
        failed_ids = [one for one in trace.failed_ids if one >> PORT_SHIFT == number]
        yield number, msgspec.structs.replace(trace, request_ids=request_ids, failed_ids=failed_ids)
