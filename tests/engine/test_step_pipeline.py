"""Steps on their way through an executor: their order, their times, and what observers hear of them."""

from quire.core.plan import Chunk, Kind, SlotStart, StepPlan
from quire.engine.observer import Observer, Step
from quire.engine.step_pipeline import StepPipeline
from quire.request import SamplingParams
from tests.fake_executor import FakeExecutor, Fault, plan_of


class Remembering(Observer):
    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.ended: list[Step] = []

    def step_launched(self, step: Step) -> None:
        self.events.append(("launched", step.plan.step))

    def step_ended(self, step: Step) -> None:
        self.events.append(("ended" if step.error is None else "failed", step.plan.step))
        self.ended.append(step)

    def steps_discarded(self, steps: list[Step]) -> None:
        self.events += [("discarded", step.plan.step) for step in steps]

    def step_delivered(self, step: Step) -> None:
        self.events.append(("delivered", step.plan.step))


class Rig:
    """A pipeline on a clock of its own, and one sequence that decodes."""

    def __init__(self, before_result: Fault | None = None) -> None:
        self.now = 100.0
        self.executor = FakeExecutor(10, 4, 2, before_result=before_result)
        self.pipeline = StepPipeline(self.executor, lambda: self.now)
        self.seen = Remembering()
        self.pipeline.observers.attach(self.seen)

    def launch(self, step: int) -> None:
        start = SlotStart(0, SamplingParams(temperature=0), 0, 0, (5,), (), 0, (), None)
        kind, pages = (Kind.PREFILL, ((1, 2),)) if step == 1 else (Kind.DECODE, ())
        chunk = Chunk(7, 0, 0, 0, kind, step - 1, 1, pages, samples=True)
        started = (start,) if step == 1 else ()
        self.pipeline.launch(plan_of(step, (chunk,), started=started), self.now, None)


def test_a_step_behind_another_takes_the_time_since_that_one_ended():
    rig = Rig()
    rig.launch(1)
    rig.now += 0.5
    rig.launch(2)
    rig.now += 1.0
    rig.pipeline.collect()
    rig.now += 2.0
    rig.pipeline.collect()
    assert [step.took_s for step in rig.seen.ended] == [1.5, 2.0]


def test_the_oldest_step_under_way_is_known_while_it_is_waited_for():
    told: list[tuple[float, int, bool]] = []

    def look(plan: StepPlan, prompts: object) -> None:
        rig.now += 2.0
        told.append((pipeline.busy_s, pipeline.num_tokens, pipeline.is_compiling))
        rig.executor.num_late += 1
        told.append((pipeline.busy_s, pipeline.num_tokens, pipeline.is_compiling))

    rig = Rig(look)
    pipeline = rig.pipeline
    rig.launch(1)
    rig.now += 1.0
    rig.launch(2)
    pipeline.collect()
    assert told == [(3.0, 1, False), (3.0, 1, True)]
    assert pipeline.is_compiling, "the next was launched before that program was there"
    pipeline.discard()
    assert (pipeline.busy_s, pipeline.num_tokens, pipeline.is_compiling) == (0, 0, False)


def test_a_step_that_waits_for_a_program_says_so():
    rig = Rig()
    rig.launch(1)
    rig.executor.num_late += 1
    rig.launch(2)
    assert [rig.pipeline.collect()[0].waited_for_compiler for _ in range(2)] == [True, False]


def test_observers_hear_of_every_step_in_its_order_and_of_its_delivery_once():
    rig = Rig()
    rig.launch(1)
    rig.launch(2)
    step, result = rig.pipeline.collect()
    assert result is not None
    rig.pipeline.completed(step)
    rig.pipeline.delivered()
    rig.pipeline.delivered()
    assert rig.seen.events == [("launched", 1), ("launched", 2), ("ended", 1), ("delivered", 1)]


def test_a_failed_step_has_no_result_and_those_behind_it_are_discarded():
    def fail(plan: StepPlan, prompts: list[tuple[int, ...]]) -> None:
        raise RuntimeError("a device fault")

    rig = Rig(before_result=fail)
    rig.launch(1)
    rig.launch(2)
    step, result = rig.pipeline.collect()
    assert (result, str(step.error)) == (None, "a device fault")
    rig.pipeline.discard()
    rig.pipeline.delivered()
    assert not rig.pipeline
    assert rig.seen.events == [("launched", 1), ("launched", 2), ("failed", 1), ("discarded", 2)]
