"""A member of a group: connects to the leader, joins, and receives its work."""

import contextlib
import logging
import queue
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from quire.group.handshake import DEADLINE_S, HandshakeFailed, enter
from quire.group.link import Link, LinkLost
from quire.group.messages import Begin, Join, JoinRefused, NotNow, Ping, Pong, ToMember
from quire.settings.group import GroupSettings

log = logging.getLogger(__name__)

RETRY_S = 0.5
RETRY_REFUSED_S = 2.0  # a complete group has to end first
TELL_EVERY_S = 30.0


class RefusedByLeader(Exception):
    """Trying again cannot help."""


class CannotJoinNow(LinkLost):
    """The leader has no place for this member for the time being."""


class Membership:
    """A member's link to its leader. Messages wait in `inbox`; pings are answered at once, whatever the member does."""

    def __init__(self, link: "Link[ToMember]", lost: Callable[[str], None]) -> None:
        self._link = link
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        link.start(self._hear, lost)

    def send(self, message: Any) -> None:
        with contextlib.suppress(LinkLost):  # `lost` has been called
            self._link.send(message)

    def next(self, *kinds: type) -> Any:
        """Wait for the next message, which must be one of these kinds. Raises RefusedByLeader where it is a refusal."""
        message = self.inbox.get()
        if isinstance(message, JoinRefused):
            raise RefusedByLeader(message.reason)
        if not isinstance(message, kinds):
            raise RuntimeError(f"the leader sent {type(message).__name__} out of order")
        return message

    def _hear(self, message: ToMember) -> None:
        if isinstance(message, Ping):
            self.send(Pong(message.number))
        else:
            self.inbox.put(message)


def join(settings: GroupSettings, facts: Mapping[str, str], lost: Callable[[str], None]) -> tuple[Membership, Begin]:
    """Connect to the leader, for as long as that takes, and wait until the group is complete.

    `lost` is called, on another thread, when the leader is lost from then on. Raises RefusedByLeader.
    """
    secret = settings.secret()
    told_s, problem_told = 0.0, ""
    while True:
        try:
            link = _connect(settings, secret)
            link.send(Join(settings.group_rank, dict(facts)))
            begin = _wait_for_begin(link, settings)
            return Membership(link, lost), begin
        except (OSError, HandshakeFailed, LinkLost) as error:
            problem = str(error)
            if problem != problem_told or time.monotonic() - told_s > TELL_EVERY_S:
                log.info("waiting for the leader at %s: %s", settings.group_address, problem)
                told_s, problem_told = time.monotonic(), problem
            time.sleep(RETRY_REFUSED_S if isinstance(error, CannotJoinNow) else RETRY_S)


def _connect(settings: GroupSettings, secret: bytes) -> "Link[ToMember]":
    connection = socket.create_connection(settings.endpoint, timeout=DEADLINE_S)
    try:
        return Link(connection, enter(connection, secret), ToMember)
    except BaseException:
        connection.close()
        raise


def _wait_for_begin(link: "Link[ToMember]", settings: GroupSettings) -> Begin:
    has_joined = False
    try:
        while True:
            message = link.receive()
            if isinstance(message, JoinRefused):
                raise RefusedByLeader(message.reason)
            if isinstance(message, NotNow):
                raise CannotJoinNow(message.reason)
            if not isinstance(message, (Ping, Begin)):
                raise LinkLost(f"the leader sent {type(message).__name__} before the group was complete")
            if not has_joined:  # the first message that is no refusal
                log.info("joined the group at %s as member %d", settings.group_address, settings.group_rank)
                has_joined = True
            if isinstance(message, Begin):
                break
            link.send(Pong(message.number))
    except BaseException:
        link.close()
        raise
    return message
