"""The steps under way on the executor."""

from collections.abc import Callable

from quire.core.plan import StepPlan, StepResult
from quire.core.stats import Blocker
from quire.engine.executor import Executor, FailedLaunch
from quire.engine.observer import Judge, Observers, Step


class StepPipeline:
    """Launches steps, times them, collects them in their order, notifies observers and asks judges. Owned by the engine
    thread."""

    def __init__(self, executor: Executor, clock: Callable[[], float]) -> None:
        self.executor = executor
        self.observers = Observers()
        self.judges: list[Judge] = []
        self.last_end_s = clock()  # of the last step
        self.has_failed = False  # a step could not be launched; the device state must not be used before a reset
        self.awaits_masks = False  # the newest step has not sampled yet
        self._clock = clock
        self._steps: list[Step] = []  # oldest first; any thread may read it
        self._undelivered: Step | None = None  # the last step that was collected

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def num_tokens(self) -> int:
        """Tokens of the oldest step under way; 0 if there is none."""
        return sum(step.num_tokens for step in self._steps[:1])

    @property
    def busy_s(self) -> float:
        """Time that the oldest step under way has taken; 0 if there is none."""
        return sum(self._clock() - max(step.launched_s, self.last_end_s) for step in self._steps[:1])

    @property
    def is_compiling(self) -> bool:
        """The oldest step under way has waited for a program to compile."""
        return any(step.num_late != self.executor.num_late for step in self._steps[:1])

    def launch(self, plan: StepPlan, planned_s: float, blocked_by: Blocker | None) -> None:
        step = Step(plan, planned_s, self._clock(), blocked_by, self.executor.num_late)
        self.awaits_masks = bool(plan.guided)
        self.observers.step_launched(step)
        self._steps.append(step)  # first: a step that waits for a compiler does so while it is submitted
        try:
            step.pending = self.executor.submit(plan)
        except Exception as error:  # of any kind; the requests of this step must hear of it
            self._fail(step, error)

    @property
    def newest(self) -> StepPlan:
        return self._steps[-1].plan

    def sample(self, masks: dict[int, bytes]) -> None:
        """Give the newest step the masks that it waits for."""
        self.awaits_masks = False
        try:
            self._steps[-1].pending.sample(masks)
        except Exception as error:  # as above
            self._fail(self._steps[-1], error)

    def _fail(self, step: Step, error: Exception) -> None:
        step.pending = FailedLaunch(error)
        self.has_failed = True

    def collect(self) -> tuple[Step, StepResult | None]:
        """Wait for the oldest step. It has no result if it failed, with `Step.error`."""
        step = self._steps[0]
        result: StepResult | None = None
        try:
            result = step.pending.result()
            step.copies_waited_s = result.waited_s
        except Exception as error:  # as above
            step.error = error
        step.ended_s = self._clock()
        step.took_s = step.ended_s - max(step.launched_s, self.last_end_s)
        step.waited_for_compiler = step.num_late != self.executor.num_late
        self.last_end_s = step.ended_s
        del self._steps[0]
        self.observers.step_ended(step)
        for judge in self.judges:
            judge.step_ended(step)
        return step, result

    def completed(self, step: Step) -> None:
        """The scheduler has applied the result of `step`."""
        step.completed_s = self._clock()
        self._undelivered = step

    def delivered(self) -> None:
        """The tokens of the step collected last are on their way to the front ends."""
        if self._undelivered is not None:
            step, self._undelivered = self._undelivered, None
            step.delivered_s = self._clock()
            self.observers.step_delivered(step)

    def discard(self) -> None:
        """Forget all steps: the device state is gone."""
        discarded, self._steps = self._steps, []
        self.awaits_masks = False
        self._undelivered = None
        self.observers.steps_discarded(discarded)
