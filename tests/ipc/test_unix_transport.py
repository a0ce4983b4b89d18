"""Connections to engines that end in the moment in which they begin."""

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import Callable

import pytest
import uvloop

from quire.ipc.address import new_address
from quire.ipc.client import RETRY_S, EngineClient, connect
from quire.ipc.framing import frame
from quire.ipc.messages import Described
from quire.server.processes.engine_line import EngineLine
from tests.patience import WAIT_S

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


class Hears:
    """A front end that waits for news of an engine."""

    def __init__(self) -> None:
        self.described = asyncio.Event()

    def on_described(self, described: Described) -> None:
        self.described.set()

    def on_ready(self, line: EngineLine) -> None: ...

    def on_waiting(self, line: EngineLine, reason: str) -> None: ...

    def on_lost(self, line: EngineLine, reason: str) -> None: ...


@pytest.mark.parametrize("new_loop", LOOPS.values(), ids=LOOPS)
def test_the_next_engine_is_heard_after_one_that_ended_while_it_was_connected_to(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """A worker that sees the end of an engine can still connect to it: the kernel ends connections before listeners."""

    class Engine(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            loop = asyncio.get_running_loop()
            loop.call_later(RETRY_S, transport.write, frame([Described("next", None, (), {})]))  # type: ignore[attr-defined]

    async def act() -> None:
        loop, hears = asyncio.get_running_loop(), Hears()
        with listening() as (address, listener):
            keeping = asyncio.create_task(EngineLine(0, address, 1, hears).keep())
            await asyncio.sleep(0)
            listener.close()
            await turns_of_the_loop()
            following = socket.socket(socket.AF_UNIX)
            following.bind(address)
            server = await loop.create_unix_server(Engine, sock=following)
            await asyncio.wait_for(hears.described.wait(), WAIT_S)
            keeping.cancel()
            server.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(act())
