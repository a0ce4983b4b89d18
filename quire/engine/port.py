"""A front end's connection to the driver."""

from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple, Protocol

from quire.ipc.messages import PORT_SHIFT, Command, Event

Deliver = Callable[[list[Event]], None]  # called on the engine thread, so it must return at once
Post = Callable[["Port", "Command | Order | Task"], None]


class Order(Enum):
    """A port opens or closes."""

    OPEN = auto()
    CLOSE = auto()


class Task(NamedTuple):
    """Something that the engine thread does between two steps. It must return soon, and raise nothing."""

    run: Callable[[], None]


class Port:
    """One front end's connection to the driver. Any thread may use it."""

    def __init__(self, post: Post, number: int, deliver: Deliver) -> None:
        self.number = number
        self.deliver = deliver
        self._post = post

    def request_id(self, count: int) -> int:
        """The id of this port's `count`-th request: unique among all ports, and names its port."""
        return self.number << PORT_SHIFT | count

    def send(self, command: Command) -> None:
        """Every Submit gets an answer: events that end with a finished update for each sample, or Failed."""
        self._post(self, command)

    def run(self, task: Task) -> None:
        self._post(self, task)

    def close(self) -> None:
        """Abort the requests of this port, ignore later commands, and deliver nothing more."""
        self._post(self, Order.CLOSE)


class Ports(Protocol):
    """The driver, as far as those need it that are no front ends."""

    def open(self, deliver: Deliver, number: int | None = None) -> Port: ...

    def post(self, port: Port, command: "Command | Order | Task") -> None: ...
