"""Health of the engine, by the statistics that it sends."""

from quire.ipc.messages import Stats
from quire.ipc.watchdog_timeout import timeout_s

MAX_SILENCE_S = 1.5  # of the engine process, which sends statistics four times a second
MAX_CHECK_S = 10.0  # for a check of the device, which takes a millisecond, or a reset of it
UNMEASURED_S = 300.0


class EngineHealth:
    """Stuck is an engine with work in which no step has ended for `floor_s` and for the watchdog timeout.

    Owned by the event loop.
    """

    def __init__(self, floor_s: float) -> None:
        self._floor_s = floor_s
        self._stats: Stats | None = None
        self._measured_s: float | None = None  # timeout by the steps of this engine, or of the one before
        self._heard_s = 0.0

    def on_stats(self, stats: Stats, now: float) -> None:
        self._stats, self._heard_s = stats, now
        if stats.step_limit_s is not None:
            self._measured_s = stats.step_limit_s

    def forget(self) -> None:
        """The engine is gone. What it told last holds for no other."""
        self._stats = None

    @property
    def has_work(self) -> bool | None:
        """Sequences run or wait; None before the first statistics."""
        return None if self._stats is None else has_work(self._stats)

    def last_step_age_s(self, now: float) -> float | None:
        """Seconds since the last step that finished; None before the first statistics."""
        return None if self._stats is None else self._stats.idle_s + now - self._heard_s

    def problem(self, now: float) -> str | None:
        """The reason why it is unhealthy; None where it is not, and before the first statistics."""
        stats = self._stats
        if stats is None:
            return None
        if stats.error is not None:
            return stats.error
        silent_s = now - self._heard_s
        if silent_s > MAX_SILENCE_S:
            return f"the engine has not been heard of for {silent_s:.1f} s"
        if stats.checking_s is not None and stats.checking_s + silent_s > max(self._floor_s, MAX_CHECK_S):
            return f"the device has not answered for {stats.checking_s + silent_s:.1f} s"
        if not has_work(stats):
            return None
        waited_s = stats.waited_s + silent_s
        limit_s = timeout_s(
            self._measured_s, is_compiling=stats.is_compiling, floor_s=self._floor_s, unmeasured_s=UNMEASURED_S
        )
        if waited_s <= limit_s:
            return None
        what = f"a step has taken {stats.busy_s + silent_s:.1f} s" if stats.busy_s else "no step is under way"
        return (
            f"the engine is stuck: {stats.num_running} sequences run, {stats.num_waiting} wait, and no step has ended "
            f"for {waited_s:.1f} s ({what}); {limit_s:.1f} s are allowed"
        )


def has_work(stats: Stats) -> bool:
    return stats.num_running + stats.num_waiting > 0
