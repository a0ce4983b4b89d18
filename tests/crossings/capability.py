"""A capability: one entry of the table."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.ipc.messages import Failed
from quire.reach import Reach
from quire.request import Request
from tests.crossings.engine_setup import EngineSetup
from tests.crossings.request_draft import RequestDraft

if TYPE_CHECKING:
    from tests.crossings.crossing import Crossing
    from tests.crossings.served_crowd import ServedCrowd

# A request may fail so, without a fault of the engine.
Excuse = Callable[["Crossing", Request, Failed], bool]


def never(crossing: "Crossing", request: Request, failed: Failed) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class Capability:
    """`covers`: the settings and fields that it stands for, as `owners.OWNERS` names them. `needs`: others that are
    switched on with it. `config`: the settings by which a user has it. Of those that `fill` the same field or setting
    an engine, or a request, has one."""

    name: str
    covers: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    fills: str = ""
    in_fake: bool = True  # crossed on the fake executor
    in_models: bool = True  # crossed on tiny models
    in_servers: bool = False  # crossed in a server, which is made with `config`
    excuses: Excuse = never
    explains: tuple[str, ...] = ()  # patterns of the lines above INFO that it leaves in the log
    keeps_tokens: bool = True  # tokens are promised to be those of the plain run


@dataclass(frozen=True, kw_only=True)
class Layout(Capability):
    """A kind of model: what its layers keep. Every set of capabilities has one."""

    switch_on: Callable[[EngineSetup], None]
    fills: str = "layout"
    model: Mapping[str, Any]  # the config of a tiny one


@dataclass(frozen=True, kw_only=True)
class EngineSetting(Capability):
    """How an engine is made."""

    switch_on: Callable[[EngineSetup], None]


@dataclass(frozen=True, kw_only=True)
class RequestField(Capability):
    """What a request asks for."""

    switch_on: Callable[[RequestDraft], None]


@dataclass(frozen=True, kw_only=True)
class Incident(Capability):
    """What happens while requests run."""

    switch_on: Callable[["Crossing"], None]
    ends_engine: bool = False


@dataclass(frozen=True, kw_only=True)
class ServerCapability(Capability):
    """What servers have in front of engines."""

    in_fake: bool = False
    in_models: bool = False
    strike: Callable[["ServedCrowd"], None] | None = None  # happens while requests run
    num_leaving: int = 0  # clients that leave after the first part of their answer


def covered(capabilities: Iterable[Capability]) -> list[str]:
    return [name for one in capabilities for name in one.covers]


def one_page_group(reaches: tuple[Reach, ...], **limits: Any) -> Callable[[EngineSetup], None]:
    """Switches a layout on whose layers read these positions."""

    def switch_on(setup: EngineSetup) -> None:
        setup.page_groups = reaches
        setup.limits |= limits

    return switch_on
