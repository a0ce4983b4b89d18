"""The numbers of the scheduler, and why the queue waits."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

# Why sequences joined running ones, in the words of text-generation-inference's `tgi_batch_concat`: the wait
# reached `waiting_served_ratio`; `max_waiting_tokens` passed without an admission; no rule makes sequences wait.
BACKPRESSURE, WAIT_EXCEEDED, CHUNKING = "backpressure", "wait_exceeded", "chunking"


@dataclass(slots=True)
class Counters:
    """Events since the start."""

    steps: int = 0
    preemptions: int = 0
    admissions: int = 0
    cached_tokens: int = 0
    guesses: int = 0  # of tokens, in steps that have results
    right_guesses: int = 0
    guessed_chunks: int = 0  # that had any
    dropped_chunks: int = 0  # results of sequences that had ended or lost their slot
    # Steps in which sequences joined running ones, by the rule that admitted them.
    joined_by: dict[str, int] = field(default_factory=lambda: dict.fromkeys((BACKPRESSURE, WAIT_EXCEEDED, CHUNKING), 0))


class SchedulerStats(NamedTuple):
    """The scheduler's numbers at one moment. Counts are since the start."""

    num_running: int  # sequences that have a slot
    num_waiting: int
    running_max_tokens: int  # that the running sequences may ever have, prompts included
    free_pages: int
    cached_pages: int  # that eviction could free
    evicted_pages: int
    host_pages: int  # that the host has
    saved_pages: int  # copied to the host
    restored_pages: int  # and from it
    lost_pages: int  # evicted and not copied to the host, or by a copy that failed
    snapshots: int  # of slots' state, that prefixes continue from
    steps: int
    preemptions: int
    admissions: int
    cached_tokens: int
    guesses: int
    right_guesses: int
    guessed_chunks: int
    joined_by: dict[str, int]


class Blocker(Enum):
    """A cause that keeps the head of the queue waiting: the limit of a setting, or something that is short.

    Clients are told the `client_name`, in `blocked_s`; settings that limit the same thing share one.
    """

    def __init__(self, cause: str, client_name: str) -> None:
        self.cause = cause
        self.client_name = client_name

    SLOTS = "max_batch_size", "slots"
    PAGES = "pages", "pages"
    PREFILL_TOKENS = "max_batch_prefill_tokens", "budget"
    TOTAL_TOKENS = "max_batch_total_tokens", "budget"
    WAITING_RULE = "waiting_served_ratio", "waiting_rule"
    SHARED_PREFIX = "shared_prefix", "shared_prefix"
    ADAPTERS = "adapters", "adapters"
