"""Frames between members: what one end sends the other one gets, and anything else ends the link."""

import hashlib
import queue
import socket
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.group.arrays import DTYPES, from_message, to_message
from quire.group.handshake import Keys
from quire.group.link import MAX_FRAME_BYTES, Link, LinkLost
from quire.group.messages import Array, Begin, Ping, Pong, Prepare, RunProgram, ToLeader, ToMember
from tests.patience import WAIT_S

LEADER = Keys(b"l" * 32, b"m" * 32)
MEMBER = Keys(LEADER.theirs, LEADER.ours)

KEYS = st.lists(st.integers(0, 2**31) | st.booleans() | st.text(max_size=8), max_size=4)
ARRAYS = st.builds(Array, st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 9), max_size=3), st.binary())
MESSAGES = (
    st.builds(Ping, st.integers(0, 2**60))
    | st.builds(Begin, st.text(), st.integers(2, 1024))
    | st.builds(Prepare, KEYS)
    | st.builds(RunProgram, KEYS, st.lists(st.none() | ARRAYS, max_size=3), st.integers(0, 4))
)


def linked() -> tuple["Link[ToLeader]", "Link[ToMember]", socket.socket]:
    """Both ends, and the member's socket."""
    ours, theirs = _connected()
    return Link(ours, LEADER, ToLeader), Link(theirs, MEMBER, ToMember), theirs


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


@given(st.lists(MESSAGES, max_size=8))
def test_messages_arrive_as_they_were_sent(messages):
    leader, member, _ = linked()
    try:
        for message in messages:
            leader.send(message)
        assert [member.receive() for _ in messages] == messages
    finally:
        leader.close()
        member.close()


@given(MESSAGES, st.data())
def test_a_frame_that_was_altered_anywhere_ends_the_link(message, data):
    ours, theirs = _connected()
    leader: Link[ToLeader] = Link(ours, LEADER, ToLeader)
    leader.send(message)
    frame = bytearray(theirs.recv(1 << 20))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    into, out = _connected()
    member: Link[ToMember] = Link(out, MEMBER, ToMember)
    into.sendall(frame)
    into.shutdown(socket.SHUT_WR)
    with pytest.raises(LinkLost):
        member.receive()
    for end in (ours, theirs, into, out):
        end.close()


def test_a_frame_that_is_sent_twice_ends_the_link():
    ours, theirs = _connected()
    leader: Link[ToLeader] = Link(ours, LEADER, ToLeader)
    leader.send(Ping(1))
    frame = theirs.recv(1000)
    into, out = _connected()
    member: Link[ToMember] = Link(out, MEMBER, ToMember)
    into.sendall(frame + frame)
    assert member.receive() == Ping(1)
    with pytest.raises(LinkLost, match="altered"):
        member.receive()


def test_a_frame_that_is_sent_back_ends_the_link():
    leader, _, theirs = linked()
    leader.send(Ping(1))
    theirs.sendall(theirs.recv(1000))
    with pytest.raises(LinkLost, match="altered"):
        leader.receive()


@given(st.lists(MESSAGES | st.binary(max_size=100_000), max_size=6))
def test_bytes_and_messages_arrive_in_their_order(sent):
    leader, member, _ = linked()
    try:
        for one in sent:
            if isinstance(one, bytes):
                leader.send_bytes(memoryview(one))
            else:
                leader.send(one)
        for one in sent:
            buffer = memoryview(bytearray(100_000))
            received = member.receive_into(buffer)
            assert (bytes(buffer[:received]) if isinstance(received, int) else received) == one
    finally:
        leader.close()
        member.close()


def test_bytes_in_place_of_a_message_end_the_link():
    leader, member, _ = linked()
    leader.send_bytes(memoryview(b"no message"))
    with pytest.raises(LinkLost, match="the limit is 0"):
        member.receive()


def test_a_frame_that_claims_to_be_long_takes_no_memory():
    leader, _, theirs = linked()
    theirs.sendall(struct.pack("<I", MAX_FRAME_BYTES + 1) + bytes(16))
    with pytest.raises(LinkLost, match="the limit is"):
        leader.receive()


def test_a_message_of_the_other_direction_ends_the_link():
    leader, member, _ = linked()
    member.send(Ping(1))
    with pytest.raises(LinkLost, match="cannot be read"):
        leader.receive()


def test_pickles_and_deep_nesting_are_no_messages():
    for payload in (b"\x80\x04\x95", b"\x91" * 100_000):
        leader, _, theirs = linked()
        tag = hashlib.blake2b(struct.pack("<Q", 0), key=LEADER.theirs, digest_size=16)
        tag.update(payload)
        theirs.sendall(struct.pack("<I", len(payload)) + tag.digest() + payload)
        with pytest.raises(LinkLost, match="cannot be read"):
            leader.receive()


def test_the_end_is_told_once():
    leader, _, theirs = linked()
    told: queue.Queue[str] = queue.Queue()
    leader.start(lambda message: None, told.put)
    theirs.close()
    assert "closed" in told.get(timeout=WAIT_S)
    with pytest.raises(LinkLost):
        leader.send(Pong(1))  # it was shut with the end that was told
    assert told.empty()


def test_a_link_that_is_closed_tells_nothing():
    leader, member, _ = linked()
    told: list[str] = []
    leader.start(lambda message: None, told.append)
    leader.close()
    with pytest.raises(LinkLost):
        member.receive()
    assert told == []


@given(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=3))
def test_arrays_arrive_as_they_were_sent(dtype, shape):
    array = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape).astype(dtype)
    found = from_message(to_message(array))
    assert found.dtype == array.dtype
    assert np.array_equal(found, array)


@given(ARRAYS | st.builds(Array, st.text(max_size=9), st.lists(st.integers(), max_size=3), st.binary()))
def test_bytes_that_are_no_array_are_refused(message):
    try:
        found = from_message(message)
    except ValueError:
        return
    assert found.nbytes == len(message.data)
    assert list(found.shape) == message.shape
