"""An executor whose steps fail where a test says so, and take the device state with them."""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax

from quire.core.plan import StepPlan, StepResult
from quire.engine.executor import Pending
from quire.executor.executor import JaxExecutor


class DeviceLost(Exception):
    pass


class FailedStep:
    def __init__(self, lose: Callable[[], None], message: str) -> None:
        self._lose = lose
        self._message = message

    def sample(self, masks: dict[int, bytes]) -> None:
        pass

    def result(self) -> StepResult:
        self._lose()
        raise DeviceLost(self._message)


class FaultyExecutor:
    """Fails in `submit`, as a launch does, or in `result`, as a device does. Implements the engine's Executor."""

    platform, num_late, num_padding_tokens, num_unfinished = "cpu", 0, 0, 0

    def __init__(
        self,
        inner: JaxExecutor,
        fails_at: Callable[[StepPlan], bool],
        where: Literal["submit", "result"] = "result",
        message: str = "the step failed on the device",
    ) -> None:
        self._inner = inner
        self._fails_at = fails_at
        self._where = where
        self._message = message
        self.num_resets = 0

    def submit(self, plan: StepPlan) -> Pending:
        fails = self._fails_at(plan)
        if fails and self._where == "submit":
            self._lose_state()
            raise DeviceLost("the step could not be launched")
        pending = self._inner.submit(plan)
        return FailedStep(self._lose_state, self._message) if fails else pending

    def reset(self) -> None:
        self.num_resets += 1
        self._inner.reset()

    def add_adapter(self, number: int, adapter: Any) -> None:
        self._inner.add_adapter(number, adapter)

    def drop_adapter(self, number: int) -> None:
        self._inner.drop_adapter(number)

    def adapter_digest(self, adapter: Any) -> str:
        return self._inner.adapter_digest(adapter)

    def check_device(self) -> None:
        self._inner.check_device()

    def warm_up(self) -> Iterator[float]:
        return self._inner.warm_up()

    def close(self) -> None:
        self._inner.close()

    def _lose_state(self) -> None:
        """What a failed step leaves of the arrays that were donated to it."""
        for array in jax.tree.leaves(self._inner._state):
            array.delete()
