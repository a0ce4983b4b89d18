"""The part of an engine process that its supervisor needs, without the engine's modules."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from quire.engine.engine import Engine
    from quire.ipc.messages import Described, Waiting

ABANDONED = 70  # exit status of an engine that cannot continue


class EngineBuilder(Protocol):
    """Builds the engine inside its process. Sent there as a pickle."""

    def __call__(self, describe: "Callable[[Described | Waiting], None]") -> "Engine":
        """Calls `describe` as soon as the model is known, and before that with what it waits for."""
