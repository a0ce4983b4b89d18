"""The leader of a group: waits for the other members and sends them their work."""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.errors import EngineFailed, InvalidSetting
from quire.group.arrays import HostArray, to_message
from quire.group.facts import difference
from quire.group.handshake import HandshakeFailed, admit
from quire.group.link import PING_S, SILENCE_S, Link, LinkLost
from quire.group.messages import (
    Begin,
    Deploy,
    Devices,
    Join,
    JoinRefused,
    Made,
    MemberFailed,
    NotNow,
    Ping,
    PlainKey,
    Pong,
    Prepare,
    Reset,
    RunProgram,
    ToLeader,
)
from quire.settings.group import MEMBER_LOST, GroupSettings

log = logging.getLogger(__name__)

MAX_STRANGERS = 8  # connections that have not shown that they know the secret; more are dropped
STRANGERS_EVERY_S = 10.0  # in the log
LISTEN_AGAIN_S = 1.0


class Member:
    """Another process of the group, as the leader knows it. Changed under the lock of `Leader`."""

    def __init__(self, rank: int, link: "Link[ToLeader]") -> None:
        self.rank = rank
        self.link = link
        self.host = link.peer
        self.devices: Devices | None = None
        self.num_ponged = 0
        self.made: dict[tuple[Any, ...], str | None] = {}  # by program; the reason where it could not be made

    def __str__(self) -> str:
        return f"member {self.rank} ({self.host})"


