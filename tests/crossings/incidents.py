"""Capabilities to bear what happens while requests run."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.core.plan import StepPlan
from quire.engine.observer import Observer, Step
from quire.ipc.messages import Failed
from quire.request import Request
from tests.crossings.capability import Incident
from tests.crossings.engine_setup import LAST_MOMENT
from tests.fake_executor import NAN, POISON

if TYPE_CHECKING:
    from tests.crossings.crossing import Crossing

Prompts = list[tuple[int, ...]]
NO_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes."
STEP_FAILED = (r"step \d+ with \d+ rows failed: DeviceError",)
BLAMED = (r"request \d+ makes its steps fail and is ended",)
GRACE_S = 0.05


class DeviceError(RuntimeError):
    """What a device throws."""


def _one_step_fails(crossing: "Crossing", where: list, message: str) -> None:
    """At some moment, the next step."""
    due = [False]

    def fail() -> None:
        due[0] = crossing.may_fail_by_chance()

    def fault(plan: StepPlan, prompts: Prompts) -> None:
        if due[0]:
            due[0] = False
            raise DeviceError(message)

    where.append(fault)
    crossing.at_some_turn(fail)


def _launch_fails(crossing: "Crossing") -> None:
    _one_step_fails(crossing, crossing.faults.before_submit, "a step cannot be launched")


def _step_fails(crossing: "Crossing") -> None:
    _one_step_fails(crossing, crossing.faults.before_result, "a step fails")


def _memory_is_short(crossing: "Crossing") -> None:
    """For some steps there is memory for few rows."""
    short = [0]

    def begin() -> None:
        short[0] = 6

    def fault(plan: StepPlan, prompts: Prompts) -> None:
        if short[0] and plan.num_tokens > 2:
            short[0] -= 1
            raise DeviceError(NO_MEMORY)

    crossing.faults.before_result.append(fault)
    crossing.at_some_turn(begin)


def _poisoned(crossing: "Crossing") -> None:
    """One request makes every step fail that it is in."""
    crossing.mark_one_prompt(POISON)
    crossing.may_fail_by_chance()  # one time less: its steps begin a search in which others run by themselves

    def fault(plan: StepPlan, prompts: Prompts) -> None:
        if any(POISON in prompt for prompt in prompts):
            raise DeviceError("a poisoned request")

    where = crossing.chance.choice([crossing.faults.before_submit, crossing.faults.before_result])
    where.append(fault)


def _row_fails(crossing: "Crossing") -> None:
    crossing.mark_one_prompt(NAN)


def _aborts(crossing: "Crossing") -> None:
    for _ in range(crossing.chance.randrange(1, 5)):
        crossing.at_some_turn(crossing.abort_one)


def _leaves(crossing: "Crossing") -> None:
    """A front end closes its port, or its pipe breaks, or it comes again."""
    what = crossing.chance.choice([crossing.front_end_leaves, crossing.front_end_breaks])
    crossing.at_some_turn(what)


def _drain(crossing: "Crossing") -> None:
    drain_s = crossing.chance.choice([0.0, GRACE_S, 1000.0])
    crossing.at_some_turn(lambda: crossing.drain(drain_s), first=LAST_MOMENT // 2)


def _ends(crossing: "Crossing") -> None:
    for _ in range(crossing.chance.choice([1, 2])):
        crossing.at_some_turn(crossing.engine_ends)


def _is_idle_meanwhile(crossing: "Crossing") -> None:
    """Long enough for audits, and for checks of the device."""
    for _ in range(3):
        crossing.at_some_turn(crossing.pause)


class Raising(Observer):
    """Raises in one of its methods."""

    def __init__(self, method: str) -> None:
        self._method = method

    def _raise_in(self, method: str) -> None:
        if method == self._method:
            raise KeyError(method)

    def step_launched(self, step: Step) -> None:
        self._raise_in("step_launched")

    def step_ended(self, step: Step) -> None:
        self._raise_in("step_ended")

    def steps_discarded(self, steps: Sequence[Step]) -> None:
        self._raise_in("steps_discarded")

    def step_delivered(self, step: Step) -> None:
        self._raise_in("step_delivered")


def _observer_raises(crossing: "Crossing") -> None:
    method = crossing.chance.choice(["step_launched", "step_ended", "steps_discarded", "step_delivered"])
    crossing.at_some_turn(lambda: crossing.engine.observe(Raising(method)))


def _adapter_changes(crossing: "Crossing") -> None:
    crossing.at_some_turn(crossing.replace_adapter)


def _adapter_is_unloaded(crossing: "Crossing") -> None:
    crossing.at_some_turn(crossing.unload_adapter)


def _is_poisoned(_: object, request: Request, failed: Failed) -> bool:
    return failed.kind == "generation" and POISON in request.prompt


def _has_no_numbers(_: object, request: Request, failed: Failed) -> bool:
    return failed.kind == "generation" and NAN in request.prompt


def _is_drained(crossing: "Crossing", request: Request, failed: Failed) -> bool:
    return failed.kind == "engine_stopped" and crossing.is_draining


def _names_what_is_gone(crossing: "Crossing", request: Request, failed: Failed) -> bool:
    return failed.kind == "model_not_found" and request.adapter in crossing.unloaded


INCIDENTS = [
    Incident(name="a launch fails", switch_on=_launch_fails, explains=STEP_FAILED),
    Incident(name="a step fails", switch_on=_step_fails, explains=STEP_FAILED),
    Incident(
        name="memory is short",
        switch_on=_memory_is_short,
        explains=(*STEP_FAILED, r"steps have at most \d+ tokens of prompts and \d+ rows.* for a while"),
    ),
    Incident(
        name="a request fails its steps",
        switch_on=_poisoned,
        excuses=_is_poisoned,
        explains=(*STEP_FAILED, *BLAMED),
    ),
    Incident(
        name="a row has no numbers",
        switch_on=_row_fails,
        excuses=_has_no_numbers,
        explains=(r"request \d+ is ended: the logits of this row are not numbers",),
    ),
    Incident(name="requests are aborted", switch_on=_aborts),
    Incident(name="an observer raises", switch_on=_observer_raises, explains=("Raising has failed and is detached",)),
    Incident(
        name="a front end leaves",
        switch_on=_leaves,
        explains=(r"port \d+ cannot be delivered to and is closed",),
    ),
    Incident(
        name="drain",
        covers=("ServerSettings.drain_s",),
        switch_on=_drain,
        excuses=_is_drained,
        ends_engine=True,
    ),
    Incident(name="the engine ends and another goes on", switch_on=_ends),
    Incident(name="pauses", switch_on=_is_idle_meanwhile),
    Incident(
        name="an adapter is replaced",
        covers=("Config.adapter_folder",),
        needs=("adapter",),
        switch_on=_adapter_changes,
    ),
    Incident(
        name="an adapter is unloaded",
        needs=("adapter",),
        switch_on=_adapter_is_unloaded,
        excuses=_names_what_is_gone,
    ),
]
