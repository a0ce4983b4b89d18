"""The contract between the scheduler and an executor: a step's plan and its result, as plain data."""

from enum import IntEnum
from typing import NamedTuple

from quire.errors import QuireError
from quire.request import FinishReason, SamplingParams


class Kind(IntEnum):
    """The source of a chunk's tokens."""

    PREFILL = 0  # tokens that the slot knows: those of its start, then those that it sampled
    # The token that the slot sampled last, then those sampled within the step (a burst). One that samples none is a
    # token that was generated before, and is computed again as it was then.
    DECODE = 1
    FORCED = 2  # two or more: the slot's last token, then those that the plan brings
    VERIFY = 3  # two or more: the slot's last token, then guesses of those that follow it


class Chunk(NamedTuple):
    """One sequence's share of a step: the positions [start, start + length).

    Where tokens are guessed the device knows how many of them were right before the host does. A DECODE or VERIFY chunk
    begins with its slot's last token then, wherever that stands; `start` is the highest position that it can have.
    """

    request_id: int
    sample: int
    epoch: int  # of the sequence; results of an older epoch are dropped
    slot: int
    kind: Kind
    start: int
    length: int
    new_pages: tuple[tuple[int, ...], ...]  # by page group, appended to the slot's page tables; () for none at all
    samples: bool  # False when the chunk does not reach the end of the known tokens


class Tier(IntEnum):
    """A memory that has pages, numbered by itself."""

    DEVICE = 0
    HOST = 1


class Place(NamedTuple):
    """A page of a tier."""

    tier: Tier
    page: int


class PageCopy(NamedTuple):
    """The contents of page `source`, of every layer, go to page `target`. At least one of them is on the device.

    A page of the host that is written counts once the step has its result, and is read only by later plans. None that
    a step under way reads or writes is the target of another copy.
    """

    source: Place
    target: Place


_new = tuple.__new__  # PageCopy(...) and Place(...) at half their cost: they are many
_DEVICE, _HOST = Tier.DEVICE, Tier.HOST


def device_copy(source: int, target: int) -> PageCopy:
    return PageCopy(Place(Tier.DEVICE, source), Place(Tier.DEVICE, target))


def copy_to_host(page: int, host_page: int) -> PageCopy:
    return _new(PageCopy, (_new(Place, (_DEVICE, page)), _new(Place, (_HOST, host_page))))


def copy_from_host(host_page: int, page: int) -> PageCopy:
    return _new(PageCopy, (_new(Place, (_HOST, host_page)), _new(Place, (_DEVICE, page))))


class ForcedTokens(NamedTuple):
    """Tokens that a grammar leaves no choice about, which stand in a slot from `start` on before it samples them."""

    slot: int
    start: int
    tokens: tuple[int, ...]


class AdapterLoad(NamedTuple):
    """Adapter `number` goes into an adapter slot of the device."""

    slot: int  # from 1 on: 0 stands for no adapter
    number: int


class SlotStart(NamedTuple):
    """A slot that starts in this step, with empty page tables and these tokens and sampling state."""

    slot: int
    sampling: SamplingParams
    seed: int
    sample: int  # which of the request's continuations this is; part of the sampling key
    prompt: tuple[int, ...]
    generated: tuple[int, ...]  # not empty after a preemption; its length is the index of the next draw
    min_tokens: int
    end_ids: tuple[int, ...]  # what may not be sampled before min_tokens
    prompt_logprobs: int | None
    adapter: int = 0  # the adapter slot that its tokens use; 0 for none
    snapshot: int = 0  # the state that it begins with, beside pages; 0 where it begins with its first token
    min_length: int = 0  # its tokens are computed as those of a sequence that has at least so many


class StateSave(NamedTuple):
    """The state that a slot has beside pages, after the chunks of the step, goes to a snapshot.

    It counts once the step has its result, and is read only by later plans.
    """

    slot: int
    snapshot: int


class StepPlan(NamedTuple):
    """One step: the copies in their order, then the adapters to load, then slots that start, then forced tokens, then
    the chunks: decodes, then those with guesses, then those with forced tokens, then prefills; then states to save. One
    that copies pages from the host may have no chunks."""

    step: int
    chunks: tuple[Chunk, ...]
    copies: tuple[PageCopy, ...] = ()
    started: tuple[SlotStart, ...] = ()
    # Chunks, by index, that sample under a grammar. A plan with any is not sampled before it gets its masks.
    guided: tuple[int, ...] = ()
    forced: tuple[ForcedTokens, ...] = ()
    adapter_loads: tuple[AdapterLoad, ...] = ()
    burst: int = 1  # the most tokens that a chunk samples one after the other; above 1, all chunks are DECODE
    saves: tuple[StateSave, ...] = ()
    # The chunks of each kind; the others are decodes.
    num_verified: int = 0
    num_forced: int = 0
    num_prefills: int = 0

    @property
    def num_decodes(self) -> int:
        return len(self.chunks) - self.num_verified - self.num_forced - self.num_prefills

    @property
    def verified(self) -> tuple[Chunk, ...]:
        """The chunks with guesses, which follow decodes."""
        return self.chunks[self.num_decodes :][: self.num_verified]

    @property
    def prefills(self) -> tuple[Chunk, ...]:
        """The chunks of prompts, which come last."""
        return self.chunks[len(self.chunks) - self.num_prefills :]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: of the token that stands there, and of the most likely ones."""

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


# Why a row has failed that no token is left for; the only failure for which its request may be to blame.
NO_TOKEN_LEFT = (
    "no token can be sampled: the request's grammar, allowed_token_ids, bad_words, logit_bias, min_tokens and "
    "penalties leave none"
)


class StepResult(NamedTuple):
    step: int
    # For each chunk that samples, in the plan's order; more than one in a burst. Of a chunk with guesses: those that
    # were right, and the token after them.
    tokens: list[list[int]]
    # By index of the chunk: one for each of its new tokens.
    logprobs: dict[int, list[TokenLogprobs]] = {}  # noqa: RUF012
    # By index of the chunk: of the next token, for each of its positions that is followed by a token of the prompt.
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}  # noqa: RUF012
    # By index of the chunk: the reason why only this row has no result, or none after those in `tokens`.
    failed: dict[int, str] = {}  # noqa: RUF012
    # Pages of the host that have nothing in them: copies to them, of this step or one before, have failed.
    lost_pages: tuple[int, ...] = ()
    waited_s: float = 0.0  # for copies of pages, when all else was there


class Guesses(NamedTuple):
    """Guesses of tokens, and how many steps those that were right spared."""

    made: int
    right: int


class Update(NamedTuple):
    """The outcome of a step for one sequence. Plain data: it goes to the client's front end as it is."""

    request_id: int
    sample: int
    tokens: list[int]
    finish: FinishReason | None
    cached_tokens: int  # prompt tokens that were not computed because their pages were cached
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs] | None
    guesses: Guesses | None = None  # of the step, where there were any


class Failure(NamedTuple):
    """A request that ends without an answer."""

    request_id: int
    error: QuireError
