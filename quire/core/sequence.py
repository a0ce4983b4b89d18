"""A request inside the engine."""

from collections.abc import Iterable
from enum import Enum, auto

from quire.core.prefix_cache import Match, Node, Place
from quire.core.stopping import Stopping
from quire.request import Request


class State(Enum):
    WAITING = auto()  # in the queue, or parked until another sequence has computed a page it needs
    FILLING = auto()  # has a slot; not all of its known tokens are planned
    DECODING = auto()  # has a slot; its next token is planned as soon as the last one is
    ENDED = auto()


class Sequence:
    """One continuation of a request's prompt: its tokens, how many are computed, its pages, its slot.

    `tokens` are those the host knows. `num_computed` of their positions are confirmed by results; `num_planned` are
    confirmed or in flight, one of which may be the position of a token the host does not know yet. Pages cover at
    least the planned positions. A new `epoch` begins when the sequence loses its slot; results that belong to an
    older one are dropped. Owned by the engine thread.
    """

    __slots__ = (
        "cached_tokens",
        "epoch",
        "fill_key",
        "id",
        "limit",
        "match",
        "num_computed",
        "num_planned",
        "num_prompt",
        "num_scored",
        "page_end",
        "pages",
        "place",
        "plain_end",
        "request",
        "request_id",
        "salt",
        "sample",
        "slot",
        "state",
        "stopping",
        "tokens",
    )

    def __init__(self, id: int, request: Request, sample: int, salt: str, generated: Iterable[int] = ()) -> None:
        self.id = id
        self.request = request
        self.request_id = request.request_id
        self.sample = sample
        self.salt = salt
        self.stopping = Stopping(request)
        self.tokens = [*request.prompt, *generated]
        self.num_prompt = len(request.prompt)
        self.limit = self.num_prompt + request.max_tokens  # as many tokens as it may ever have
        self.state = State.WAITING
        self.slot = -1
        self.epoch = 0
        self.pages: list[int] = []
        self.page_end = 0  # the first position its pages do not cover
        self.plain_end = 0  # the first position whose decode needs a page or is not needed at all
        self.match: Match | None = None  # while it waits: what of it was found in the cache last
        self.place: Place | None = None  # while it runs: up to where its pages have been published
        self.num_computed = 0
        self.num_planned = 0
        self.num_scored = 0  # prompt positions whose next token's log-probabilities have been handed out
        self.cached_tokens = 0  # of the prompt, when it first got a slot
        self.fill_key: tuple[Node | str, bytes] | None = None  # the page others may wait for it to compute

    @property
    def age(self) -> tuple[int, int]:
        """Sorts what runs first before what runs later; the last is the first to be preempted."""
        return self.request.priority, self.id

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_reusable(self) -> int:
        """How many tokens may come from the cache: all but the last, which must be computed to sample the next.

        Log-probabilities of a prompt come only from computing it, so a prompt that still needs them is not reused.
        """
        if self.request.prompt_logprobs is not None and self.num_scored < self.num_prompt - 1:
            return self.num_scored
        return len(self.tokens) - 1

    def restart(self) -> None:
        """Back to waiting, with nothing on the device. The pages must have been released."""
        self.state = State.WAITING
        self.epoch += 1
        self.slot = -1
        self.pages = []
        self.page_end = self.plain_end = 0
        self.place = None
        self.num_computed = self.num_planned = 0
