"""Requests whose grammar takes long to compile."""

import time

import msgspec
import pytest

from quire.core.scheduler import Scheduler
from quire.engine.driver import Driver
from quire.engine.engine import Engine
from quire.ipc.messages import Abort, Command, Failed, Submit
from quire.request import FinishReason
from tests.core.harness import limits
from tests.engine.test_driver import Client
from tests.engine.test_grammar_masks import expected, guided
from tests.engine.toy_grammars import ToyGrammars, toy
from tests.fake_executor import FakeExecutor
from tests.patience import WAIT_S

SLOW = toy(5)


def started(grammars: ToyGrammars) -> Driver:
    chosen = limits(num_pages=200, max_batch_size=8)
    engine = Engine(Scheduler(chosen, time.monotonic), FakeExecutor(200, 4, 8), grammars=grammars)
    driver = Driver(engine)
    driver.start()
    return driver


def test_others_go_on_while_a_grammar_is_compiled():
    grammars = ToyGrammars(slow=[SLOW])
    driver = started(grammars)
    client = Client(driver)
    slow = guided(client.port.request_id(1), grammar=SLOW)
    client.port.send(Submit(slow))
    others = [client.submit(count, max_tokens=9) for count in (2, 3)]
    client.wait_for(*others)
    assert slow.request_id not in client.tokens
    grammars.compiling[SLOW].set_result(None)
    client.wait_for(slow)
    assert client.tokens[slow.request_id] == expected(slow)
    assert driver.stop(join_s=WAIT_S)


def test_what_is_aborted_meanwhile_is_not_begun():
    grammars = ToyGrammars(slow=[SLOW])
    driver = started(grammars)
    client = Client(driver)
    gone = guided(client.port.request_id(1), grammar=SLOW)
    client.port.send(Submit(gone))
    client.port.send(Abort(gone.request_id))
    client.wait_for(client.submit(2))
    grammars.compiling[SLOW].set_result(None)
    client.wait_for(client.submit(3, max_tokens=20))
    assert gone.request_id not in client.tokens
    assert driver.stop(join_s=WAIT_S)


def test_an_id_that_comes_back_meanwhile_is_the_new_request():
    grammars = ToyGrammars(slow=[SLOW])
    driver = started(grammars)
    client = Client(driver)
    number = client.port.request_id(1)
    client.port.send(Submit(guided(number, grammar=SLOW, seed=1)))
    client.port.send(Abort(number))
    again = guided(number, grammar=SLOW, seed=2)
    client.port.send(Submit(again))
    client.wait_for(client.submit(2))
    grammars.compiling[SLOW].set_result(None)
    client.wait_for(again)
    assert client.tokens[number] == expected(again)
    assert driver.stop(join_s=WAIT_S)


def test_a_grammar_that_turns_out_wrong_is_refused():
    wrong = toy(5).__class__(SLOW.kind, "no number")
    grammars = ToyGrammars(slow=[wrong])
    driver = started(grammars)
    client = Client(driver)
    asked = guided(client.port.request_id(1), grammar=wrong)
    client.port.send(Submit(asked))
    grammars.compiling[wrong].set_result(None)
    client.wait_for(asked)
    assert client.ended[asked.request_id].kind == "validation"
    assert driver.stop(join_s=WAIT_S)


def test_a_driver_that_stops_meanwhile_tells_of_it():
    driver = started(ToyGrammars(slow=[SLOW]))
    client = Client(driver)
    asked = guided(client.port.request_id(1), grammar=SLOW)
    client.port.send(Submit(asked))
    assert driver.stop(join_s=WAIT_S)
    client.wait_for(asked)
    assert isinstance(client.ended[asked.request_id], Failed)


def test_an_answer_goes_on_after_it_was_compiled():
    grammars = ToyGrammars(slow=[SLOW])
    driver = started(grammars)
    client = Client(driver)
    asked = guided(client.port.request_id(1), grammar=SLOW)
    whole = expected(asked)
    client.port.send(Submit(asked, so_far=[whole[:2]]))
    grammars.compiling[SLOW].set_result(None)
    client.wait_for(asked)
    assert client.tokens[asked.request_id] == whole[2:]
    assert client.ended[asked.request_id] in (FinishReason.END, FinishReason.LENGTH)
    assert driver.stop(join_s=WAIT_S)


@pytest.mark.parametrize("field", ["timeout_s", "queue_timeout_s"])
def test_a_request_ends_at_its_deadline_while_its_grammar_is_compiled(field):
    grammars = ToyGrammars(slow=[SLOW])
    driver = started(grammars)
    client = Client(driver)
    asked = guided(client.port.request_id(1), grammar=SLOW, **{field: 0.05})
    client.port.send(Submit(asked))
    client.wait_for(asked)
    assert client.ended[asked.request_id].kind == "deadline_exceeded"
    flag = "--request-timeout-s" if field == "timeout_s" else "--queue-timeout-s"
    assert f"the limit of 0.05 s, {flag}, passed" in client.ended[asked.request_id].message
    grammars.compiling[SLOW].set_result(None)  # which nobody waits for any more
    client.wait_for(client.submit(2))
    assert asked.request_id not in client.tokens
    assert driver.stop(join_s=WAIT_S)


def test_the_time_that_its_grammar_took_counts_against_the_deadline_of_a_request():
    now = 100.0
    grammars = ToyGrammars(slow=[SLOW])
    chosen = limits(num_pages=200, max_batch_size=8)
    engine = Engine(Scheduler(chosen, lambda: now), FakeExecutor(200, 4, 8), 0, grammars, clock=lambda: now)
    driver = Driver(engine)
    driver.start(own_thread=False)
    client = Client(driver)
    asked = guided(client.port.request_id(1), grammar=SLOW, max_tokens=30, timeout_s=10.0)
    client.port.send(Submit(asked))
    other = client.submit(2, max_tokens=30)  # so that there is a step in every turn
    driver.turn()
    now += 8.0
    grammars.compiling[SLOW].set_result(None)
    driver.turn()
    assert engine.scheduler.has(asked.request_id)
    now += 3.0
    driver.turn()
    client.wait_for(asked)
    assert (
        client.ended[asked.request_id].message
        == "the limit of 10 s, --request-timeout-s, passed before the answer was complete"
    )
    assert other.request_id not in client.ended


@pytest.mark.parametrize("grammar", [SLOW, None])
def test_the_time_before_a_request_was_submitted_counts_against_its_deadline(grammar):
    now = 100.0
    engine = Engine(
        Scheduler(limits(num_pages=200, max_batch_size=8), lambda: now),
        FakeExecutor(200, 4, 8),
        lookahead=0,
        grammars=ToyGrammars(slow=[SLOW]),
        clock=lambda: now,
    )
    driver = Driver(engine)
    driver.start(own_thread=False)
    client = Client(driver)
    asked = guided(client.port.request_id(1), grammar=grammar, max_tokens=30, timeout_s=10.0)
    client.port.send(Submit(asked, waited_s=8.0))
    client.submit(2, max_tokens=30)  # so that there is a step in every turn
    driver.turn()
    assert asked.request_id not in client.ended
    now += 3.0
    driver.turn()
    client.wait_for(asked)
    assert client.ended[asked.request_id].kind == "deadline_exceeded"


def test_grammars_survive_msgpack():
    message = Submit(guided(7))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Command) == message
