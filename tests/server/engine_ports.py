"""A worker with several engines, of which there are only the connections."""

import asyncio
from collections.abc import Callable

from quire.core.plan import Update
from quire.ipc.messages import Command, Progress, PromptBlocks, Submit
from quire.request import FinishReason, Request
from quire.server.service.generation_spec import GenerationSpec
from quire.server.service.service import Service
from quire.server.service.stream import Stream
from quire.server.settings import ServerSettings
from tests.server.vocabulary import served_model

MODEL = served_model(max_total_tokens=2000)


class Port:
    """A connection to an engine that remembers what it was sent."""

    def __init__(self) -> None:
        self.sent: list[Command | PromptBlocks] = []

    def request_id(self, count: int) -> int:
        return count

    def send(self, command: Command | PromptBlocks) -> None:
        self.sent.append(command)

    def close(self) -> None: ...

    def of(self, kind: type) -> list:
        return [command for command in self.sent if isinstance(command, kind)]

    @property
    def asked(self) -> list[int]:
        return [command.request.request_id for command in self.of(Submit)]


class Worker:
    """A service, and the ports of its engines."""

    def __init__(self, num_engines: int = 2, **changes: object) -> None:
        self.service = Service(MODEL, ServerSettings(data_parallel=num_engines, **changes))
        self.ports = [Port() for _ in range(num_engines)]
        for number in range(num_engines):
            self.connect(number)

    def connect(self, number: int) -> Port:
        port = self.ports[number] = Port()
        self.service.connect(port, number, cache_tokens=100_000)
        return port

    def engine_lost(self, number: int) -> tuple[int, int]:
        return self.service.engine_lost("the engine process has ended, and is started again", number)

    def ask(self, *prompt: int, samples: int = 1) -> Stream:
        """The last sent request has the highest id."""
        asked = Request(0, prompt or (1, 2, 3), 50, samples=samples, seed=7)
        return self.service.open([GenerationSpec(asked)])

    def send(self, number: int, *tokens: int, finish: FinishReason | None = None, request_id: int = 1) -> None:
        update = Update(request_id, 0, list(tokens), finish, 0, None, None)
        self.service.on_messages([Progress([update])], engine=number)

    def engine_of(self, stream: Stream) -> int | None:
        (prompt,) = stream.prompts
        engine = self.service.engines._placements[prompt.request.request_id].engine
        return None if engine is None else engine.number


def in_loop(act: Callable[[], None]) -> Callable[[], None]:
    """A test that runs inside an event loop."""

    async def run_it() -> None:
        act()

    def test() -> None:
        asyncio.run(run_it())

    test.__name__ = act.__name__
    return test
