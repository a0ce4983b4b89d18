"""Times of the host's work on steps."""

from collections.abc import Callable

from quire.core.plan import Kind, StepPlan


class HostTimes:
    """Tells `note` what the host's parts of each step took. Without a `note` it costs nothing.

    Owned by the engine thread.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.note: Callable[[str, float], None] | None = None
        self._clock = clock
        self._kind = ""  # of the step whose tokens are handed out; empty where it failed
        self._planned_s = 0.0  # when that step was planned

    def now(self) -> float:
        return 0.0 if self.note is None else self._clock()

    def planned(self, plan: StepPlan, since_s: float) -> None:
        if self.note is not None and plan.started and plan.chunks[0].kind is Kind.DECODE:
            self.note("join", self._clock() - since_s)

    def completed(self, plan: StepPlan, planned_s: float, since_s: float) -> None:
        """The scheduler has the result of a step that worked."""
        if self.note is not None:
            self._kind = "decode" if plan.chunks[-1].kind is Kind.DECODE else "prefill"  # decodes come first
            self._planned_s = planned_s
            self.note(f"{self._kind}_complete", self._clock() - since_s)

    def delivered(self, since_s: float) -> None:
        """What came of the step collected last is handed out."""
        if self.note is not None and self._kind:
            now, kind, self._kind = self._clock(), self._kind, ""
            self.note(f"{kind}_deliver", now - since_s)
            self.note(f"{kind}_inference", now - self._planned_s)
