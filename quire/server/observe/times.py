"""The times of one request."""

import time


class RequestTimes:
    """Moments of a request on the monotonic clock. Logs, metrics, headers, spans and answers read durations from here.

    Owned by the event loop.
    """

    __slots__ = ("ended_s", "first_s", "last_s", "opened_s", "queue_s", "submitted_s", "tokenising_s")

    def __init__(self, opened_s: float) -> None:
        self.opened_s = opened_s  # the request arrived
        self.tokenising_s = 0.0  # part of the validation
        self.submitted_s = opened_s  # it was sent to the engine
        self.queue_s = 0.0  # longest wait of one of its prompts for a slot, reported by the engine process
        self.first_s: float | None = None  # the first token came
        self.last_s = opened_s  # the latest token came
        self.ended_s: float | None = None  # the answer was complete, or given up

    def note_queue(self, queue_s: float) -> None:
        """A prompt waited for a slot. After the first token, in another engine, the wait is part of the answer."""
        if self.first_s is None:
            self.queue_s = max(self.queue_s, queue_s)

    def note_tokens(self, now: float) -> float | None:
        """Tokens came. Returns the seconds since those before; None for the first."""
        gap_s = None if self.first_s is None else now - self.last_s
        if gap_s is None:
            self.first_s = now
        self.last_s = now
        return gap_s

    @property
    def _end_s(self) -> float:
        return time.monotonic() if self.ended_s is None else self.ended_s

    @property
    def validation_s(self) -> float:
        """Seconds spent on checking and tokenising."""
        return self.submitted_s - self.opened_s

    @property
    def started_s(self) -> float:
        """The moment it got its slot."""
        return min(self._end_s, self.submitted_s + self.queue_s)

    @property
    def first_token_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.opened_s

    @property
    def prefill_s(self) -> float:
        """Seconds from the slot to the first token."""
        first_s = self.last_s if self.first_s is None else self.first_s
        return max(0.0, first_s - self.submitted_s - self.queue_s)

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the latest."""
        return 0.0 if self.first_s is None else self.last_s - self.first_s

    @property
    def answer_s(self) -> float:
        """Seconds from arrival to the latest token."""
        return self.last_s - self.opened_s

    @property
    def inference_s(self) -> float:
        """Seconds from the slot to the end."""
        return self._end_s - self.submitted_s - self.queue_s

    @property
    def total_s(self) -> float:
        """Seconds from arrival to the end, or to now while the request runs."""
        return self._end_s - self.opened_s

    def per_token_s(self, num_tokens: int) -> float:
        return self.inference_s / max(1, num_tokens)
