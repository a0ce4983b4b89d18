"""One sample of a request, and its end conditions."""

from collections.abc import Collection, Iterable
from enum import Enum, auto
from functools import lru_cache
from typing import cast

from quire.core.host_tier import Restore
from quire.core.lookup import Lookup
from quire.core.prefix_cache import Match, PrefixCursor
from quire.core.prefix_tree import Node
from quire.request import FinishReason, Request


class State(Enum):
    WAITING = auto()  # in the queue, or parked until another sequence has computed a page it needs
    PREFILLING = auto()  # has a slot; not all of its known tokens are planned
    DECODING = auto()  # has a slot; its next token is planned as soon as the last one is
    ENDED = auto()


class Stopping:
    """The end conditions of requests. Strings are not among them: the front end looks for those in the text."""

    __slots__ = ("_ends", "_max_tokens", "_min_tokens", "_stops", "watched")

    def __init__(self, max_tokens: int, min_tokens: int, end_ids: tuple[int, ...], stop_ids: tuple[int, ...]) -> None:
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._ends = frozenset(end_ids)
        self._stops = frozenset(stop_ids)
        self.watched = self._ends | self._stops  # no other token ends it before its length

    def reason(self, token: int, count: int) -> FinishReason | None:
        """The reason why `token`, the `count`-th generated one, is the last; None when it is not.

        A token that ends the sequence exactly at its length is still an end, not a cut.
        """
        if count >= self._min_tokens:
            if token in self._ends:
                return FinishReason.END
            if token in self._stops:
                return FinishReason.STOP_TOKEN
        return FinishReason.LENGTH if count >= self._max_tokens else None

    def ends(self, tokens: list[int], count: int) -> bool:
        """True if any of `tokens`, which follow `count` generated ones, is the last."""
        return any(self.reason(token, count + n) is not None for n, token in enumerate(tokens, start=1))


_stopping = lru_cache(1024)(Stopping)  # most requests have those of others, which are then near in memory


class Guessing:
    """The record of guesses for one sequence."""

    __slots__ = ("chance", "lookup", "mean", "next_try", "pause")

    def __init__(self, chance: float, pause: int, lookup: Lookup | None = None) -> None:
        self.lookup = lookup  # where guesses are looked up; then the chances are there
        self.chance = chance  # of a guess to be right if those before it are, by the last ones
        self.mean = chance  # the same, by many
        self.pause = pause  # tokens from one try to the next while it is low
        self.next_try = 0  # the number of tokens from which on it tries


class StepFields:
    """The fields that every step uses of every sequence. As slots of a base class they lie side by side in memory,
    which halves the misses of the processor's caches in a step of thousands."""

    __slots__ = (
        "cached_tokens",
        "epoch",
        "limit",
        "num_computed",
        "num_planned",
        "plain_end",
        "request_id",
        "sample",
        "slot",
        "stopping",
        "tokens",
    )


