"""The limits of a scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.core.stats import BACKPRESSURE, CHUNKING, WAIT_EXCEEDED
from quire.errors import InvalidRequest, PromptTooLong
from quire.reach import Reach, most_read
from quire.request import MAX_TOKEN_ID, Request

# By sample of a request: what it generated before, None for one that has ended.
SoFar = Sequence[Sequence[int] | None]

GUESSING_SEQUENCES = 8  # that may make all their guesses in the same step
MAX_SAMPLES = 128  # of one request: each is a sequence, and one client must not queue a million with a few bytes


@dataclass(frozen=True, slots=True)
class Limits:
    """Decided once, before the scheduler is made. The batching names are those of text-generation-inference."""

    page_size: int  # tokens per page
    num_pages: int  # page 0, which is never handed out, included
    max_batch_size: int  # slots
    max_step_tokens: int
    max_batch_prefill_tokens: int  # of prompts, in one step
    max_sequence_tokens: int  # prompt and answer together
    max_batch_total_tokens: int | None = None  # prompts and answers, at their longest, of all that run
    max_queued: int | None = None  # sequences
    # While sequences run, admissions wait until `waiting_served_ratio` × as many wait, or those have got
    # `max_waiting_tokens` each without one. 0 admits eagerly.
    waiting_served_ratio: float = 0.0
    max_waiting_tokens: int = 0
    short_prompt: int = 256  # tokens to compute; those with no more start in the order in which they came
    prefix_caching: bool = True
    # Kernels of prompts and of decodes have different bits. With `replays` each token is computed by the same kind
    # whenever it is: those of a prompt by prefills, and generated ones by decodes, also after a preemption, when they
    # are known. And only pages of prompts are reused.
    replays: bool = False
    forces_tokens: bool = True  # what a grammar leaves no choice about is computed several tokens to a step
    max_burst: int = 1  # tokens that a step may give each sequence while no other could join them
    max_loras: int = 0  # adapters that are on the device together
    max_guesses: int = 0  # of a sequence's next tokens, in one step; 0: none is guessed
    looks_up: bool = False  # guesses are what followed the same tokens earlier, which the host can look up too
    page_groups: tuple[Reach, ...] = (None,)  # the positions that the layers of each read
    # Snapshots of the state that slots have beside their pages, which the tokens before a position make: a prefix is
    # reused up to one. None where slots have no such state, and pages are all that a prefix takes.
    snapshots: int | None = None
    snapshot_tokens: int = 128  # the least distance of two that one sequence takes
    host_pages: int = 0  # of host memory, behind the prefix cache
    max_page_saves: int = 64  # pages that a step copies to the host
    max_page_restores: int = 16  # and from it; a page of tokens at least
    # The device computes while pages come from the host. Those for a step that others compute in come a step before it,
    # so that the others do not wait for them.
    restores_ahead: bool = False
    host_page_bytes: int = 0  # of one page, for statistics

    def __post_init__(self) -> None:
        for name in ("page_size", "max_batch_size", "max_batch_prefill_tokens", "max_sequence_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_pages < 2:
            raise ValueError(f"num_pages is {self.num_pages}; it must be at least 2, page 0 is reserved")
        if self.max_step_tokens < self.max_batch_size:
            raise ValueError(
                f"max_step_tokens is {self.max_step_tokens}; it must be at least max_batch_size "
                f"({self.max_batch_size}), so that every running sequence gets a token in every step"
            )
        if not 1 <= self.max_burst <= self.page_size:
            raise ValueError(
                f"max_burst is {self.max_burst}; it must be between 1 and page_size ({self.page_size}), so that no "
                "sequence needs more than one page in a step"
            )
        if not 0 <= self.max_guesses < self.page_size:
            raise ValueError(
                f"max_guesses is {self.max_guesses}; it must be less than page_size ({self.page_size}), so that no "
                "sequence needs more than one page in a step"
            )
        if not self.page_groups or any(reach is not None and most_read(reach) < 2 for reach in self.page_groups):
            raise ValueError(f"page_groups is {self.page_groups}; a window or a chunk has at least 2 positions")
        if self.host_pages < 0 or self.max_page_saves < 0 or self.max_page_restores < 1:
            raise ValueError(
                f"host_pages, max_page_saves and max_page_restores are {self.host_pages}, {self.max_page_saves} and "
                f"{self.max_page_restores}; they must be at least 0, 0 and 1"
            )
        if self.host_pages and not self.prefix_caching:
            raise ValueError("host_pages needs prefix_caching")
        if self.snapshots is not None and (self.max_guesses or self.host_pages):
            raise ValueError("slots with state have no guesses and no host pages")
        if self.replays and (self.forces_tokens or self.max_guesses or self.snapshots is not None):
            raise ValueError("replays goes with neither forces_tokens nor max_guesses nor slots with state")
        if (self.snapshots or 0) < 0 or self.snapshot_tokens < 0:
            given = f"{self.snapshots} and {self.snapshot_tokens}"
            raise ValueError(f"snapshots and snapshot_tokens are {given}; they must be at least 0")
        if self.waiting_served_ratio < 0 or self.max_waiting_tokens < 0:
            raise ValueError("waiting_served_ratio and max_waiting_tokens must be at least 0")

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def pages_to_start(self, num_tokens: int) -> int:
        """Pages, over all groups, that a sequence of `num_tokens` known tokens has at once while they are computed."""
        return self.pages_of(num_tokens, self.max_batch_prefill_tokens)

    def pages_of(self, num_tokens: int, step_tokens: int = 1) -> int:
        """Pages, over all groups, that a sequence of `num_tokens` may have at once if its steps have `step_tokens`."""
        total = 0
        for reach in self.page_groups:
            count = self.pages_for(num_tokens)
            if reach is not None:  # the most pages that this many consecutive positions touch
                count = min(count, (most_read(reach) + step_tokens - 3) // self.page_size + 2)
            total += count
        return total

    def max_tokens_of(self, request: Request) -> int:
        """The most tokens that `request` gets in a step: those that are forced lie in one page."""
        if request.grammar is not None and self.forces_tokens:
            return self.page_size
        return max(self.max_burst, 1 + self.max_guesses)

    @property
    def max_step_guesses(self) -> int:
        """Guesses of all sequences in one step. Few make as many as they may; many make about one each."""
        most = max(self.max_batch_size, GUESSING_SEQUENCES * self.max_guesses) if self.max_guesses else 0
        return min(most, self.max_batch_size * self.max_guesses, self.max_step_tokens - self.max_batch_size)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the cache holds in sequences of the maximum length."""
        longest = self.max_sequence_tokens
        return (self.num_pages - 1) * self.pages_for(longest) // self.pages_of(longest) * self.page_size

    def admission_rule(self, num_running: int, num_waiting: int, tokens_since_admission: int) -> str | None:
        """The rule by which sequences may begin now; None while they must wait for more to wait."""
        if not self.max_waiting_tokens or not self.waiting_served_ratio:
            return CHUNKING
        if not num_running or tokens_since_admission >= self.max_waiting_tokens:
            return WAIT_EXCEEDED
        # At least the whole part of the product, which may be beyond all whole numbers.
        return BACKPRESSURE if num_waiting + 1 > num_running * self.waiting_served_ratio else None

    def refuse_what_cannot_fit(self, request: Request) -> None:
        """Raise when `request` could not run even by itself."""
        total = len(request.prompt) + request.max_tokens
        parts = f"prompt of {len(request.prompt)} tokens + max_tokens of {request.max_tokens} = {total}"
        if total > self.max_sequence_tokens:
            raise PromptTooLong(f"{parts}; the limit is {self.max_sequence_tokens}")
        pages = self.pages_of(total)
        if pages > self.num_pages - 1:
            raise PromptTooLong(f"{parts}; they take {pages} pages, the cache holds {self.num_pages - 1}")
        if self.max_batch_total_tokens is not None and total > self.max_batch_total_tokens:
            raise PromptTooLong(f"{parts}; max_batch_total_tokens is {self.max_batch_total_tokens}")
        if request.samples > MAX_SAMPLES:
            raise InvalidRequest(f"samples is {request.samples}; the limit is {MAX_SAMPLES}")
        if self.max_queued is not None and request.samples > self.max_queued:
            raise InvalidRequest(f"samples is {request.samples}; the queue takes {self.max_queued}")


def refuse_impossible_resume(request: Request, so_far: SoFar) -> None:
    """Raise when `request` cannot have generated `so_far`."""
    if len(so_far) != request.samples:
        raise InvalidRequest(f"{len(so_far)} samples are to go on; the request has {request.samples}")
    if all(generated is None for generated in so_far):
        raise InvalidRequest("every sample has ended, none can go on")
    longest = max(len(generated) for generated in so_far if generated is not None)
    if longest and longest >= request.max_tokens:
        raise InvalidRequest(f"{longest} tokens were generated; max_tokens is {request.max_tokens}")
    for generated in so_far:
        if generated and not (min(generated) >= 0 and max(generated) <= MAX_TOKEN_ID):
            raise InvalidRequest(f"a generated token is not between 0 and {MAX_TOKEN_ID}")
