"""Whatever bytes come, the wire's two ends say what they are or that they are nothing; and what is sent arrives."""

import asyncio

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.client import EngineClient
from quire.engine.front_end import FrontEnd
from quire.engine.messages import Abort, Failed, Progress, StepTrace, Submit, TokenLogprobs, Update
from quire.engine.wire import Counts, Frames, Hello, decode_commands, decode_events, frame
from quire.errors import InvalidRequest
from quire.request import FinishReason, Request, SamplingParams

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
    | st.builds(Hello, st.integers(1, 2**22 - 1))
    | st.builds(Counts, st.dictionaries(texts, ids), st.just({}), st.dictionaries(texts, ids)),
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

    described = broken = driver = metered = None

    def __init__(self) -> None:
        self.joined: set[FrontEnd] = set()

    def join(self, front_end: FrontEnd) -> None:
        self.joined.add(front_end)

    def leave(self, front_end: FrontEnd) -> None:
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


@given(st.lists(nonsense, min_size=1, max_size=4))
@settings(max_examples=200)
def test_an_engine_drops_who_sends_nonsense_and_raises_nothing(sent):
    transport = Transport()
    connection = FrontEnd(Process())
    connection.connection_made(transport)
    for data in sent:
        if not transport.aborted:
            connection.data_received(data)
    connection.connection_lost(None)


@given(st.lists(nonsense, min_size=1, max_size=4))
@settings(max_examples=200)
def test_a_front_end_gives_up_an_engine_that_sends_nonsense_and_raises_nothing(sent):
    transport, lost = Transport(), []
    client = EngineClient(1, lambda messages: None, lost.append)
    client.connection_made(transport)
    for data in sent:
        if not transport.aborted:
            client.data_received(data)
    client.connection_lost(None)
    assert len(lost) == 1


@given(plain)
def test_what_decodes_is_a_message_or_an_error_that_says_so(value):
    for decode in (decode_events, decode_commands):
        try:
            found = decode(msgspec.msgpack.encode([value]))
        except (msgspec.MsgspecError, InvalidRequest, ValueError):
            continue
        assert isinstance(found, list)
