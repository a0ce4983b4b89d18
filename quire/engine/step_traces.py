"""Records of the steps of traced requests."""

from collections.abc import Callable, Iterable

from quire.core.plan import Failure
from quire.engine.observer import Observer, Step
from quire.ipc.messages import StepTrace

MIN_INTERVAL_S = 0.1  # between recorded steps, so that short steps do not become more spans than tokens


class StepTraces(Observer):
    """Records at most ten steps a second that hold a traced request, and each step that fails or fails a request.

    Owned by the engine thread.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._traced: set[int] = set()
        self._next_s = 0.0
        self._last: tuple[Step, list[int]] | None = None  # the last step to end, and the traced requests to record

    def add(self, request_id: int) -> None:
        self._traced.add(request_id)

    def forget(self, request_id: int) -> None:
        self._traced.discard(request_id)

    def step_ended(self, step: Step) -> None:
        if not self._traced:
            return
        request_ids: list[int] = []
        if step.ended_s >= self._next_s or step.error is not None:
            request_ids = list(dict.fromkeys(c.request_id for c in step.plan.chunks if c.request_id in self._traced))
        if request_ids:
            self._next_s = step.ended_s + MIN_INTERVAL_S
        self._last = step, request_ids

    def event(self, failures: Iterable[Failure]) -> StepTrace | None:
        """The record of the step that ended last, of which `failures` came; None if there is none. Returned once."""
        last, self._last = self._last, None
        if last is None:
            return None
        step, request_ids = last
        failed = [failure.request_id for failure in failures if failure.request_id in self._traced]
        request_ids = list(dict.fromkeys([*request_ids, *failed]))
        if not request_ids:
            return None
        return StepTrace(
            step=step.plan.step,
            method=step.kind,
            num_sequences=len(step.plan.chunks),
            num_tokens=step.num_tokens,
            begun_s=step.launched_s,
            collected_s=step.ended_s,
            completed_s=self._clock(),
            worked=step.error is None,
            request_ids=request_ids,
            failed_ids=failed,
        )
