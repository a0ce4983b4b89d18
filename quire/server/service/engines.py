"""The engines of a server as one HTTP worker knows them, and the requests that each of them has."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from quire.errors import Overloaded
from quire.ipc.messages import Abort, AllResumed, Command, Failed, PromptBlocks, Stats, Submit
from quire.server.observe.engine_health import EngineHealth
from quire.server.service.open_prompt import OpenPrompt
from quire.server.service.routing import BLOCK_TOKENS, Blocks, EngineRouter, blocks_of, weight_of
from quire.server.service.stream import Stream
from quire.server.settings import ServerSettings

log = logging.getLogger(__name__)

# A request goes on elsewhere after the first end of its engine. After the second one it may be to blame: it waits for
# the engine that ended, which searches its requests for the one at fault.
MAX_ENDS_ELSEWHERE = 1


class Port(Protocol):
    """A connection to an engine, in this process or another."""

    def request_id(self, count: int) -> int: ...

    def send(self, command: Command | PromptBlocks) -> None: ...

    def close(self) -> None: ...


class RemoteEngine:
    """One engine: its connection, what it reports, and the load that it has."""

    def __init__(self, number: int, stuck_after_s: float) -> None:
        self.number = number
        self.port: Port | None = None
        self.why_not = "the engine is starting"
        self.is_gone = False  # only a restart of the server brings it back
        self.stats: Stats | None = None  # the latest
        self.health = EngineHealth(stuck_after_s)
        self.load = 0.0  # of the requests that this worker has sent
        self.num_sequences = 0  # of these requests
        self.num_others = 0  # sequences of other workers
        self.was_lost = False

    def problem(self, now: float) -> str | None:
        """The reason why requests would not be answered; None if they would."""
        return self.why_not if self.port is None else self.health.problem(now)

    @property
    def is_searching(self) -> bool:
        """Most requests wait while it looks for one that makes steps fail."""
        return self.stats is not None and self.stats.is_searching


@dataclass(slots=True)
class Placement:
    """The engine that has a request, or that the request waits for; None if it waits for any."""

    num_sequences: int
    engine: RemoteEngine | None = None
    weight: float = 0.0
    blocks: Blocks = ()
    num_ends: int = 0  # of engines that had it
    refusals: dict[int, Failed] = field(default_factory=dict)  # by number of the engine that had no room


class Engines:
    """Sends each request to one of the engines, and to another one if that ends.

    `prompts` has every prompt from its arrival to its end. Each is with one connected engine, or waits: for any, or for
    the one that it may have ended. Owned by the event loop.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.prompts: dict[int, tuple[OpenPrompt, Stream]] = {}
        self._engines = [RemoteEngine(number, settings.stuck_after_s) for number in range(settings.data_parallel)]
        self._placements: dict[int, Placement] = {}
        self._router = EngineRouter(settings.data_parallel) if settings.data_parallel > 1 else None
        self._num_workers = settings.http_workers
        self.request_id: Callable[[int], int] | None = None  # by the count of a request; None before any engine

    def __iter__(self) -> Iterator[RemoteEngine]:
        return iter(self._engines)

    def __getitem__(self, number: int) -> RemoteEngine:
        return self._engines[number]

    def __len__(self) -> int:
        return len(self._engines)

    @property
    def is_any_connected(self) -> bool:
        return any(engine.port is not None for engine in self._engines)

    def why_not_ready(self, now: float) -> str | None:
        """The reason why no engine would answer; None if one would."""
        problems = [engine.problem(now) for engine in self._engines]
        if None in problems or len(problems) == 1:
            return None if None in problems else problems[0]
        return "; ".join(f"engine {number}: {problem}" for number, problem in enumerate(problems))

    # Engines that come and go

    def connect(self, port: Port, number: int, cache_tokens: int) -> int:
        """Send requests to an engine from now on. Returns how many go on there.

        Those that wait are sent at once, in the order of their arrival, with the tokens that other engines generated.
        Every port gives the same ids.
        """
        engine = self._engines[number]
        engine.port = port
        self.request_id = port.request_id
        if self._router is not None:
            self._router.started(number, cache_tokens // BLOCK_TOKENS)
        num_going_on = 0
        for request_id, placement in self._placements.items():
            if placement.engine is None or placement.engine is engine:
                num_going_on += 1
                self._resume(request_id, placement, engine)
        if engine.was_lost:
            port.send(AllResumed())
        return num_going_on

    def engine_lost(self, number: int, reason: str) -> tuple[int, int]:
        """An engine is gone. Returns how many of its requests go on elsewhere at once, and how many wait."""
        engine = self._engines[number]
        engine.port = None
        engine.num_others = 0
        engine.why_not, engine.was_lost = reason, True
        engine.health.forget()
        if self._router is not None:
            engine.stats = None  # others have its sequences, which would be counted twice
        held = [(key, placement) for key, placement in self._placements.items() if placement.engine is engine]
        num_moved = 0
        for request_id, placement in held if self._router is not None else ():
            placement.num_ends += 1
            placement.refusals.clear()  # which hold for newcomers
            if placement.num_ends <= MAX_ENDS_ELSEWHERE:
                self._unload(placement)
                other = self._choose(placement)
                if other is not None:
                    self._resume(request_id, placement, other)
                    num_moved += 1
        return num_moved, len(held) - num_moved

    def give_up(self, number: int, reason: str) -> list[Stream]:
        """An engine is gone for good. Returns the streams that fail with it: no other engine may have them."""
        engine = self._engines[number]
        if engine.port is not None:  # the news of its end came first
            self.engine_lost(number, reason)
        engine.why_not, engine.is_gone = reason, True
        failing = [key for key, placement in self._placements.items() if placement.engine is engine]
        return list(dict.fromkeys(self.prompts[key][1] for key in failing))

    def on_stats(self, number: int, stats: Stats, now: float) -> None:
        engine = self._engines[number]
        engine.stats = stats
        engine.health.on_stats(stats, now)
        if self._num_workers > 1:
            engine.num_others = max(0, stats.num_running + stats.num_waiting - engine.num_sequences)

    def sent_by_another(self, number: int, blocks: Blocks) -> None:
        """Another worker has sent an engine a prompt."""
        if self._router is not None:
            self._router.sent(number, blocks)

    # Requests

    def submit(self, prompt: OpenPrompt, stream: Stream) -> None:
        request = prompt.request
        self.prompts[request.request_id] = (prompt, stream)
        placement = self._placements[request.request_id] = Placement(request.samples)
        if self._router is not None:
            placement.blocks = blocks_of(request.prompt, f"{request.adapter}@{request.salt}")
        engine = self._choose(placement)
        if engine is not None:
            self._load(prompt, placement, engine)
            self._send(engine, Submit(request, waited_s=stream.times.total_s))

    def refused(self, failed: Failed) -> Failed | None:
        """An engine refuses a request. None if another one may take it; else the failure to report."""
        found, placement = self.prompts.get(failed.request_id), self._placements.get(failed.request_id)
        if self._router is None or failed.kind != Overloaded.kind or found is None or placement is None:
            return failed
        assert placement.engine is not None, "an engine that refuses a request was sent it"
        placement.refusals[placement.engine.number] = failed
        self._unload(placement)
        engine = self._choose(placement)
        if engine is None:
            return min(placement.refusals.values(), key=lambda one: one.retry_after_s or 0.0)
        prompt, stream = found
        self._load(prompt, placement, engine)
        waited_s = stream.times.total_s
        has_begun = prompt.num_tokens or placement.num_ends
        self._send(engine, prompt.resumed(waited_s) if has_begun else Submit(prompt.request, waited_s=waited_s))
        return None

    def release(self, request_id: int) -> RemoteEngine | None:
        """A request is over. Returns the engine that had it; None if it had ended before."""
        placement = self._placements.pop(request_id, None)
        if placement is None:
            return None
        del self.prompts[request_id]
        engine = placement.engine
        self._unload(placement)
        return engine

    def abort(self, request_id: int) -> None:
        engine = self.release(request_id)
        if engine is not None:
            self._send(engine, Abort(request_id))

    def waiting(self) -> list[tuple[OpenPrompt, Stream]]:
        """The prompts that no engine has."""
        return [
            self.prompts[request_id]
            for request_id, placement in self._placements.items()
            if placement.engine is None or placement.engine.port is None
        ]

    def _resume(self, request_id: int, placement: Placement, engine: RemoteEngine) -> None:
        """Send a request to an engine that goes on with it."""
        prompt, stream = self.prompts[request_id]
        self._unload(placement)
        self._load(prompt, placement, engine)
        self._send(engine, prompt.resumed(time.monotonic() - stream.times.opened_s))

    def _send(self, engine: RemoteEngine, command: Command | PromptBlocks) -> None:
        if engine.port is not None:
            engine.port.send(command)

    def _choose(self, placement: Placement) -> RemoteEngine | None:
        """The engine for a request; None while there is none."""
        if self._router is None:
            return self._engines[0]
        now = time.monotonic()
        able = [one for one in self._engines if one.port is not None and one.number not in placement.refusals]
        well = [one for one in able if one.health.problem(now) is None and not one.is_searching]
        if not able:
            return None
        chosen = well or able
        loads = [one.load + one.num_others if one in chosen else None for one in self._engines]
        return self._engines[self._router.choose(placement.blocks, loads)]

    def _load(self, prompt: OpenPrompt, placement: Placement, engine: RemoteEngine) -> None:
        placement.engine = engine
        if self._router is not None:
            num_known = self._router.num_known(engine.number, placement.blocks)
            placement.weight = weight_of(placement.num_sequences, len(prompt.request.prompt), num_known)
            self._router.sent(engine.number, placement.blocks)
            if self._num_workers > 1:
                self._send(engine, PromptBlocks(list(placement.blocks)))
            engine.load += placement.weight
            engine.num_sequences += placement.num_sequences

    def _unload(self, placement: Placement) -> None:
        if placement.engine is not None and self._router is not None:
            placement.engine.load -= placement.weight
            placement.engine.num_sequences -= placement.num_sequences
        placement.engine = None
