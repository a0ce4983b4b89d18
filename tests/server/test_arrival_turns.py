"""Requests begin a few in each turn of the event loop."""

import asyncio
import itertools

from quire.server.service.arrival_turns import MAX_PER_TURN, ArrivalTurns


async def _begin(turns, number, begun):
    await turns.take()
    begun.append(number)


def test_requests_begin_in_their_order_a_few_in_each_turn():
    async def run():
        turns, begun, counts = ArrivalTurns(), [], []
        tasks = [asyncio.create_task(_begin(turns, number, begun)) for number in range(5 * MAX_PER_TURN)]
        while not all(task.done() for task in tasks):
            counts.append(len(begun))
            await asyncio.sleep(0)
        assert begun == list(range(5 * MAX_PER_TURN))
        assert max(after - before for before, after in itertools.pairwise(counts)) <= MAX_PER_TURN

    asyncio.run(run())


def test_a_request_that_is_given_up_holds_up_no_other():
    async def run():
        turns, begun = ArrivalTurns(), []
        tasks = [asyncio.create_task(_begin(turns, number, begun)) for number in range(3 * MAX_PER_TURN)]
        await asyncio.sleep(0)  # the first have begun, and the others wait
        for task in tasks[MAX_PER_TURN : 2 * MAX_PER_TURN]:
            task.cancel()
        await asyncio.wait(tasks)
        assert begun == [*range(MAX_PER_TURN), *range(2 * MAX_PER_TURN, 3 * MAX_PER_TURN)]
        await turns.take()  # nothing is left over

    asyncio.run(run())
