"""A thread that owners use by turns."""

import asyncio
import threading

import pytest

from quire.server.service.owner_turns import OwnerTurns
from tests.patience import WAIT_S


def test_an_owner_with_much_work_delays_another_by_one_piece():
    async def run() -> list[str]:
        turns, order, gate = OwnerTurns("test"), [], threading.Event()
        first = asyncio.create_task(turns.run("ada", lambda: gate.wait(WAIT_S)))
        await asyncio.sleep(0)
        much = [turns.run("ada", lambda number=number: order.append(f"ada {number}")) for number in range(20)]
        tasks = [asyncio.create_task(work) for work in much]
        await asyncio.sleep(0)
        others = [turns.run(name, lambda name=name: order.append(name)) for name in ("bob", "cleo", "bob")]
        tasks += [asyncio.create_task(work) for work in others]
        await asyncio.sleep(0)
        assert turns.num_waiting("ada") == 20
        gate.set()
        await asyncio.gather(first, *tasks)
        await turns.all_taken()
        return order

    order = asyncio.run(run())
    assert order[:5] == ["ada 0", "bob", "cleo", "ada 1", "bob"]
    assert order[5:] == [f"ada {number}" for number in range(2, 20)]


def test_an_error_is_that_of_its_work_and_later_work_goes_on():
    def fail() -> None:
        raise ValueError("of this one")

    async def run() -> str:
        turns = OwnerTurns("test")
        with pytest.raises(ValueError, match="of this one"):
            await turns.run("ada", fail)
        assert await turns.run("bob", lambda: "b") == "b"
        return await turns.run("ada", lambda: "a")

    assert asyncio.run(run()) == "a"


def test_work_that_is_cancelled_before_its_turn_is_left_out():
    async def run() -> list[str]:
        turns, done, gate = OwnerTurns("test"), [], threading.Event()
        first = asyncio.create_task(turns.run("ada", lambda: gate.wait(WAIT_S)))
        left = asyncio.create_task(turns.run("ada", lambda: done.append("left")))
        last = asyncio.create_task(turns.run("ada", lambda: done.append("last")))
        await asyncio.sleep(0.01)
        left.cancel()
        gate.set()
        await asyncio.gather(first, last)
        return done

    assert asyncio.run(run()) == ["last"]
