"""A connection becomes a link only where both ends know the secret."""

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.group.handshake import GROUP, NONCE_BYTES, PROOF_BYTES, HandshakeFailed, Keys, admit, enter, magic

SECRET = b"0123456789abcdef"


def both(leader: Callable[[socket.socket], Any], member: Callable[[socket.socket], Any]) -> list[Any]:
    """The value that each end returns, or the error that it raises."""
    ours, theirs = socket.socketpair()
    found: list[Any] = [None, None]

    def run(place: int, end: Callable[[socket.socket], Any], connection: socket.socket) -> None:
        try:
            found[place] = end(connection)
        except (HandshakeFailed, OSError) as error:
            found[place] = error
        finally:
            connection.close()

    other = threading.Thread(target=run, args=(1, member, theirs))
    other.start()
    run(0, leader, ours)
    other.join()
    return found


def test_both_ends_get_the_same_keys_crosswise():
    leader, member = both(lambda one: admit(one, SECRET), lambda one: enter(one, SECRET))
    assert leader == Keys(member.theirs, member.ours)
    assert leader.ours != leader.theirs


def test_no_two_connections_have_the_same_keys():
    first, second = (both(lambda one: admit(one, SECRET), lambda one: enter(one, SECRET))[0] for _ in range(2))
    assert not set(first) & set(second)


@given(st.binary(min_size=1), st.binary(min_size=1))
def test_other_secrets_are_refused_at_both_ends(one: bytes, other: bytes):
    leader, member = both(lambda end: admit(end, one), lambda end: enter(end, other))
    if one == other:
        assert isinstance(leader, Keys)
    else:
        assert isinstance(leader, HandshakeFailed)
        assert isinstance(member, HandshakeFailed)


@given(st.binary(max_size=NONCE_BYTES + PROOF_BYTES + 8))
def test_a_stranger_is_refused_whatever_it_sends(data: bytes):
    def stranger(end: socket.socket) -> None:
        end.sendall(data)
        end.shutdown(socket.SHUT_WR)
        end.recv(1000)

    assert isinstance(both(lambda end: admit(end, SECRET), stranger)[0], HandshakeFailed)


@given(st.binary(max_size=len(magic(GROUP)) + NONCE_BYTES + PROOF_BYTES))
def test_a_member_is_not_fooled_by_another_server(data: bytes):
    def stranger(end: socket.socket) -> None:
        end.sendall(data)
        end.shutdown(socket.SHUT_WR)
        while end.recv(1000):
            pass

    assert isinstance(both(stranger, lambda end: enter(end, SECRET))[1], HandshakeFailed)


def test_a_leader_cannot_be_imitated_by_sending_back_what_a_member_sent():
    def mirror(end: socket.socket) -> None:
        end.sendall(magic(GROUP) + bytes(NONCE_BYTES))
        answer = end.recv(NONCE_BYTES + PROOF_BYTES)
        end.sendall(answer[NONCE_BYTES:])

    assert isinstance(both(mirror, lambda end: enter(end, SECRET))[1], HandshakeFailed)


def test_a_stranger_that_sends_nothing_is_dropped():
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(HandshakeFailed):
        admit(ours, SECRET, within_s=0.05)


def test_a_stranger_that_sends_byte_by_byte_has_one_deadline_for_all_of_them():
    stop = threading.Event()

    def trickle(end: socket.socket) -> None:
        try:
            while not stop.wait(0.01):
                end.sendall(b"x")
        except OSError:
            pass

    def leader(end: socket.socket) -> Keys:
        try:
            return admit(end, SECRET, within_s=0.2)
        finally:
            stop.set()

    found = both(leader, trickle)[0]
    assert isinstance(found, HandshakeFailed)
