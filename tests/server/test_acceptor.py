"""A burst of connections is accepted at once, and its requests begin by turns."""

import asyncio
import contextlib
import errno
import json
import socket

import pytest
import uvloop

from quire.server.http.acceptor import Acceptor
from quire.server.http.listener import open_listener
from quire.server.http.server import HttpServer
from quire.server.service.arrival_turns import MAX_PER_TURN
from quire.server.service.service import Service
from quire.server.settings import ServerSettings
from tests.patience import WAIT_S
from tests.server.running import new_driver
from tests.server.vocabulary import served_model

NUM_CONNECTIONS = 200
LOOPS = pytest.mark.parametrize(
    "loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)


class Turns:
    """Counts the turns of the event loop, and looks at a number in each."""

    def __init__(self, look=lambda: 0):
        self.count = 0
        self.most_more = 0  # that the number grew by in one
        self._look = look
        self._task = asyncio.create_task(self._run())

    async def _run(self):
        before = self._look()
        while True:
            await asyncio.sleep(0)
            self.count += 1
            now = self._look()
            self.most_more = max(self.most_more, now - before)
            before = now

    def stop(self):
        self._task.cancel()


@contextlib.contextmanager
def listening():
    """A listener, and a function that connects to it and sends something."""
    listener = open_listener("127.0.0.1", 0, shared=False)
    with contextlib.ExitStack() as lines:

        def connect(data=b""):
            line = lines.enter_context(socket.create_connection(listener.getsockname()))
            line.sendall(data)
            line.setblocking(False)
            return line

        yield listener, connect


def request(method, path, body=b""):
    return b"%b %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (
        method, path, len(body), body,
    )  # fmt: skip


@LOOPS
def test_a_scrape_behind_a_burst_waits_for_few_turns(loop_factory):
    """What a turn costs grows with the streams: the burst must not take a turn for each of its connections."""
    settings, driver = ServerSettings(max_concurrent_requests=2 * NUM_CONNECTIONS), new_driver()
    body = json.dumps({"prompt": [3, 4], "max_tokens": 50, "stream": True}).encode()

    async def run(listener, connect):
        for _ in range(NUM_CONNECTIONS):
            connect(request(b"POST", b"/v1/completions", body))
        scraper = connect(request(b"GET", b"/metrics"))
        service = Service(served_model(), settings)
        service.connect(driver.open(service.deliver))
        server = HttpServer(settings)
        server.admit(service)
        turns = Turns(lambda: service.num_streams)
        serving = asyncio.create_task(server.serve([listener]))
        answer = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(scraper, 1 << 18), WAIT_S)
        assert answer.startswith(b"HTTP/1.1 200")
        num_waited = turns.count
        while service.metrics.numbers["tgi_request_success"] < NUM_CONNECTIONS:
            await asyncio.sleep(0.01)
        turns.stop()
        server.stop()
        await serving
        return num_waited, turns.most_more

    driver.start()
    try:
        with listening() as (listener, connect), asyncio.Runner(loop_factory=loop_factory) as runner:
            num_waited, most_begun = runner.run(asyncio.wait_for(run(listener, connect), WAIT_S))
    finally:
        driver.stop()
    assert num_waited < NUM_CONNECTIONS // 4
    assert most_begun <= 2 * MAX_PER_TURN  # those that waited, and those that come just after them


@LOOPS
def test_connections_that_the_system_refuses_are_accepted_later(loop_factory, caplog):
    class FullAtFirst(socket.socket):
        num_tries = 0

        def accept(self):
            self.num_tries += 1
            if self.num_tries == 1:
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    async def run(listener, connect):
        acceptor = Acceptor(listener, Greeting, None, None)
        answer = await asyncio.get_running_loop().sock_recv(connect(), 10)
        acceptor.close()
        await acceptor.wait_closed()
        return answer

    with listening() as (listener, _), asyncio.Runner(loop_factory=loop_factory) as runner:
        full = FullAtFirst(fileno=listener.detach())
        address = full.getsockname()

        def connect_to_full():
            line = socket.create_connection(address)
            line.setblocking(False)
            return line

        assert runner.run(asyncio.wait_for(run(full, connect_to_full), WAIT_S)) == b"hello"
    assert "cannot be accepted: [Errno 24] Too many open files; trying again in 1 s" in caplog.text


@LOOPS
def test_a_closed_acceptor_refuses_connections(loop_factory):
    async def run(listener):
        address = listener.getsockname()
        acceptor = Acceptor(listener, Greeting, None, None)
        acceptor.close()
        await acceptor.wait_closed()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)

    with listening() as (listener, _), asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run(listener))


class Greeting(asyncio.Protocol):
    def connection_made(self, transport):
        transport.write(b"hello")
        transport.close()
