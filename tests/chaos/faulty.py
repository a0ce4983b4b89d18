"""An executor around another that fails where it is told to. For tests alone."""

import logging
import os
import random
import signal
import time
from dataclasses import dataclass
from enum import IntEnum

from quire.core.plan import SlotStart, StepPlan, StepResult
from quire.engine.executor import Executor, Pending

log = logging.getLogger(__name__)

FITTING_ROWS = 4
AFTER_TOKENS = 3  # a marked request generates so many before it does harm
CALM_STEPS = 200  # that work after one which failed by chance: two that fail a request by itself are its fault


class Mark(IntEnum):
    """The seeds of requests that do harm, and what harm."""

    AT_SUBMIT = 666_001  # its steps cannot be launched
    AT_RESULT = 666_002  # its steps fail
    HANGS = 666_003  # its steps never end
    KILLS = 666_004  # its steps end the process
    NO_MEMORY = 666_005  # its steps find no memory while they have more rows than FITTING_ROWS


MARKS = frozenset(map(int, Mark))


class InjectedFault(RuntimeError):
    """What a device might throw."""


@dataclass(frozen=True)
class Faults:
    """Makes a Faulty of an executor. A plain value that travels to the engine process.

    Besides what marked requests do, one step in `one_in` fails by chance, whoever takes part.
    """

    one_in: int = 0
    seed: int = 0

    def __call__(self, executor: Executor) -> Executor:
        return Faulty(executor, self)


class Faulty(Executor):
    def __init__(self, executor: Executor, faults: Faults) -> None:
        self._executor = executor
        self._one_in = faults.one_in
        self._chance = random.Random(faults.seed * 1_000_003 + os.getpid())  # another each time the engine starts
        self._num_calm = 0  # looks since the last step that failed by chance, or since the start
        self._starts: dict[int, SlotStart] = {}

    @property
    def platform(self) -> str:
        return self._executor.platform

    @property
    def num_late(self) -> int:
        return self._executor.num_late

    @property
    def num_unfinished(self) -> int:
        return self._executor.num_unfinished

    @property
    def num_padding_tokens(self) -> int:
        return self._executor.num_padding_tokens

    def submit(self, plan: StepPlan) -> Pending:
        for start in plan.started:
            self._starts[start.slot] = start
        marks = {mark for chunk in plan.chunks if (mark := self._mark(chunk.slot, chunk.start + chunk.length))}
        if Mark.KILLS in marks:
            os.kill(os.getpid(), signal.SIGKILL)
        if Mark.AT_SUBMIT in marks or self._strikes():
            raise InjectedFault("a step cannot be launched")
        if len(plan.chunks) <= FITTING_ROWS:
            marks.discard(Mark.NO_MEMORY)
        return FaultyStep(self._executor.submit(plan), marks, self._strikes())

    def _mark(self, slot: int, end: int) -> Mark | None:
        start = self._starts[slot]
        return Mark(start.seed) if start.seed in MARKS and end >= len(start.prompt) + AFTER_TOKENS else None

    def _strikes(self) -> bool:
        self._num_calm += 1
        if not self._one_in or self._num_calm <= 2 * CALM_STEPS or self._chance.randrange(2 * self._one_in):
            return False
        self._num_calm = 0
        return True

    def reset(self) -> None:
        self._starts.clear()
        self._executor.reset()

    def check_device(self) -> None:
        self._executor.check_device()


class FaultyStep:
    def __init__(self, pending: Pending, marks: set[Mark], fails: bool) -> None:
        self._pending = pending
        self._marks = marks
        self._fails = fails

    def sample(self, masks: dict[int, bytes]) -> None:
        self._pending.sample(masks)

    def result(self) -> StepResult:
        while Mark.HANGS in self._marks:
            time.sleep(0.05)
        if Mark.AT_RESULT in self._marks or self._fails:
            raise InjectedFault("a step fails")
        if Mark.NO_MEMORY in self._marks:
            raise out_of_memory()
        return self._pending.result()


def out_of_memory() -> Exception:
    """As JAX says it."""
    from jax.errors import JaxRuntimeError  # which engines that are not JAX's do without

    return JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes.")
