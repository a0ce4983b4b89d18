"""What a step may take, by those before it."""

import msgspec

STUCK_FACTOR = 10  # a step may take so much longer than the longest that is like it


class LongestStep(msgspec.Struct, frozen=True, array_like=True):
    """What is known of the steps of an engine that worked."""

    took_s: float = 0.0  # the longest; 0 where there was none
    num_tokens: int = 0  # in the largest

    def limit_s(self, num_tokens: int) -> float | None:
        """How long a step of so many may take; None where none before it tells."""
        if not self.took_s:
            return None
        # Not by the time of one token: a step of one takes nearly as long as one of many.
        return STUCK_FACTOR * self.took_s * max(1.0, num_tokens / max(1, self.num_tokens))
