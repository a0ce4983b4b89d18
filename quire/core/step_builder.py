"""A step while it is planned."""

from quire.core.plan import AdapterLoad, Chunk, ForcedTokens, Kind, PageCopy, SlotStart, StateSave
from quire.core.restores import Restoring
from quire.core.sequence import Sequence
from quire.core.state_saves import Saved

ORDER = (Kind.DECODE, Kind.VERIFY, Kind.FORCED, Kind.PREFILL)  # of the chunks in a step
_new = tuple.__new__  # Chunk(...) at half its cost: chunks are most of a plan


class StepBuilder:
    """A step while it is planned."""

    __slots__ = (
        "allowance",
        "budget",
        "chunks",
        "copies",
        "last",
        "loads",
        "longest",
        "num_admitted",
        "num_forced",
        "num_prefills",
        "num_verified",
        "parked_tokens",
        "passed",
        "restored",
        "restores_left",
        "rows",
        "saved",
        "share",
        "started",
        "waits_for_adapter",
    )

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.rows: list[Sequence] = []  # of each chunk
        self.started: list[SlotStart] = []
        self.copies: list[PageCopy] = []
        self.budget = 0  # tokens of prompts that it may still have
        self.allowance = 0  # of those, the tokens that the next prompt may have
        self.share = 0  # the tokens for those behind `longest`, used or not
        # The first prompt that does not end in this step and the last one that does: the tokens it has pages for, and
        # its pages in each group before.
        self.longest: tuple[Sequence, int, int] | None = None
        self.last: tuple[Sequence, int, int] | None = None
        self.passed: list[Sequence] = []  # long prompts at the head of the queue that shorter ones pass
        self.waits_for_adapter: list[Sequence] = []  # those at the head that wait for an adapter slot
        self.loads: list[AdapterLoad] = []
        self.num_admitted = 0
        self.parked_tokens = 0  # of sequences that wait for pages of others from now on
        self.num_verified = self.num_forced = self.num_prefills = 0  # chunks of these kinds
        self.restored: list[Restoring] = []
        self.saved: list[Saved] = []
        self.restores_left = 0  # pages that may still be copied from the host

    def add(self, sequence: Sequence, kind: Kind, length: int, num_pages: int, samples: bool) -> None:
        """The next `length` positions of `sequence`, which had `num_pages` in each group before."""
        assert length >= 1, f"a chunk of request {sequence.request_id} has {length} positions"
        start = sequence.num_planned
        sequence.num_planned = start + length
        tables = sequence.tables
        new_pages: tuple[tuple[int, ...], ...] = ()
        if len(tables[0]) > num_pages:
            new_pages = tuple([tuple(table[num_pages:]) for table in tables])  # a list is faster than a generator
        owner = sequence.request_id, sequence.sample, sequence.epoch, sequence.slot
        self.chunks.append(_new(Chunk, (*owner, kind, start, length, new_pages, samples)))
        self.rows.append(sequence)
        if kind is not Kind.DECODE:
            self._count(kind, 1)

    def _count(self, kind: Kind, number: int) -> None:
        if kind is Kind.PREFILL:
            self.num_prefills += number
        elif kind is Kind.FORCED:
            self.num_forced += number
        elif kind is Kind.VERIFY:
            self.num_verified += number

    def sort(self, begin: int) -> None:
        """Put the chunks from `begin` on, before there are any of prompts, into the order of `StepPlan`."""
        order = sorted(range(begin, len(self.chunks)), key=lambda at: ORDER.index(self.chunks[at].kind))
        self.chunks[begin:] = [self.chunks[at] for at in order]
        self.rows[begin:] = [self.rows[at] for at in order]

    @property
    def computes(self) -> bool:
        """True if a sequence computes in this step so far."""
        return bool(self.chunks) or self.longest is not None or self.last is not None

    @property
    def prompts_version(self) -> tuple[int, int, object, object]:
        """Version of the prompt contents."""
        return len(self.chunks), len(self.restored), self.longest, self.last

    def restore(self, copies: list[PageCopy], restoring: Restoring) -> None:
        """Pages come from the host in place of being computed."""
        self.copies += copies
        self.restored.append(restoring)
        self.restores_left = max(0, self.restores_left - len(copies))

    def without_preempted(self) -> int:
        """Drop the chunks of sequences that were preempted afterwards. Returns the number of decodes that sample, which
        are the first."""
        kept = []
        for chunk, row in zip(self.chunks, self.rows, strict=True):
            if chunk.epoch == row.epoch:
                kept.append((chunk, row))
            else:
                self._count(chunk.kind, -1)
        self.chunks, self.rows = [chunk for chunk, _ in kept], [row for _, row in kept]
        others = (at for at, chunk in enumerate(self.chunks) if chunk.kind is not Kind.DECODE or not chunk.samples)
        return next(others, len(self.chunks))


def slot_start(sequence: Sequence) -> SlotStart:
    request = sequence.request
    return SlotStart(
        slot=sequence.slot,
        sampling=request.sampling,
        seed=request.seed,
        sample=sequence.sample,
        prompt=request.prompt,
        generated=tuple(sequence.tokens[sequence.num_prompt :]),
        min_tokens=request.min_tokens,
        end_ids=request.end_ids + request.stop_ids,
        prompt_logprobs=request.prompt_logprobs,
        adapter=sequence.adapter_slot,
        snapshot=sequence.snapshot,
        min_length=sequence.min_length,
    )


def state_saves(step: StepBuilder) -> tuple[StateSave, ...]:
    return tuple(StateSave(saved.sequence.slot, saved.snapshot) for saved in step.saved)


def guided(step: StepBuilder) -> tuple[int, ...]:
    """The chunks that sample under a grammar, by index."""
    rows = enumerate(zip(step.chunks, step.rows, strict=True))
    return tuple(index for index, (chunk, row) in rows if chunk.samples and row.request.grammar is not None)


def forced_tokens(step: StepBuilder) -> tuple[ForcedTokens, ...]:
    """The tokens that chunks compute and their slots have not sampled, or will have."""
    rows = zip(step.chunks, step.rows, strict=True)
    return tuple(
        ForcedTokens(chunk.slot, len(row.tokens), tuple(row.forced_before(chunk.start + chunk.length)))
        for chunk, row in rows
        if chunk.kind is Kind.FORCED
    )
