"""/health/generate asks for a token where the engine is idle, whichever worker's requests keep it busy."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from starlette.responses import Response

from quire.core.plan import Update
from quire.errors import Overloaded
from quire.ipc.messages import Abort, AllResumed, Command, Failed, Progress, Submit
from quire.request import FinishReason
from quire.server.http import health
from quire.server.service.service import Service
from quire.server.settings import ServerSettings
from tests.patience import WAIT_S
from tests.server.test_engine_health import stats
from tests.server.vocabulary import served_model


class Engine:
    """A connection to an engine that answers as a test says."""

    def __init__(self) -> None:
        self.sent: list[Command] = []

    def request_id(self, count: int) -> int:
        return count

    def send(self, command: Command) -> None:
        self.sent.append(command)

    def close(self) -> None: ...

    async def wait_for_request(self) -> int:
        async with asyncio.timeout(WAIT_S):
            while not (submits := [command for command in self.sent if isinstance(command, Submit)]):
                await asyncio.sleep(0.001)
        return submits[0].request.request_id


def answer(send: Callable[[Service, Engine], Awaitable[None]], **first: object) -> tuple[Response, list[Command]]:
    """The answer of a worker that is told of its engine as in `first`, and then as `send` does."""

    async def run() -> tuple[Response, list[Command]]:
        service, engine = Service(served_model(), ServerSettings()), Engine()
        service.connect(engine)
        service.on_messages([stats(**first)])
        asking = asyncio.create_task(health.generates(service, None))
        await send(service, engine)
        return await asyncio.wait_for(asking, 2 * WAIT_S), engine.sent

    return asyncio.run(run())


async def nothing(service: Service, engine: Engine) -> None: ...


def test_nothing_is_asked_of_an_engine_that_other_workers_keep_busy():
    for busy in ({"num_running": 3}, {"num_waiting": 2}):
        response, sent = answer(nothing, **busy)
        assert (response.status_code, sent) == (200, [])
        assert msgspec.json.decode(response.body)["last_step_age_s"] is not None


def test_an_idle_engine_is_asked_for_a_token():
    async def send(service: Service, engine: Engine) -> None:
        request_id = await engine.wait_for_request()
        service.on_messages([Progress([Update(request_id, 0, [1], FinishReason.LENGTH, 0, None, None)])])

    response, sent = answer(send)
    assert response.status_code == 200
    assert [type(command) for command in sent] == [Submit]


def test_what_an_engine_told_that_ended_since_is_no_proof_of_the_next_one():
    async def run() -> list[Command]:
        service, engine = Service(served_model(), ServerSettings()), Engine()
        service.connect(Engine())
        service.on_messages([stats(num_running=3)])
        service.engine_lost("the engine process ended")
        service.connect(engine)
        asking = asyncio.create_task(health.generates(service, None))
        request_id = await engine.wait_for_request()
        service.on_messages([Progress([Update(request_id, 0, [1], FinishReason.LENGTH, 0, None, None)])])
        assert (await asyncio.wait_for(asking, WAIT_S)).status_code == 200
        return engine.sent

    assert [type(command) for command in asyncio.run(run())] == [AllResumed, Submit]


def test_the_work_of_an_engine_that_is_gone_is_no_proof_of_another_that_is_idle():
    async def run() -> list[Command]:
        service, engine = Service(served_model(), ServerSettings(data_parallel=2)), Engine()
        service.connect(Engine(), 0)
        service.connect(engine, 1)
        service.on_messages([stats(num_running=3)], engine=0)
        service.on_messages([stats()], engine=1)
        service.disconnect("the engine process ended, 17 times in a row", 0)
        asking = asyncio.create_task(health.generates(service, None))
        request_id = await engine.wait_for_request()
        service.on_messages([Progress([Update(request_id, 0, [1], FinishReason.LENGTH, 0, None, None)])], engine=1)
        assert (await asyncio.wait_for(asking, WAIT_S)).status_code == 200
        return engine.sent

    assert [type(command) for command in asyncio.run(run())] == [Submit]


def test_an_engine_that_gets_work_meanwhile_and_does_it_is_healthy():
    async def send(service: Service, engine: Engine) -> None:
        await engine.wait_for_request()
        service.on_messages([stats(num_running=4, num_waiting=1, idle_s=0.0)])

    response, sent = answer(send)
    assert response.status_code == 200
    assert [type(command) for command in sent] == [Submit, Abort]  # it is not left in the queue


def test_an_engine_whose_queue_is_full_is_healthy():
    async def send(service: Service, engine: Engine) -> None:
        request_id = await engine.wait_for_request()
        service.on_messages([Failed.from_error(request_id, Overloaded("10 requests wait; the limit is 10", 3.0))])

    assert answer(send)[0].status_code == 200


def test_an_engine_that_fails_the_request_is_not():
    async def send(service: Service, engine: Engine) -> None:
        request_id = await engine.wait_for_request()
        service.on_messages([Failed(request_id, "generation", 424, "the steps of this request fail")])

    response, _ = answer(send)
    assert response.status_code == 503
    assert msgspec.json.decode(response.body)["reason"] == "the steps of this request fail"


def test_all_callers_at_once_share_one_token_and_so_do_those_soon_after():
    async def run() -> None:
        service, engine = Service(served_model(), ServerSettings()), Engine()
        service.connect(engine)
        service.on_messages([stats()])
        asking = [asyncio.create_task(health.generates(service, None)) for _ in range(70)]
        request_id = await engine.wait_for_request()
        service.on_messages([stats(num_running=1, idle_s=3600.0)])  # that is the token that was asked for
        late = asyncio.create_task(health.generates(service, None))
        await asyncio.sleep(0)
        assert not late.done(), "an engine that only has the question has not answered it"
        service.on_messages([Progress([Update(request_id, 0, [1], FinishReason.LENGTH, 0, None, None)])])
        service.on_messages([stats()])
        async with asyncio.timeout(WAIT_S):
            answers = await asyncio.gather(*asking, late, health.generates(service, None))
        assert {answer.status_code for answer in answers} == {200}
        assert [type(command) for command in engine.sent] == [Submit]

    asyncio.run(run())


def test_a_caller_that_leaves_takes_the_answer_from_no_other():
    async def run() -> None:
        service, engine = Service(served_model(), ServerSettings()), Engine()
        service.connect(engine)
        service.on_messages([stats()])
        first, second = (asyncio.create_task(health.generates(service, None)) for _ in range(2))
        request_id = await engine.wait_for_request()
        first.cancel()
        await asyncio.sleep(0)
        service.on_messages([Progress([Update(request_id, 0, [1], FinishReason.LENGTH, 0, None, None)])])
        assert (await asyncio.wait_for(second, WAIT_S)).status_code == 200
        assert [type(command) for command in engine.sent] == [Submit]

    asyncio.run(run())


def test_what_was_found_is_not_said_of_the_next_engine():
    async def run() -> list[Command]:
        service, before, engine = Service(served_model(), ServerSettings()), Engine(), Engine()
        service.connect(before)
        service.on_messages([stats()])
        asking = asyncio.create_task(health.generates(service, None))
        request_id = await before.wait_for_request()
        service.on_messages([Progress([Update(request_id, 0, [1], FinishReason.LENGTH, 0, None, None)])])
        assert (await asyncio.wait_for(asking, WAIT_S)).status_code == 200
        service.engine_lost("the engine process ended")
        service.connect(engine)
        service.on_messages([stats()])
        asking = asyncio.create_task(health.generates(service, None))
        request_id = await engine.wait_for_request()
        service.on_messages([Progress([Update(request_id, 0, [1], FinishReason.LENGTH, 0, None, None)])])
        assert (await asyncio.wait_for(asking, WAIT_S)).status_code == 200
        return engine.sent

    assert [type(command) for command in asyncio.run(run())] == [AllResumed, Submit]
