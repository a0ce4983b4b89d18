"""A crowd of clients of one server, with what strikes it meanwhile, to their end."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from quire.models.registry import build_model
from quire.server.settings import ServerSettings
from tests.chaos.server import Server, wait_until
from tests.crossings.client_requests import ADAPTERS, REQUESTS, ClientAnswer, ClientRequest, Clients, Json, comparable
from tests.models.adapter_files import write_adapter
from tests.patience import WAIT_S
from tests.tiny_chat_model import CONFIG, write_tiny_chat_model

if TYPE_CHECKING:
    from tests.crossings.capability import Capability

SIZES = {
    "max_batch_size": 8, "max_batch_prefill_tokens": 64, "page_size": 32, "max_total_tokens": 768, "dtype": "float32",
}  # fmt: skip
LEVEL = re.compile(r"\d\d:\d\d:\d\d (WARNING|ERROR|CRITICAL) (.*)")
_SETTINGS = frozenset(field.name for field in fields(ServerSettings))


@dataclass(frozen=True)
class ServedModel:
    name: str
    adapters: str  # as `lora_adapters` has them
    programs: Path

    @classmethod
    def written(cls, folder: Path, programs: Path) -> "ServedModel":
        """Descriptions of tools fit its context, and requests wait for adapters, of which it has more than slots."""
        config = {"max_position_embeddings": 1024}
        name = write_tiny_chat_model(folder, **config)
        model = build_model(CONFIG | config)
        written = [write_adapter(folder / one, model, seed=seed) for seed, one in enumerate(ADAPTERS)]
        return cls(name, ",".join(f"{path.name}={path}" for path in written), programs)

    def server(self, config: Mapping[str, Any], settings: Mapping[str, Any]) -> Server:
        sizes = SIZES | {"cache_dir": str(self.programs), "lora_adapters": [self.adapters], "max_loras": 2}
        return Server("model", self.name, config=sizes | config, settings=settings)


class ServedCrowd:
    """A server that is made with `capabilities`, and all of `REQUESTS` at once."""

    def __init__(self, model: ServedModel, capabilities: "Sequence[Capability]") -> None:
        self.capabilities = capabilities
        self.has_ended = False
        self.cuts_connections = False
        self.answers = [ClientAnswer() for _ in REQUESTS]
        self._leaving = sum(getattr(one, "num_leaving", 0) for one in capabilities)
        given: dict[str, Any] = {"served_model_name": "tiny"}
        for one in capabilities:
            given |= one.config
        self._keys = given["api_key"].split(",") if "api_key" in given else []
        settings = {name: value for name, value in given.items() if name in _SETTINGS}
        config = {name: value for name, value in given.items() if name not in _SETTINGS}
        self.server = model.server(config, settings)

    def run(self) -> list[Json | None]:
        """The answers, without what differs in every run; None for one that was not heard to its end. Raises where
        anything is not as it should be."""
        try:
            self.server.wait().wait_until_healthy()
            with ThreadPoolExecutor(1) as thread:
                asking = thread.submit(lambda: asyncio.run(self._ask_all()))
                for one in self.capabilities:
                    if (strike := getattr(one, "strike", None)) is not None:
                        strike(self)
                asking.result()  # clients wait for so long that only a defect takes longer
            answers = [self._judged(*pair) for pair in zip(REQUESTS, self.answers, strict=True)]
            if self.has_ended:
                self.server.process.wait(WAIT_S)
            else:
                self.server.wait_until_idle()  # with every page free or cached
        finally:
            status = self.server.stop()
        assert status == 0, f"the server ended with {status}"
        self._check_log()
        return answers

    async def _ask_all(self) -> None:
        clients = Clients(self.server.url, self._keys)
        leaving = [one for one in REQUESTS if one.fold is not None][: self._leaving]
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=WAIT_S, limits=limits) as client, asyncio.TaskGroup() as group:
            for number, (request, answer) in enumerate(zip(REQUESTS, self.answers, strict=True)):
                answer.leaves = request in leaving
                group.create_task(clients.ask(client, request, number, answer))

    # What strikes do

    def wait_for_text(self) -> None:
        """Until a few answers have begun."""
        wait_until(lambda: sum(bool(one.events or one.body) for one in self.answers) >= 3)

    def signal(self, name: str, number: int) -> None:
        assert self.server.kill(name, number=number) or self.server.kill(f"{name}-0", number=number)

    def end(self) -> None:
        """As a service manager does. Answers that have begun come to their end, later requests are refused."""
        self.has_ended = True
        self.server.process.terminate()

    # The assertions

    def _judged(self, request: ClientRequest, answer: ClientAnswer) -> Json | None:
        if answer.leaves or (answer.was_cut and self.cuts_connections):
            return None
        if self.has_ended and not answer.events and (answer.was_cut or answer.status in (0, 503)):
            return None  # it came too late, or asked too late for its answer
        if self.cuts_connections and request.body.get("background") and answer.error is not None:
            return None  # it ended with its worker, and where that was the only one its memory of responses, too
        told = answer.body or answer.events[-3:]
        assert answer.status == 200, f"{request}: {answer.status}, {told}"
        assert answer.error is None, f"{request}: {answer.error}"
        assert not answer.was_cut, f"{request}: the connection ended after {told}"
        return comparable(answer.body if request.fold is None else request.fold(answer.events))

    def _check_log(self) -> None:
        explained = [pattern for one in self.capabilities for pattern in one.explains]
        found = [match[2] for line in self.server.log.lines() if (match := LEVEL.match(line))]
        unexplained = [line for line in found if not any(re.match(pattern, line) for pattern in explained)]
        assert not unexplained, f"nothing explains these lines of the log: {unexplained}"
