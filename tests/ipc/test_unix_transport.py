"""Connections to engines that end in the moment in which they begin."""

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import Callable

import pytest
import uvloop

from quire.ipc.client import EngineClient, connect
from quire.ipc.server import new_address

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


async def connected(address: str, lost: asyncio.Event) -> EngineClient:
    """A connection to an engine; `lost` is set when it ends."""
    return await connect(address, 1, lambda messages: None, lambda reason: lost.set())


@contextlib.contextmanager
def listening():
    with new_address() as address, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        yield address, listener


async def turns_of_the_loop() -> None:
    """In which a transport that has ended closes its descriptor."""
    for _ in range(5):
        await asyncio.sleep(0)


def others() -> list[socket.socket]:
    """Connections that take the next numbers, as those of clients do."""
    return [one for _ in range(8) for one in socket.socketpair()]


def check_open(connections: list[socket.socket]) -> None:
    for one in connections:
        os.fstat(one.fileno())
        one.close()


@pytest.mark.parametrize("new_loop", LOOPS.values(), ids=LOOPS)
def test_an_engine_that_ends_while_it_is_connected_to_takes_no_other_connection_with_it(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def act() -> None:
        lost = asyncio.Event()
        with listening() as (address, listener):
            connecting = asyncio.create_task(connected(address, lost))
            await asyncio.sleep(0)  # it has connected, and its transport has not begun
            listener.close()
            client: EngineClient | None = await connecting
            await lost.wait()
            await turns_of_the_loop()
            connections = others()
            del connecting
            client = None  # noqa: F841  the next connection takes its place
            gc.collect()
            check_open(connections)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(act())


@pytest.mark.parametrize("new_loop", LOOPS.values(), ids=LOOPS)
def test_nor_does_an_engine_that_is_given_up_in_that_moment(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def act() -> None:
        with listening() as (address, _):
            connecting = asyncio.create_task(connected(address, asyncio.Event()))
            await asyncio.sleep(0)
            connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await connecting
            await turns_of_the_loop()
            connections = others()
            del connecting
            gc.collect()
            check_open(connections)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(act())
