"""The leader of a group and its members, on real sockets: joining, refusals, and ends."""

import errno
import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quire.errors import EngineFailed, InvalidSetting
from quire.group.leader import MAX_STRANGERS, Leader
from quire.group.membership import Membership, RefusedByLeader, join
from quire.group.messages import Begin, Deploy, Devices, Made, MemberFailed, Prepare, Reset, RunProgram
from quire.settings.group import GroupSettings
from tests.chaos.server import wait_until
from tests.patience import WAIT_S
from tests.server.processes import free_port

FACTS = {"version": "1", "model": "tiny 0123"}
SECRET = "a secret of sixteen"


class Short(socket.socket):
    """A listener without files for a connection, once."""

    fails = True

    def accept(self) -> tuple[socket.socket, Any]:
        if self.fails:
            self.fails = False
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


class Ends:
    """A leader that gathers its group on a thread, and what it says."""

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self.address = f"127.0.0.1:{free_port()}"
        self.told: list[str] = []
        self.leader = Leader(self.settings(0), self.told.append)
        self.lost: queue.Queue[str] = queue.Queue()
        self.faults: queue.Queue[str] = queue.Queue()
        self.leader.on_lost, self.leader.on_fault = self.lost.put, self.faults.put
        self._gathering = threading.Thread(target=self.leader.gather, args=(FACTS,), daemon=True)
        self._gathering.start()

    def settings(self, rank: int, secret: str = SECRET) -> GroupSettings:
        return GroupSettings(self.size, rank, self.address, group_secret=secret)

    def joining(self, rank: int, facts: dict[str, str] | None = None) -> "queue.Queue[Any]":
        """The membership, once the group is complete; or the error."""
        found: queue.Queue[Any] = queue.Queue()

        def run() -> None:
            try:
                found.put(join(self.settings(rank), FACTS if facts is None else facts, lambda reason: None))
            except RefusedByLeader as error:
                found.put(error)

        threading.Thread(target=run, daemon=True).start()
        return found

    def complete(self, *joining: "queue.Queue[Any]") -> list[Membership]:
        """Every member of the group, once it has begun; `joining` are the first of them."""
        joining += tuple(self.joining(rank) for rank in range(1 + len(joining), self.size))
        self._gathering.join(WAIT_S)
        self.leader.begin("127.0.0.1:1")
        found = [one.get(timeout=WAIT_S) for one in joining]
        assert all(begin == Begin("127.0.0.1:1", self.size) for _, begin in found)
        return [membership for membership, _ in found]

    def close(self) -> None:
        self.leader.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    one = Ends()
    yield one
    one.close()


def test_a_group_is_complete_when_every_member_has_joined():
    ends = Ends(size=3)
    wait_until(lambda: ends.told == [f"waiting for members 1, 2 of 3 at {ends.address}"])
    assert len(ends.complete()) == 2
    assert ends.told[-1] == "the group is complete, and loads the model"
    ends.close()


def test_a_member_with_another_model_is_refused_by_name(ends):
    error = ends.joining(1, FACTS | {"model": "tiny 4567"}).get(timeout=WAIT_S)
    assert str(error) == "model of the member: 'tiny 4567'; of the leader: 'tiny 0123'"
    assert len(ends.complete()) == 1  # the right one comes


@pytest.mark.parametrize("facts", [{}, FACTS | {"more": "yes"}])
def test_facts_that_only_one_side_has_are_differences(ends, facts):
    assert isinstance(ends.joining(1, facts).get(timeout=WAIT_S), RefusedByLeader)


def test_a_member_of_a_larger_group_is_refused(ends):
    ends.size = 4
    error = ends.joining(3).get(timeout=WAIT_S)
    assert "its group_rank is 3" in str(error)


def test_strangers_neither_join_nor_keep_members_out(ends, caplog):
    wait_until(lambda: ends.told)  # it listens
    host, port = ends.settings(0).endpoint
    strangers = [socket.create_connection((host, port)) for _ in range(2 * MAX_STRANGERS)]
    for one in strangers[::2]:
        one.sendall(b"GET / HTTP/1.1\r\n\r\n" * 8)
        one.close()
    assert len(ends.complete()) == 1
    for one in strangers:
        one.close()
    told = [record for record in caplog.records if "dropped" in record.message]
    assert len(told) <= 2, "strangers fill the log"


@pytest.mark.parametrize("name", ["quire-join", "quire-link"])
def test_a_member_joins_though_there_is_no_thread_for_it_once(ends, monkeypatch, name):
    """`name`: the thread that welcomes it, or the one that reads what it sends."""
    failed: list[str] = []

    class Short(threading.Thread):
        def start(self) -> None:
            if self.name == name and not failed:
                failed.append(name)
                raise RuntimeError("can't start new thread")
            super().start()

    monkeypatch.setattr(threading, "Thread", Short)
    assert len(ends.complete()) == 1
    assert failed == [name]
    ends.leader.check()  # it is heard


def test_a_member_that_leaves_before_the_group_is_complete_may_come_again():
    ends = Ends(size=3)
    first = ends.joining(1)
    wait_until(lambda: any("waiting for member 2 of 3" in one for one in ends.told))
    member = ends.leader._members[1]
    member.link._connection.shutdown(socket.SHUT_RDWR)  # both ends see it, and the member joins again
    wait_until(lambda: ends.leader._members.get(1) is not member)
    assert len(ends.complete(first)) == 2
    assert ends.lost.empty()
    ends.close()


