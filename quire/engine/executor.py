"""The interface of executors, which compute the engine's steps."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from quire.core.plan import StepPlan, StepResult


class Pending(Protocol):
    """A step under way."""

    def sample(self, masks: dict[int, bytes]) -> None:
        """Continue a plan with guided chunks. `masks`, by index of the chunk: the tokens that may be sampled, one bit
        each, in little-endian words of 32. Guided chunks without a mask may sample anything. Returns at once."""

    def result(self) -> StepResult:
        """Wait for the step; raise what it failed with."""


class Executor(Protocol):
    """Computes steps in the order they are submitted. Used only by the engine thread, except for its numbers."""

    @property
    def platform(self) -> str: ...

    @property
    def num_late(self) -> int:
        """Programs compiled while a step waited for them."""

    @property
    def num_padding_tokens(self) -> int:
        """Tokens computed beyond those of the plans, since programs have fixed shapes."""

    @property
    def num_unfinished(self) -> int:
        """Programs that are still being compiled or loaded; steps run in larger ones meanwhile."""

    def submit(self, plan: StepPlan) -> Pending:
        """Launch a step and return at once. A plan with guided chunks waits before it samples until `Pending.sample`;
        no other is submitted meanwhile."""

    def reset(self) -> None:
        """Rebuild the device state after a failed step, which may have consumed it. Every slot and page is empty."""

    def add_adapter(self, number: int, adapter: Any) -> None:
        """Keep an adapter on the host, so that plans can load it. A reset does not touch it."""

    def drop_adapter(self, number: int) -> None:
        """Free an adapter that no later plan loads."""

    def adapter_digest(self, adapter: Any) -> str:
        """A digest of an adapter's weights, equal in every engine. Any thread may call it."""

    def read_pages(self, pages: Sequence[int]) -> Callable[[], memoryview]:
        """Copy pages from the device, after the steps that were submitted. Returns at once; any thread may call the
        function, which waits for their bytes, one page after the other."""

    def write_host_pages(self, pages: Sequence[int], data: Sequence[memoryview]) -> None:
        """Write the bytes of pages into host memory, where no step under way reads or writes them."""

    def check_device(self) -> None:
        """Compute something tiny on every device and wait for it; raise if that fails. No step is under way."""


class FailedLaunch:
    """The pending result of a step that could not be launched, so that faults are handled in the order of the steps."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def sample(self, masks: dict[int, bytes]) -> None:
        pass

    def result(self) -> StepResult:
        raise self._error


NOT_LAUNCHED = FailedLaunch(RuntimeError("the step was not launched"))


def is_out_of_memory(fault: Exception) -> bool:
    """The device had too little memory for a step, by XLA's status code."""
    return "RESOURCE_EXHAUSTED" in str(fault)
