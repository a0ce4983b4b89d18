"""Watchdog timeout from the slowest step so far, for /health and for the supervisor."""

import msgspec

STUCK_FACTOR = 10  # a step may take this many times as long as the slowest that is like it


class LongestStep(msgspec.Struct, frozen=True, array_like=True):
    """The slowest and the largest of an engine's steps that worked."""

    took_s: float = 0.0  # 0 before the first step
    num_tokens: int = 0

    def limit_s(self, num_tokens: int) -> float | None:
        """The timeout of a step of `num_tokens`; None before the first step."""
        if not self.took_s:
            return None
        # Not by the time of one token: a step of one takes nearly as long as one of many.
        return STUCK_FACTOR * self.took_s * max(1.0, num_tokens / max(1, self.num_tokens))


def timeout_s(measured_s: float | None, *, is_compiling: bool, floor_s: float, unmeasured_s: float) -> float:
    """Seconds with work and without a finished step after which an engine is stuck.

    `measured_s` is the timeout by the steps before, None where there were none. `unmeasured_s` holds for the first step
    and for one that waits for a program to compile.
    """
    return max(floor_s, unmeasured_s if measured_s is None or is_compiling else measured_s)