def test_a_member_that_comes_twice_does_not_replace_the_one_that_the_group_began_with(ends):
    wait_until(lambda: ends.told)
    first, second = ends.joining(1), ends.joining(1)
    wait_until(lambda: ends.told[-1].startswith("the group is complete"))
    ends.leader.begin("127.0.0.1:1")
    wait_until(lambda: not (first.empty() and second.empty()))
    ends.leader.check()
    assert ends.lost.empty()


def test_a_member_that_comes_when_the_group_is_complete_hears_so(ends, caplog):
    caplog.set_level("INFO")
    ends.complete()
    late = ends.joining(1)
    told = "the group is complete: its member 1 is 127.0.0.1"
    wait_until(lambda: f"waiting for the leader at {ends.address}: {told}" in caplog.messages)
    wait_until(lambda: caplog.messages.count(f"member 1 (127.0.0.1) is turned away: {told}") == 1)
    assert late.empty(), "it asks again"
    assert caplog.messages.count(f"joined the group at {ends.address} as member 1") == 1


def test_a_member_with_another_version_hears_so_though_the_group_is_complete(ends):
    ends.complete()
    error = ends.joining(1, FACTS | {"version": "2"}).get(timeout=WAIT_S)
    assert str(error) == "version of the member: '2'; of the leader: '1'"


def test_members_hear_everything_in_its_order(ends):
    (member,) = ends.complete()
    ends.leader.deploy({"dtype": "float32"}, "sizes")
    ends.leader.reset()
    ends.leader.prepare(["start", 1])
    ends.leader.run(["start", 1], [np.arange(3, dtype=np.int32), None], 2)
    heard = [member.next(Deploy, Reset, Prepare, RunProgram) for _ in range(4)]
    assert heard[:3] == [Deploy({"dtype": "float32"}, "sizes"), Reset(), Prepare(["start", 1])]
    assert heard[3].arrays[0].data == np.arange(3, dtype=np.int32).tobytes()
    assert heard[3].hidden == 2


def test_a_program_is_confirmed_when_the_last_member_has_it():
    ends = Ends(size=3)
    members = ends.complete()
    confirmed = threading.Event()
    threading.Thread(target=lambda: (ends.leader.confirm(["any", 4]), confirmed.set()), daemon=True).start()
    members[0].send(Made(["any", 4]))
    members[1].send(Made(["any", 2]))
    wait_until(lambda: ends.leader._members[2].made == {("any", 2): None})
    assert not confirmed.is_set()
    members[1].send(Made(["any", 4]))
    assert confirmed.wait(WAIT_S)
    ends.close()


def test_a_program_that_a_member_cannot_make_is_not_confirmed(ends):
    (member,) = ends.complete()
    member.send(Made(["any", 4], "out of memory"))
    with pytest.raises(EngineFailed, match="out of memory"):
        ends.leader.confirm(["any", 4])


def test_the_leader_knows_the_devices_of_all(ends):
    (member,) = ends.complete()
    member.send(Devices(4, 1 << 30, {"platform": "cpu"}))
    assert ends.leader.devices() == [Devices(4, 1 << 30, {"platform": "cpu"})]


def test_a_member_that_can_never_work_is_the_reason_that_is_told(ends):
    (member,) = ends.complete()
    member.send(MemberFailed("num_pages = 9 needs 3 GiB", is_permanent=True))
    with pytest.raises(InvalidSetting, match=r"member 1 .* num_pages = 9"):
        ends.leader.confirm(["any", 4])


def test_members_that_answer_are_checked(ends):
    ends.complete()
    ends.leader.check()
    assert ends.lost.empty()


def test_a_member_whose_step_fails_is_a_fault_and_no_loss(ends):
    (member,) = ends.complete()
    member.send(MemberFailed("a step failed"))
    assert "a step failed" in ends.faults.get(timeout=WAIT_S)
    ends.leader.check()  # it still answers
    assert ends.lost.empty()


def test_the_end_of_a_member_is_a_loss(ends):
    (member,) = ends.complete()
    member._link._connection.shutdown(socket.SHUT_RDWR)
    assert "the group has lost member 1 (127.0.0.1)" in ends.lost.get(timeout=WAIT_S)


def test_the_loss_of_several_members_at_once_is_told_once():
    before = set(threading.enumerate())
    ends = Ends(size=4)
    for member in ends.complete():
        member._link._connection.shutdown(socket.SHUT_RDWR)
    ends.lost.get(timeout=WAIT_S)
    wait_until(lambda: not any(one.name == "quire-link" for one in set(threading.enumerate()) - before))
    assert ends.lost.empty()
    ends.close()


def test_a_connection_that_cannot_be_accepted_is_not_the_end_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def listen(self: Leader) -> socket.socket:
        listener = Short()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(self._settings.endpoint)
        listener.listen()
        return listener

    monkeypatch.setattr(Leader, "_listen", listen)
    ends = Ends()
    assert len(ends.complete()) == 1
    ends.close()
