"""Both ends of a connection decode any bytes or refuse them, and every message arrives."""

import asyncio
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.plan import Guesses
from quire.errors import InvalidRequest
from quire.ipc.client import EngineClient
from quire.ipc.decoding import decode_commands, decode_events
from quire.ipc.framing import Frames, frame
from quire.ipc.messages import Abort, Failed, Hello, Progress, StepTrace, Submit, TokenLogprobs, Update
from quire.ipc.server import FrontEndConnection
from quire.request import FinishReason, Grammar, GrammarKind, Request, SamplingParams

MAX_CPU_S = 5.0  # of this process, for a few frames; most take microseconds, and the largest a part of a second

ids = st.integers(0, 2**63 - 1)
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=6)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
logprobs = st.builds(
    TokenLogprobs,
    st.floats(-1e6, 0),
    st.lists(ids, max_size=3).map(tuple),
    st.lists(st.floats(-1e6, 0), max_size=3).map(tuple),
)
updates = st.builds(
    Update,
    ids,
    st.integers(0, 127),
    tokens,
    st.none() | st.sampled_from(FinishReason),
    st.integers(0, 10_000),
    st.none() | st.lists(logprobs, max_size=2),
    st.none() | st.lists(logprobs, max_size=2),
    st.none() | st.builds(Guesses, st.integers(0, 127), st.integers(0, 127)),
)
events = st.lists(
    st.builds(Progress, st.lists(updates, max_size=3))
    | st.builds(Failed, ids, texts, st.integers(100, 599), texts, st.none() | st.floats(0, 600))
    | st.builds(
        StepTrace, ids, texts, ids, ids, *[st.floats(0, 1e9)] * 3, st.booleans(), *[st.lists(ids, max_size=3)] * 2
    ),
    max_size=4,
)
requests = st.builds(
    Request,
    ids,
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8).map(tuple),
    st.integers(0, 100),
    st.builds(SamplingParams, st.floats(0, 10), logit_bias=st.dictionaries(st.integers(0, 99), st.floats(-100, 100))),
    seed=st.integers(0, 2**64 - 1),
    samples=st.integers(1, 4),
    salt=texts,
)
commands = st.lists(
    st.builds(Submit, requests, st.none() | st.lists(st.none() | tokens, max_size=3))
    | st.builds(Abort, ids)
    | st.builds(Hello, st.integers(1, 2**22 - 1)),
    max_size=4,
)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | texts | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=12,
)


def payload(data: bytes) -> bytes:
    (found,) = Frames().feed(data)
    return found


@given(events)
def test_events_arrive_as_they_were(sent):
    assert decode_events(payload(frame(sent))) == sent


@given(commands)
def test_commands_arrive_as_they_were(sent):
    assert decode_commands(payload(frame(sent))) == sent


class Process:
    """As much of an engine process as a connection that never gets ready looks at."""

    greetings = ()

    def __init__(self) -> None:
        self.joined: set[FrontEndConnection] = set()

    def join(self, front_end: FrontEndConnection) -> None:
        self.joined.add(front_end)

    def leave(self, front_end: FrontEndConnection) -> None:
        self.joined.discard(front_end)


class Transport(asyncio.WriteTransport):
    """Remembers whether it was given up."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = False
        self.written = b""

    def is_closing(self) -> bool:
        return self.aborted

    def write(self, data: bytes) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        self.aborted = True


nonsense = st.one_of(
    st.binary(max_size=60),
    plain.map(frame),
    st.lists(plain, max_size=3).map(frame),
    # What is almost right: a message with one byte of another.
    st.tuples(commands.map(frame) | events.map(frame), st.integers(0, 200), st.integers(0, 255)).map(
        lambda made: made[0][: made[1] % len(made[0])] + bytes([made[2]]) + made[0][made[1] % len(made[0]) + 1 :]
    ),
)


def raw(data: bytes) -> bytes:
    """A frame of any bytes."""
    return struct.pack("<I", len(data)) + data


LARGE = 200_000
NESTED = b"\x91" * LARGE + b"\x00"  # arrays of one element
SUBMITTED = msgspec.msgpack.encode([Submit(Request(1, (1,), 1))])
LARGE_FRAMES = {
    "nested arrays": raw(NESTED),
    "nested maps": raw(b"\x81\xa1a" * LARGE + b"\x00"),
    "a message with a nested field too many": raw(SUBMITTED[:1] + bytes([SUBMITTED[1] + 1]) + SUBMITTED[2:] + NESTED),
    "a long text": frame(["a" * 4 * 2**20]),
    "many numbers": frame([list(range(LARGE))]),
    "many messages": frame([Abort(number) for number in range(LARGE)]),
    "a long prompt": frame([Submit(Request(1, tuple(range(LARGE)), 1))]),
    "a long expression": frame(
        [Submit(Request(1, (1,), 1, end_ids=(2,), grammar=Grammar(GrammarKind.REGEX, "\\p{" * 85_000)))]
    ),
    "a frame that never ends": struct.pack("<I", 200 * 2**20) + b"a" * LARGE,
}
nonsense |= st.sampled_from(list(LARGE_FRAMES)).map(LARGE_FRAMES.__getitem__)


@contextmanager
def bounded_work() -> Iterator[None]:
    begun_s = time.process_time()
    yield
    assert time.process_time() - begun_s < MAX_CPU_S


def engine_hears(sent: list[bytes]) -> None:
    """Nothing is raised, and it does not take long."""
    transport = Transport()
    connection = FrontEndConnection(Process())
    with bounded_work():
        connection.connection_made(transport)
        for data in sent:
            if not transport.aborted:
                connection.data_received(data)
        connection.connection_lost(None)


def front_end_hears(sent: list[bytes]) -> None:
    """The same for the other end."""
    transport, lost = Transport(), []
    client = EngineClient(1, lambda messages: None, lost.append)
    with bounded_work():
        client.connection_made(transport)
        for data in sent:
            if not transport.aborted:
                client.data_received(data)
        client.connection_lost(None)
    assert len(lost) == 1


@given(st.lists(nonsense, min_size=1, max_size=4))
@settings(max_examples=200)
def test_an_engine_drops_a_connection_that_sends_nonsense_and_raises_nothing(sent):
    engine_hears(sent)


@given(st.lists(nonsense, min_size=1, max_size=4))
@settings(max_examples=200)
def test_a_front_end_gives_up_an_engine_that_sends_nonsense_and_raises_nothing(sent):
    front_end_hears(sent)


@pytest.mark.parametrize("name", LARGE_FRAMES)
def test_what_is_large_or_nested_deeply_takes_no_longer_than_it_is_long(name):
    data = LARGE_FRAMES[name]
    pieces = [data[at : at + 4096] for at in range(0, len(data), 4096)]  # as a socket gives it
    for sent in ([data], pieces):
        engine_hears(sent)
        front_end_hears(sent)


@given(plain)
def test_what_decodes_is_a_message_or_an_error_that_says_so(value):
    for decode in (decode_events, decode_commands):
        try:
            found = decode(msgspec.msgpack.encode([value]))
        except (msgspec.MsgspecError, InvalidRequest, ValueError):
            continue
        assert isinstance(found, list)