class Sequence(StepFields):
    """One continuation of a request's prompt: its tokens, how many are computed, its pages, its slot.

    `tokens` are those the host knows. `num_computed` of their positions are confirmed by results; `num_planned` are
    confirmed or in flight, one of which may be the position of a token the host does not know yet. `num_unsure` of
    those in flight are guesses; the wrong ones are planned no more once their results are there. `tables` has the
    pages of each group by position // page size; they cover at least the planned positions, but for 0 in place of those
    that the group's window has left behind. A new `epoch` begins when the sequence loses its slot; results that belong
    to an older one are dropped. Owned by the engine thread.
    """

    __slots__ = (
        "adapter",
        "adapter_slot",
        "cuts",
        "digests",
        "due",
        "first_held",
        "forced",
        "forced_end",
        "guessing",
        "id",
        "is_started",
        "match",
        "min_length",
        "num_prompt",
        "num_scored",
        "num_unsure",
        "page_end",
        "promised",
        "published",
        "replay_end",
        "replays",
        "request",
        "restore",
        "restore_end",
        "reuses",
        "rolling",
        "salt",
        "save_at",
        "saved_end",
        "snapshot",
        "state",
        "switch_end",
        "switch_salt",
        "tables",
    )

    def __init__(
        self,
        id: int,
        request: Request,
        sample: int,
        salt: str,
        generated: Collection[int] = (),
        adapter: int = 0,
        reuses: bool = True,
        replays: bool = False,
    ) -> None:
        """`reuses`: it may begin with pages that others computed, and others with its own. `replays`: of its tokens
        those that it generated are always decoded."""
        self.id = id
        self.reuses = reuses
        self.replays = replays
        self.replay_end = 0  # while it runs: the position before which decodes have tokens that are known
        self.request = request
        self.request_id = request.request_id
        self.sample = sample
        self.salt = salt
        self.adapter = adapter  # its number; 0 for none
        self.adapter_slot = 0  # where it is on the device, while the sequence runs
        self.stopping = _stopping(
            request.max_tokens, request.min_tokens, () if request.ignore_end else request.end_ids, request.stop_ids
        )
        # The request's own until it has a slot, when it gets more: a long prompt is not kept twice while it waits.
        self.tokens = [*request.prompt, *generated] if generated else cast(list[int], request.prompt)
        self.num_prompt = len(request.prompt)
        self.due = 0  # its place among the prompts that wait; the queue says what that is
        self.limit = self.num_prompt + request.max_tokens  # as many tokens as it may ever have
        # `switch_end` is its length when it is computed anew, or `limit`; `switch_salt` is the salt that is not in use.
        self.switch_end, self.switch_salt = self.limit, salt
        self.min_length = 0  # its tokens are computed as those of a sequence that has at least so many
        self.forced: list[int] = []  # tokens, known or next, that its grammar left no choice about
        self.forced_end = 0  # the position after them
        self.state = State.WAITING
        self.slot = -1
        self.epoch = 0
        self.tables: list[list[int]] = []
        self.first_held: list[int] = []  # by group: the entries of the table before it are 0
        self.page_end = 0  # the first position its pages do not cover
        # The first position that needs a page to decode, or after which the state is saved, or that is not needed.
        self.plain_end = 0
        self.is_started = False  # whether the device knows its slot; not before its first chunk
        self.restore: Restore | None = None  # while pages of it are on the host that are to be copied to the device
        self.restore_end = 0  # the position up to which they were, or will be
        self.digests: list[bytes] = []  # of its first pages, where there is a host tier
        self.match: Match | None = None  # while it waits: the last search for it in the cache
        self.published: PrefixCursor | None = None  # while it runs: the end of what it has published
        self.num_computed = 0
        self.num_planned = 0
        self.num_unsure = 0
        self.guessing: Guessing | None = None  # None where nothing is guessed
        # If slots have state beside pages: the snapshot that it began with; the positions at which it took its last and
        # takes the next (0: not known yet); those of its prompt that stay; the last one that does not.
        self.snapshot = self.saved_end = self.save_at = 0
        self.cuts: list[int] = []
        self.rolling: tuple[Node, int] | None = None
        self.num_scored = 0  # prompt positions with log-probabilities that have been handed out
        self.cached_tokens = 0  # of the prompt, when it first got a slot
        # The page that others may wait for it to compute: the end of the prefix before it, and its tokens.
        self.promised: tuple[Node | str, bytes] | None = None

    def own_tokens(self) -> None:
        """It gets more tokens from now on."""
        if not isinstance(self.tokens, list):
            self.tokens = list(self.tokens)

    @property
    def age(self) -> tuple[int, int]:
        """Sorts what runs first before what runs later; the last is the first to be preempted."""
        return self.request.priority, self.id

    @property
    def turn(self) -> tuple[int, int, int]:
        """Sorts prompts in the order in which they are computed: first those that ran before, by age."""
        has_run = self.epoch or self.num_generated
        return self.request.priority, 0 if has_run else self.due, self.id

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_reusable(self) -> int:
        """Tokens that may come from the cache: all but the last, which must be computed to sample the next.

        Log-probabilities of a prompt come only from computing it, so a prompt that still needs them is not reused.
        """
        if self.request.prompt_logprobs is not None and self.num_scored < self.num_prompt - 1:
            return self.num_scored
        return self.prompt_end - 1

    @property
    def prompt_end(self) -> int:
        """The position up to which its known tokens are computed as those of a prompt are."""
        return self.num_prompt if self.replays else len(self.tokens)

    @property
    def goal(self) -> int:
        """The position up to which a chunk of its prompt may go."""
        return self.save_at if self.save_at > self.num_planned else self.prompt_end

    @property
    def num_shared(self) -> int:
        """Computed positions whose pages others may reuse."""
        return min(self.num_computed, self.prompt_end)

    def decode(self) -> None:
        """All tokens that are computed as those of a prompt are planned."""
        self.state = State.DECODING
        if self.num_planned < len(self.tokens):
            self.replay_end = len(self.tokens) - 1
            self.cover(self.page_end)

    def cut_after(self, position: int) -> int:
        """The position at which a chunk of its prompt ends next for a snapshot that stays; 0 for none."""
        return next((cut for cut in self.cuts if cut > position), 0)

    def cover(self, end: int) -> None:
        """Its pages cover the positions before `end`."""
        self.page_end = end
        self.plain_end = min(end, self.last_end)
        if self.save_at:
            self.plain_end = min(self.plain_end, self.save_at - 1)
        if self.num_planned < self.replay_end:
            self.plain_end = 0

    @property
    def last_end(self) -> int:
        """The position that is not planned: its token is the last one, or it is computed anew before."""
        return min(self.limit - 1, self.switch_end)

    def switch_if_due(self) -> None:
        """Compute it as one that is longer from now on, if it has more tokens than before the switch. It must not
        run."""
        if len(self.tokens) <= self.switch_end:
            return
        self.salt, self.switch_salt = self.switch_salt, self.salt
        self.min_length, self.switch_end = self.switch_end + 1, self.limit
        self.digests, self.match = [], None

    def force(self, tokens: Iterable[int]) -> None:
        """Its next tokens are certain to be these."""
        self.forced = list(tokens)
        self.forced_end = len(self.tokens) + len(self.forced)

    def forced_before(self, end: int) -> list[int]:
        """The forced tokens after the known ones, up to the position `end`."""
        begin = self.forced_end - len(self.forced)
        return self.forced[len(self.tokens) - begin : end - begin]

    def restart(self) -> None:
        """Back to waiting, with nothing on the device: it is computed as its length says now. The pages must have been
        released."""
        self.state = State.WAITING
        self.epoch += 1
        self.slot = -1
        self.tables, self.first_held = [], []
        self.page_end = self.plain_end = self.replay_end = 0
        self.published = self.restore = None
        self.is_started = False
        self.restore_end = 0
        self.snapshot = self.saved_end = self.save_at = 0
        self.num_computed = self.num_planned = self.num_unsure = 0
        self.switch_if_due()
