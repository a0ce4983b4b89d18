"""A worker with several engines: which of them it sends what, and what becomes of requests when one ends."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import Overloaded
from quire.ipc.messages import Abort, AllResumed, Failed, PromptBlocks, Submit
from quire.request import FinishReason
from quire.server.http import health
from quire.server.service.routing import most_load
from quire.server.service.stream import Stream
from tests.server.engine_ports import Worker, in_loop
from tests.server.test_engine_health import stats


@in_loop
def test_requests_are_divided_among_engines():
    worker = Worker(4)
    for number in range(40):
        worker.ask(*range(number, number + 100))
    counts = [len(port.asked) for port in worker.ports]
    assert sum(counts) == 40
    assert max(counts) <= most_load(min(counts))
    assert min(counts) >= 8


@in_loop
def test_a_request_of_an_engine_that_ends_goes_on_with_another_at_once():
    worker = Worker()
    stream = worker.ask()
    first = worker.engine_of(stream)
    assert first is not None
    worker.send(first, 11, 12, 13)
    assert worker.engine_lost(first) == (1, 0)
    (again,) = worker.ports[1 - first].of(Submit)
    assert again.so_far == [[11, 12, 13]]  # so that no limit of the queue refuses it
    assert again.request.seed == 7
    worker.send(1 - first, 14, finish=FinishReason.LENGTH)
    assert stream.num_tokens == 4
    assert stream.is_over


@in_loop
def test_an_engine_that_comes_back_is_told_when_all_that_come_back_have_come():
    worker = Worker()
    number = worker.engine_of(worker.ask())
    worker.engine_lost(number)
    assert worker.connect(number).sent == [AllResumed()]
    worker.engine_lost(1 - number)
    worker.engine_lost(number)
    assert [type(command) for command in worker.connect(1 - number).sent] == [Submit, AllResumed]


@in_loop
def test_a_request_that_was_with_two_engines_when_they_ended_waits_for_the_second():
    """The second engine searches for the request at fault. A third one is not risked."""
    worker = Worker(3)
    stream = worker.ask()
    first = worker.engine_of(stream)
    worker.engine_lost(first)
    second = worker.engine_of(stream)
    assert worker.engine_lost(second) == (0, 1)
    (third,) = {0, 1, 2} - {first, second}
    assert not worker.ports[third].asked
    worker.connect(first)
    assert worker.ports[first].asked == []
    assert worker.connect(second).asked == [1]


@in_loop
def test_a_request_that_waits_for_an_engine_that_is_given_up_fails_and_the_others_do_not():
    worker = Worker(3)
    stream, other = worker.ask(1), worker.ask(2)
    worker.engine_lost(worker.engine_of(stream))
    second = worker.engine_of(stream)
    worker.engine_lost(second)
    worker.service.disconnect("it ends again and again", second)
    assert stream.error is not None
    assert stream.error.message == "it ends again and again"
    assert other.error is None
    assert not worker.service.is_permanently_down


@in_loop
def test_requests_of_an_engine_go_on_elsewhere_also_where_its_end_is_heard_of_as_its_last():
    worker = Worker()
    stream = worker.ask()
    number = worker.engine_of(stream)
    worker.service.disconnect("it ends again and again", number)
    assert stream.error is None
    assert worker.ports[1 - number].asked == [1]


@in_loop
def test_while_there_is_no_engine_requests_wait_for_the_first_that_comes():
    worker = Worker()
    worker.ask(1)
    worker.engine_lost(0)
    worker.engine_lost(1)
    worker.ask(2)
    assert worker.service.why_not_ready == (
        "engine 0: the engine process has ended, and is started again; "
        "engine 1: the engine process has ended, and is started again"
    )
    port = worker.connect(1)
    assert 2 in port.asked
    assert worker.service.why_not_ready is None


def refusal(request_id: int, retry_after_s: float) -> Failed:
    return Failed.from_error(request_id, Overloaded("the queue is full", retry_after_s))


@in_loop
def test_a_request_that_one_engine_has_no_room_for_goes_to_another():
    worker = Worker(3)
    stream = worker.ask()
    asked = []
    for wait_s in (9.0, 4.0):
        asked.append(worker.engine_of(stream))
        worker.service.on_messages([refusal(1, wait_s)], engine=asked[-1])
        assert stream.error is None
    asked.append(worker.engine_of(stream))
    assert sorted(asked) == [0, 1, 2]
    assert all(port.of(Submit)[0].so_far is None for port in worker.ports)  # each may refuse it
    worker.service.on_messages([refusal(1, 6.0)], engine=asked[-1])
    assert isinstance(stream.error, Overloaded)
    assert stream.error.retry_after_s == 4.0  # the first that has room again


@in_loop
def test_a_request_that_has_begun_keeps_its_tokens_if_an_engine_refuses_it():
    worker = Worker(3)
    stream = worker.ask()
    worker.send(worker.engine_of(stream), 11, 12)
    worker.engine_lost(worker.engine_of(stream))
    worker.service.on_messages([refusal(1, 2.0)], engine=worker.engine_of(stream))
    (again,) = worker.ports[worker.engine_of(stream)].of(Submit)
    assert again.so_far == [[11, 12]]


@in_loop
def test_a_request_that_is_refused_for_another_reason_is_not_tried_elsewhere():
    worker = Worker()
    stream = worker.ask()
    worker.service.on_messages([Failed(1, "generation", 424, "no")], engine=worker.engine_of(stream))
    assert stream.error is not None
    assert sum(len(port.asked) for port in worker.ports) == 1


@in_loop
def test_a_client_that_leaves_is_aborted_where_its_request_is():
    worker = Worker()
    stream = worker.ask()
    number = worker.engine_of(stream)
    stream.close()
    assert [port.of(Abort) for port in worker.ports][number] == [Abort(1)]
    assert not worker.ports[1 - number].sent


@in_loop
def test_new_requests_avoid_an_engine_that_is_stuck_or_searches():
    for reported in ({"num_running": 1, "waited_s": 99.0}, {"is_searching": True}):
        worker = Worker()
        worker.service.on_messages([stats(**reported)], engine=0)
        worker.service.on_messages([stats()], engine=1)
        for number in range(8):
            worker.ask(number)
        assert (len(worker.ports[0].asked), len(worker.ports[1].asked)) == (0, 8)
        worker.engine_lost(1)
        worker.ask(99)
        assert worker.ports[0].asked[-1] == 9  # it is all there is


@in_loop
def test_the_sequences_of_other_workers_count():
    worker = Worker(http_workers=2)
    worker.service.on_messages([stats(num_running=30)], engine=0)
    worker.service.on_messages([stats()], engine=1)
    for number in range(8):
        worker.ask(number)
    assert len(worker.ports[1].asked) == 8


@in_loop
def test_workers_tell_each_other_what_they_send():
    one, other = Worker(http_workers=2), Worker(http_workers=2)
    prompt = tuple(range(40)) * 10
    number = one.engine_of(one.ask(*prompt))
    (told,) = one.ports[number].of(PromptBlocks)
    other.service.on_messages([told], engine=number)
    for question in range(5):
        assert other.engine_of(other.ask(*prompt, question)) == number


@in_loop
def test_one_engine_is_not_chosen_and_hashed_for():
    worker = Worker(1, http_workers=2)
    worker.ask(*range(200))
    assert worker.service.engines._placements[1].blocks == ()
    assert [type(command) for command in worker.ports[0].sent] == [Submit]


def test_health_has_the_state_of_each_engine():
    async def ask() -> None:
        worker = Worker()
        worker.engine_lost(1)
        answer = await health.ready(worker.service, None)
        assert answer.status_code == 200
        why = "the engine process has ended, and is started again"
        assert answer.body == b'{"engines":[{"engine":0,"reason":null},{"engine":1,"reason":"%s"}]}' % why.encode()
        worker.engine_lost(0)
        assert (await health.ready(worker.service, None)).status_code == 503

    asyncio.run(ask())


@pytest.mark.parametrize("number", [1, 2, 3])
def test_statistics_are_summed(number):
    async def ask() -> None:
        worker = Worker(number)
        for engine in range(number):
            worker.service.on_messages([stats(num_running=2 + engine, num_waiting=1)], engine=engine)
        found = worker.service.stats
        assert found is not None
        assert (found.num_running, found.num_waiting) == (sum(range(2, 2 + number)), number)
        assert found.num_pages == number * stats().num_pages

    asyncio.run(ask())


steps = st.lists(
    st.tuples(st.sampled_from(["ask", "token", "finish", "leave", "lose", "connect", "refuse"]), st.integers(0, 20)),
    max_size=60,
)


@settings(max_examples=150)
@given(st.integers(1, 4), steps)
def test_every_request_is_with_one_engine_or_waits(num_engines, steps):
    async def act() -> None:
        worker = Worker(num_engines)
        engines = worker.service.engines
        streams: dict[int, Stream] = {}
        for name, choice in steps:
            number = choice % num_engines
            live = [key for key in streams if key in engines.prompts]
            request_id = live[choice % len(live)] if live else None
            placed = None if request_id is None else engines._placements[request_id].engine
            if name == "ask":
                stream = worker.ask(*range(choice, choice + 70))
                streams[stream.prompts[0].request.request_id] = stream
            elif name == "lose" and engines[number].port is not None:
                worker.engine_lost(number)
            elif name == "connect" and engines[number].port is None:
                worker.connect(number)
            elif request_id is None or (name != "leave" and (placed is None or placed.port is None)):
                continue  # there is no engine that could say it
            elif name == "leave":
                streams[request_id].close()
            elif name == "refuse" and not streams[request_id].num_tokens:
                worker.service.on_messages([refusal(request_id, 1.0)], engine=placed.number)
            elif name in ("token", "finish"):
                finish = FinishReason.LENGTH if name == "finish" else None
                worker.send(placed.number, choice, finish=finish, request_id=request_id)
            check(worker)
        for number in range(num_engines):
            if engines[number].port is None:
                worker.connect(number)
        assert not engines.waiting()
        for stream in streams.values():
            stream.close()
        check(worker)
        assert all(abs(engine.load) < 1e-6 and not engine.num_sequences for engine in engines)

    asyncio.run(act())


def check(worker: Worker) -> None:
    engines = worker.service.engines
    assert engines.prompts.keys() == engines._placements.keys()
    for engine in engines:
        placements = [one for one in engines._placements.values() if one.engine is engine]
        if len(engines) > 1:
            assert engine.num_sequences == sum(one.num_sequences for one in placements)
            assert engine.load == pytest.approx(sum(one.weight for one in placements))
    for request_id, placement in engines._placements.items():
        engine = placement.engine
        if engine is None:
            assert not engines.is_any_connected
        elif engine.port is not None:
            assert request_id in worker.ports[engine.number].asked, "it is not where it is said to be"
        else:
            assert len(engines) == 1 or placement.num_ends > 1, "it waits although others could go on with it"
