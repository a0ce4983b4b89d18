"""A request that is over, as metrics, logs and traces see it."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from quire.errors import QuireError
from quire.server.observe.times import RequestTimes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Numbers and names, never its text."""

    times: RequestTimes
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    right_guesses: Mapping[int, int]  # the number of steps by how many of their guesses were right
    max_new_tokens: int  # of all prompts
    is_complete: bool
    error: QuireError | None
    user: str | None
    request_id: str
    key_name: str  # of its API key; empty where none is needed

    @property
    def outcome(self) -> str:
        if self.error is not None:
            return self.error.kind
        return "answered" if self.is_complete else "dropped"

    @property
    def is_defect(self) -> bool:
        """It failed by a defect of ours."""
        return self.error is not None and self.error.kind == QuireError.kind

    def log(self) -> None:
        """Write a line to the log."""
        if not log.isEnabledFor(logging.INFO):
            return
        details = {
            "outcome": self.outcome,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "generated_tokens": self.num_generated_tokens,
            "queue_ms": _ms(self.times.queue_s),
            "total_ms": _ms(self.times.total_s),
        }
        if self.right_guesses:
            details["right_guesses"] = sum(count * steps for count, steps in self.right_guesses.items())
        if self.times.first_token_s is not None:
            details["first_token_ms"] = _ms(self.times.first_token_s)
        if self.user is not None:
            details["user"] = self.user[:100]
        if self.key_name:
            details["key"] = self.key_name
        details["request_id"] = self.request_id
        log.info("request", extra=details)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