class Leader:
    """Implements the executor's `Members`, and the engine's `Group`.

    Until `begin` members may come and go; one that comes later hears that the group is complete. From then on the loss
    of any of them ends this process, through `on_lost`: neither JAX nor its collectives can go on without. Messages are
    sent by the engine's thread and by threads that compile; links have a thread each that reads.
    """

    def __init__(self, settings: GroupSettings, tell: Callable[[str], None] = lambda reason: None) -> None:
        """`tell` is called with what the group waits for."""
        self._settings = settings
        self._tell = tell
        self._members: dict[int, Member] = {}
        self._changed = threading.Condition()
        self._has_begun = False
        self._has_lost = False
        self._is_closed = False
        self._turned_away: set[str] = set()  # hosts that the log has
        self._listener: socket.socket | None = None
        self._num_pings = 0
        self._refusal: str | None = None
        self._told = ""
        self._num_strangers = 0  # that the log does not have yet
        self._stranger_told_s: float | None = None
        # The engine process replaces these once requests can run.
        self.on_lost: Callable[[str], None] = _end_process
        self.on_fault: Callable[[str], None] = self._fail_process

    @property
    def num_others(self) -> int:
        return self._settings.group_size - 1

    # Joining

    def gather(self, facts: Mapping[str, str]) -> None:
        """Return when every member has joined. Waits for any time, and says for which. Listens until `close`."""
        secret = self._settings.secret()
        listener = self._listener = self._listen()
        strangers = threading.Semaphore(MAX_STRANGERS)

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError as error:
                    if self._is_closed:
                        return
                    log.warning("a connection to the group's address cannot be accepted: %s", error)
                    time.sleep(LISTEN_AGAIN_S)
                    continue
                if not strangers.acquire(blocking=False):
                    connection.close()
                    continue
                try:
                    threading.Thread(target=welcome, args=(connection,), name="quire-join", daemon=True).start()
                except RuntimeError as error:  # the system has no more threads; the member connects again
                    log.warning("a connection to the group's address is dropped: %s", error)
                    strangers.release()
                    connection.close()

        def welcome(connection: socket.socket) -> None:
            try:
                self._welcome(connection, secret, facts)
            finally:
                strangers.release()

        threading.Thread(target=accept, name="quire-accept", daemon=True).start()
        threading.Thread(target=self._ping_all, name="quire-ping", daemon=True).start()
        with self._changed:
            while missing := [rank for rank in range(1, self._settings.group_size) if rank not in self._members]:
                self._say_missing(missing)
                self._changed.wait()
            self._has_begun = True
        log.info("the group is complete: %s", ", ".join(map(str, self._in_order())))
        self._tell("the group is complete, and loads the model")

    def _listen(self) -> socket.socket:
        host, port = self._settings.endpoint
        told = False
        while True:
            try:
                family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
                listener = socket.create_server(address[:2], family=family)
            except socket.gaierror as error:  # a name that a cluster may give this host later
                if not told:
                    log.warning("group_address: %s is not known yet (%s); trying again", host, error.strerror)
                told = True
                time.sleep(LISTEN_AGAIN_S)
            except OSError as error:
                raise InvalidSetting(f"group_address: cannot listen on {host}:{port}: {error.strerror}") from error
            else:
                return listener

    def _say_missing(self, missing: list[int]) -> None:
        count, size = len(missing), self._settings.group_size
        which = f"member {missing[0]}" if count == 1 else f"members {', '.join(map(str, missing[:8]))}"
        reason = f"waiting for {which} of {size} at {self._settings.group_address}"
        if reason != self._told:
            log.info("%s", reason)
            self._told = reason
            self._tell(reason)

    def _welcome(self, connection: socket.socket, secret: bytes, facts: Mapping[str, str]) -> None:
        """Admit a connection as a member, or drop it."""
        try:
            link: Link[ToLeader] = Link(connection, admit(connection, secret), ToLeader)
            join = link.receive()
        except (HandshakeFailed, LinkLost, OSError) as error:
            self._note_stranger(str(error))
            connection.close()
            return
        refusal = self._problem(join, facts)
        if refusal is not None or not isinstance(join, Join):
            log.error("a member is refused: %s (%s)", refusal, link.peer)
            with contextlib.suppress(LinkLost):
                link.send(JoinRefused(refusal or ""))
            link.close()
            return
        member = Member(join.rank, link)
        problem = self._add(member)
        if problem is None:
            log.info("%s has joined the group", member)
            return
        with contextlib.suppress(LinkLost):
            link.send(NotNow(problem))
        link.close()
        with self._changed:
            if member.host in self._turned_away:  # it asks again and again
                return
            self._turned_away.add(member.host)
        log.warning("%s is turned away: %s", member, problem)

    def _add(self, member: Member) -> str | None:
        """The reason why it cannot join now, if it cannot."""
        with self._changed:
            if self._has_begun:
                return f"the group is complete: its member {member.rank} is {self._members[member.rank].host}"
            try:
                member.link.start(
                    lambda message: self._hear(member, message), lambda reason: self._lose(member, reason)
                )
            except RuntimeError as error:  # as in `gather`
                return str(error)
            before = self._members.pop(member.rank, None)
            if before is not None:  # it came again, before the end of its last connection was noticed
                before.link.close()
            self._members[member.rank] = member
            self._changed.notify_all()
        return None

    def _note_stranger(self, why: str) -> None:
        """Log rejected connections, limited in rate."""
        with self._changed:
            self._num_strangers += 1
            count, now = self._num_strangers, time.monotonic()
            if self._stranger_told_s is not None and now - self._stranger_told_s < STRANGERS_EVERY_S:
                return
            self._num_strangers, self._stranger_told_s = 0, now
        log.warning("connections to the group's address dropped: %d; the last one: %s", count, why)

    def _problem(self, join: ToLeader, facts: Mapping[str, str]) -> str | None:
        if not isinstance(join, Join):
            return "its first message is no Join"
        if not 0 < join.rank < self._settings.group_size:
            return f"its group_rank is {join.rank}; the group has the ranks 1 to {self.num_others} besides the leader"
        return difference(facts, join.facts)

    # While it runs

    def begin(self, coordinator: str) -> None:
        self._send_all(Begin(coordinator, self._settings.group_size))

    def devices(self) -> list[Devices]:
        """Wait until every member knows its devices."""
        with self._changed:
            self._wait_for(lambda member: member.devices is not None)
            return [member.devices for member in self._in_order() if member.devices is not None]

    def deploy(self, settings: dict[str, Any], sizes: str) -> None:
        self._send_all(Deploy(settings, sizes))

    def prepare(self, key: PlainKey) -> None:
        self._send_all(Prepare(key))

    def confirm(self, key: PlainKey) -> None:
        """Wait until every member has the program. Raises where one cannot make it."""
        name = tuple(key)
        with self._changed:
            self._wait_for(lambda member: name in member.made)
            for member in self._in_order():
                if (reason := member.made[name]) is not None:
                    raise EngineFailed(f"{member} cannot make the program {name}: {reason}")

    def run(self, key: PlainKey, arrays: Sequence[HostArray | None], hidden: int) -> None:
        self._send_all(RunProgram(key, [to_message(array) for array in arrays], hidden))

    def reset(self) -> None:
        self._send_all(Reset())

    def check(self) -> None:
        """Return once every member has answered. Where one does not, its loss has ended the process first."""
        with self._changed:
            number = self._num_pings = self._num_pings + 1
        self._send_all(Ping(number))
        with self._changed:
            self._wait_for(lambda member: member.num_ponged >= number)

    def close(self) -> None:
        self._is_closed = True
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._listener.close()
        for member in self._in_order():
            member.link.close()

    def _wait_for(self, holds: Callable[[Member], bool]) -> None:
        """Wait until `holds` is true of every member. Raises if a member reports that the group cannot work."""
        self._changed.wait_for(lambda: self._refusal is not None or all(map(holds, self._members.values())))
        if self._refusal is not None:
            raise InvalidSetting(self._refusal)

    def _in_order(self) -> list[Member]:
        return [self._members[rank] for rank in sorted(self._members)]

    def _send_all(self, message: Any) -> None:
        for member in self._in_order():
            member.link.send(message)

    def _ping_all(self) -> None:
        """Ping all members, so that neither end falls silent."""
        while True:
            with self._changed:
                self._num_pings += 1
                ping, members = Ping(self._num_pings), self._in_order()
            for member in members:
                with contextlib.suppress(LinkLost):  # `_lose` has been called
                    member.link.send(ping)
            time.sleep(PING_S)

    def _hear(self, member: Member, message: ToLeader) -> None:
        """Handle a message, on the thread of the member's link."""
        if isinstance(message, MemberFailed):
            reason = f"{member} fails: {message.reason}"
            if message.is_permanent:
                with self._changed:
                    self._refusal = reason
                    self._changed.notify_all()
            else:  # not on this thread, which must go on reading
                threading.Thread(target=self.on_fault, args=(reason,), daemon=True).start()
            return
        with self._changed:
            if isinstance(message, Pong):
                member.num_ponged = max(member.num_ponged, message.number)
            elif isinstance(message, Devices):
                member.devices = message
            elif isinstance(message, Made):
                member.made[tuple(message.key)] = message.reason
            self._changed.notify_all()

    def _fail_process(self, reason: str) -> None:
        """While the engine is built: a failed start, unless the failure comes of the loss of another member."""
        self.check()
        log.error("%s", reason)
        logging.shutdown()
        os._exit(1)

    def _lose(self, member: Member, reason: str) -> None:
        with self._changed:
            if not self._has_begun:
                if self._members.get(member.rank) is member:
                    del self._members[member.rank]
                self._changed.notify_all()
                log.warning("%s has left before the group was complete: %s", member, reason)
                return
            if self._refusal is not None:
                return  # it said why, and the engine is refused for that
            if self._has_lost:
                return  # all members are lost with the first
            self._has_lost = True
        self.on_lost(f"the group has lost {member}: {reason}")


def _end_process(reason: str) -> None:
    """While the engine is built. No request runs, so none is to blame. It is not a failed start of the engine's own."""
    log.error("%s; the group begins again", reason)
    logging.shutdown()
    os._exit(MEMBER_LOST)


assert SILENCE_S > 2 * PING_S
