"""Records of the steps of traced requests."""

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from quire.core.plan import Failure, Kind, StepPlan
from quire.ipc.messages import StepTrace

MIN_INTERVAL_S = 0.1  # between recorded steps, so that short steps do not become more spans than tokens


class Collected(NamedTuple):
    """A step whose result is there."""

    plan: StepPlan
    begun_s: float
    collected_s: float
    worked: bool
    request_ids: list[int]  # traced ones in it, where it is to be recorded


class StepTraces:
    """Records at most ten steps a second that hold a traced request, and besides those that fail or fail a request.

    Without traced requests it costs nothing. Owned by the engine thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._traced: set[int] = set()
        self._begun_s: dict[int, float] = {}  # by step
        self._next_s = 0.0
        self._last: Collected | None = None

    @property
    def is_on(self) -> bool:
        return bool(self._traced)

    def open(self, request_id: int) -> None:
        self._traced.add(request_id)

    def close(self, request_id: int) -> None:
        self._traced.discard(request_id)

    def launched(self, plan: StepPlan) -> None:
        if self._traced:
            self._begun_s[plan.step] = self._clock()

    def collected(self, plan: StepPlan, worked: bool) -> None:
        """The oldest step launched is over."""
        if not self._begun_s:
            return
        begun_s = self._begun_s.pop(plan.step, None)
        if not worked:
            self._begun_s.clear()  # those behind it are discarded
        if begun_s is None:
            return
        now = self._clock()
        request_ids: list[int] = []
        if now >= self._next_s or not worked:
            found = dict.fromkeys(chunk.request_id for chunk in plan.chunks)
            request_ids = [one for one in found if one in self._traced]
        if request_ids:
            self._next_s = now + MIN_INTERVAL_S
        self._last = Collected(plan, begun_s, now, worked, request_ids)

    def news(self, failures: Iterable[Failure]) -> StepTrace | None:
        """The record of the step collected last, of which `failures` came; None where there is none. Told once."""
        last, self._last = self._last, None
        if last is None:
            return None
        failed = [failure.request_id for failure in failures if failure.request_id in self._traced]
        request_ids = list(dict.fromkeys([*last.request_ids, *failed]))
        if not request_ids:
            return None
        plan = last.plan
        return StepTrace(
            step=plan.step,
            method="decode" if plan.chunks[-1].kind is Kind.DECODE else "prefill",  # decodes come first
            num_sequences=len(plan.chunks),
            num_tokens=plan.num_tokens,
            begun_s=last.begun_s,
            collected_s=last.collected_s,
            completed_s=self._clock(),
            worked=last.worked,
            request_ids=request_ids,
            failed_ids=failed,
        )
