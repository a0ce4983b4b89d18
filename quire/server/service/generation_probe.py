"""A token that the server asks of itself, to see whether any are generated."""

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from quire.errors import EngineFailed, Overloaded, QuireError
from quire.request import Request, SamplingParams
from quire.server.service.generation_spec import GenerationSpec
from quire.server.service.stream import Stream

MAX_GENERATION_S = 10.0
LOOK_S = 0.25  # the engine sends statistics as often
SHARED_S = 1.0  # that an outcome holds


class ProbeOutcome(NamedTuple):
    problem: str | None  # why no token came; None where one did
    took_s: float = 0.0


class ProbedService(Protocol):
    """The service as a probe knows it."""

    @property
    def is_engine_busy(self) -> bool: ...

    @property
    def last_step_age_s(self) -> float | None: ...

    def open(self, specs: Sequence[GenerationSpec], *, is_counted: bool) -> Stream: ...


class GenerationProbe:
    """Shows that tokens are generated: a busy engine by its steps, an idle one by a token asked of it.

    One token at a time, for all callers. Its outcome holds for `SHARED_S`, so that any number of callers takes
    one place of the engine at most. Owned by the event loop.
    """

    def __init__(self, service: ProbedService) -> None:
        self._service = service
        self._asking: asyncio.Task[ProbeOutcome] | None = None
        self._outcome = ProbeOutcome(None)
        self._holds_until_s = 0.0

    async def outcome(self) -> ProbeOutcome:
        if self._asking is None:
            if time.monotonic() < self._holds_until_s:
                return self._outcome
            if self._service.is_engine_busy:
                return ProbeOutcome(None)
            self._asking = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asking)  # it is for others too

    def forget(self) -> None:
        """An engine has come or gone. What was found before holds for no other."""
        self._holds_until_s = 0.0

    async def _ask(self) -> ProbeOutcome:
        begun_s, problem = time.monotonic(), None
        try:
            await self._generate_one(begun_s)
        except Overloaded:
            pass  # the queue is full of others; steps that end too slowly turn readiness red
        except QuireError as error:
            problem = error.message
        finally:
            self._asking = None
        now = time.monotonic()
        self._outcome, self._holds_until_s = ProbeOutcome(problem, now - begun_s), now + SHARED_S
        return self._outcome

    async def _generate_one(self, begun_s: float) -> None:
        """Wait for one token, or for the end of a step that the engine does for others. Raises where neither comes."""
        service = self._service
        asked = Request(0, (0,), 1, SamplingParams(temperature=0.0), salt="health")
        stream = service.open([GenerationSpec(asked)], is_counted=False)
        reading = asyncio.ensure_future(stream.read())
        try:
            while not reading.done():
                await asyncio.wait({reading}, timeout=LOOK_S)
                waited_s, age_s = time.monotonic() - begun_s, service.last_step_age_s
                if not reading.done() and service.is_engine_busy and age_s is not None and age_s < waited_s:
                    return
                if not reading.done() and waited_s > MAX_GENERATION_S:
                    raise EngineFailed(f"no token came within {MAX_GENERATION_S:g} s")
            reading.result()
        finally:
            stream.close()
            reading.cancel()
