"""An executor whose every token can be worked out by hand.

Its pages hold digests of tokens where real ones hold keys and values. A chunk reads back, through its slot's page table
of each group, every position that its layers would read; a page never written, a page of other tokens or of another
group, or a hole in the positions fails at once. Positions that a group's layers do not reach are not read. Digests
depend on the adapter, which must stay in its slot while it is used. Like a device it knows no tokens but those of slot
starts and those that it sampled.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from quire.core.plan import Chunk, Kind, SlotStart, StepPlan, StepResult, TokenLogprobs
from quire.reach import ChunkReach, Reach
from quire.request import Request
from tests.fake_host_pages import FakeHostPages, Page, copy_page, page_of_bytes, page_to_bytes

ORDER = (Kind.DECODE, Kind.VERIFY, Kind.FORCED, Kind.PREFILL)  # of the chunks in a plan
VOCABULARY = 50
POISON = 48  # a request whose prompt holds this fails its steps, where a test says so
NAN = 49  # a request whose prompt holds this fails alone, without failing the step
PLAINLY = (1.0, 0, 1.0, 0.0, 1.0)  # a draw with this temperature and these filters

Allowed = Callable[[int], bool]  # whether a token may be sampled
Guide = Callable[[list[int]], Allowed]  # after what was generated


def digest(previous: int, token: int) -> int:
    """Stands for a position's keys and values: it depends on the token and on everything before it."""
    return hash((previous, token))  # of ints, so the same in every process


def is_read(reach: Reach, position: int, by: int) -> bool:
    """Whether a later position reads this one."""
    if isinstance(reach, ChunkReach):
        return position // reach.size == by // reach.size
    return reach is None or by - position < reach


def sample(
    state: int,
    start: SlotStart,
    index: int,
    allowed: Allowed = lambda token: True,
    generated: Sequence[int] = (),
) -> int:
    """The `index`-th token generated after a prefix whose digest is `state`: the first of those with the highest score
    that comes from the drawn one on. Greedy requests draw nothing. `generated`: the tokens before it, of which scores
    are lowered where there are penalties."""
    sampling, most = start.sampling, VOCABULARY - 2
    draw: tuple[float, ...] = ()
    if sampling.temperature and sampling.top_k != 1:
        draw = start.seed, start.sample, index
        how = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.typical_p
        draw += how if how != PLAINLY else ()
    token = hash((state, *draw)) % most

    def may_come(token: int) -> bool:
        return allowed(token) and (index >= start.min_tokens or token not in start.end_ids)

    if scores := _scores(start, generated):
        ring = [(token + place) % most for place in range(most)]
        return max(filter(may_come, ring), key=lambda one: scores.get(one, 0.0))  # the first of the highest
    while not may_come(token):
        token = (token + 1) % most
    return token


def _scores(start: SlotStart, generated: Sequence[int]) -> dict[int, float]:
    """Of the tokens that are more or less likely than others."""
    sampling = start.sampling
    scores = dict(sampling.logit_bias)
    for token in generated if sampling.frequency_penalty else ():
        scores[token] = scores.get(token, 0.0) - sampling.frequency_penalty
    for token in set(generated) if sampling.presence_penalty else ():
        scores[token] = scores.get(token, 0.0) - sampling.presence_penalty
    for token in {*start.prompt, *generated} if sampling.repetition_penalty != 1 else ():
        scores[token] = scores.get(token, 0.0) - (sampling.repetition_penalty - 1)
    return scores


def bits(tokens: Iterable[int]) -> bytes:
    """The mask that allows these."""
    return sum(1 << token for token in set(tokens)).to_bytes(4 * -(-VOCABULARY // 32), "little")


def allows(mask: bytes) -> Allowed:
    number = int.from_bytes(mask, "little")
    return lambda token: bool(number >> token & 1)


def logprobs_of(state: int, token: int) -> TokenLogprobs:
    return TokenLogprobs(-float(state % 1000) - token / 100, (token,), (-0.5,))


def expected_tokens(
    request: Request, sample_index: int = 0, guide: Guide = lambda tokens: lambda _: True, adapter: int = 0
) -> list[int]:
    """What `request` generates, worked out without pages, slots or steps. `guide` tells what its grammar allows,
    `adapter` is the number of its adapter."""
    start = slot_start(request, sample_index)
    state = adapter
    for token in request.prompt:
        state = digest(state, token)
    tokens: list[int] = []
    while len(tokens) < request.max_tokens:
        tokens.append(sample(state, start, len(tokens), guide(tokens), tokens))
        state = digest(state, tokens[-1])
        if len(tokens) >= request.min_tokens and (
            (tokens[-1] in request.end_ids and not request.ignore_end) or tokens[-1] in request.stop_ids
        ):
            break
    return tokens


def expected_logprobs(request: Request, tokens: Sequence[int], adapter: int = 0) -> list[TokenLogprobs]:
    """Those of the `tokens` that `request` generates."""
    state, logprobs = adapter, []
    for place, token in enumerate((*request.prompt, *tokens)):
        if place >= len(request.prompt):
            logprobs.append(logprobs_of(state, token))
        state = digest(state, token)
    return logprobs


def expected_prompt_logprobs(request: Request, adapter: int = 0) -> list[TokenLogprobs]:
    state, logprobs = adapter, []
    for token, following in zip(request.prompt, request.prompt[1:], strict=False):
        state = digest(state, token)
        logprobs.append(logprobs_of(state, following))
    return logprobs


def plan_of(step: int, chunks: Sequence[Chunk], **fields: object) -> StepPlan:
    """A plan made by hand, with the counts that a planner gives it. The chunks are in the order of a plan."""
    kinds = [chunk.kind for chunk in chunks]
    assert kinds == sorted(kinds, key=ORDER.index), "the chunks of a plan have another order"
    counts = kinds.count(Kind.VERIFY), kinds.count(Kind.FORCED), kinds.count(Kind.PREFILL)
    plan = StepPlan(step, tuple(chunks), **fields)  # type: ignore[arg-type]
    return plan._replace(num_verified=counts[0], num_forced=counts[1], num_prefills=counts[2])


def slot_start(request: Request, sample_index: int = 0) -> SlotStart:
    return SlotStart(
        0, request.sampling, request.seed, sample_index, request.prompt, (), request.min_tokens,
        request.end_ids + request.stop_ids, request.prompt_logprobs,
    )  # fmt: skip


@dataclass
class Slot:
    start: SlotStart
    tables: list[list[int]]  # pages by group
    adapter: int = 0  # its number
    weights: int = 0  # what stands for those of its adapter
    length: int | None = None  # positions computed; known from its first chunk
    tokens: list[int] = field(default_factory=list)  # those of its start and those that it sampled
    states: list[int] = field(default_factory=list)  # the digest after each of them

    @property
    def num_sampled(self) -> int:
        return len(self.tokens) - len(self.start.prompt)

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.start.prompt) :]

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.states.append(digest(self.states[-1] if self.states else self.weights, token))


class Pending:
    def __init__(self, outcome: Callable[[], StepResult], sample: Callable[[dict[int, bytes]], None]) -> None:
        self._outcome = outcome
        self.sample = sample

    def result(self) -> StepResult:
        return self._outcome()


# Called with a plan and the prompt of each of its rows; what it raises is what the step fails with.
Fault = Callable[[StepPlan, list[tuple[int, ...]]], None]


class FakeExecutor:
    """Runs each plan when it is submitted, as a device that takes work in order would."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_slots: int,
        before_submit: Fault | None = None,
        before_result: Fault | None = None,
        before_sample: Fault | None = None,
        before_check: Callable[[], object] | None = None,
        page_groups: Sequence[Reach] = (None,),
        guess_percent: int | None = None,
        num_host_pages: int = 0,
        num_snapshots: int | None = None,
        replays: bool = False,
    ) -> None:
        """`guess_percent` of guesses are right; None where plans have none, and every start is exact. `num_snapshots`:
        of the state that slots have beside pages, which each token changes; None where there is none. `replays`: what
        a decode writes differs from what a prefill writes for the same token."""
        self._replays = replays
        self._num_snapshots = num_snapshots
        self._guess_percent = guess_percent
        self.platform, self.num_late, self.num_padding_tokens, self.num_unfinished = "cpu", 0, 0, 0
        self._num_pages = num_pages
        self._page_size = page_size
        self._num_slots = num_slots
        self._groups = tuple(page_groups)
        self._before_submit = before_submit
        self._before_result = before_result
        self._before_sample = before_sample  # of steps that wait for masks
        self._before_check = before_check
        self.num_resets = 0
        self.plans: list[StepPlan] = []
        self._step = 0  # the one that runs
        self._last_collected = 0
        self._writers: dict[int, int] = {}  # the slot that writes to each page in this step
        self.adapters: dict[int, object] = {}  # on the host, by number
        self.host_pages = FakeHostPages(num_host_pages + 1)
        self._clear()

    def _clear(self) -> None:
        self._pages: list[Page] = [[None] * self._page_size for _ in range(self._num_pages)]
        self.host_pages.lose()
        # By number, the state that was saved: how many tokens made it, their digest, and the step that saved it.
        self._snapshots: dict[int, tuple[int, int, int]] = {}
        self._slots: list[Slot | None] = [None] * self._num_slots
        self._adapter_slots: dict[int, int] = {}  # the number of the adapter in each
        self._unsampled: StepPlan | None = None  # it waits for its masks

    def warm_up(self) -> Iterator[float]:
        yield 1.0

    def close(self) -> None:
        self._clear()

    def check_device(self) -> None:
        if self._before_check is not None:
            self._before_check()

    def reset(self) -> None:
        self.num_resets += 1
        self._clear()

    def add_adapter(self, number: int, adapter: object) -> None:
        self.adapters[number] = adapter

    def drop_adapter(self, number: int) -> None:
        del self.adapters[number]

    def adapter_digest(self, adapter: object) -> str:
        return repr(adapter)

    def read_pages(self, pages: Sequence[int]) -> Callable[[], memoryview]:
        for page in pages:
            written = [place[3] for place in self._pages[page] if place is not None]
            assert max(written) <= self._last_collected, f"page {page} is read too early"
        data = b"".join(page_to_bytes(self._pages[page]) for page in pages)
        return lambda: memoryview(data)

    def write_host_pages(self, pages: Sequence[int], data: Sequence[memoryview]) -> None:
        for page, contents in zip(pages, data, strict=True):
            self.host_pages.enter(page, page_of_bytes(contents))

    def submit(self, plan: StepPlan) -> Pending:
        assert self._unsampled is None, "a step was submitted before the last one could sample"
        counts = (plan.num_decodes, plan.num_verified, plan.num_forced, plan.num_prefills)
        kinds = [kind for kind, count in zip(ORDER, counts, strict=True) for _ in range(count)]
        assert [chunk.kind for chunk in plan.chunks] == kinds, "the chunks are not those that the plan counts"
        self.plans.append(plan)
        prompts = self._prompts(plan)
        if self._before_submit is not None:
            self._before_submit(plan, prompts)
        results: list[StepResult] = []
        if plan.guided:
            self._unsampled = plan
        else:
            results.append(self._run(plan))

        def sample(masks: dict[int, bytes]) -> None:
            assert self._unsampled is plan, "a step got masks that it did not wait for"
            if self._before_sample is not None:
                self._before_sample(plan, prompts)
            self._unsampled = None
            results.append(self._run(plan, masks))

        def outcome() -> StepResult:
            assert results, "a step was collected before it could sample"
            if self._before_result is not None:
                self._before_result(plan, prompts)
            self._last_collected = plan.step
            self.host_pages.collect(plan.step)
            return results[0]

        return Pending(outcome, sample)

    def _prompts(self, plan: StepPlan) -> list[tuple[int, ...]]:
        starting = {start.slot: start for start in plan.started}
        running = {number: slot.start for number, slot in enumerate(self._slots) if slot is not None}
        return [(running | starting)[chunk.slot].prompt for chunk in plan.chunks]

    def _run(self, plan: StepPlan, masks: Mapping[int, bytes] = MappingProxyType({})) -> StepResult:
        self._step, self._writers = plan.step, {}
        for copy in plan.copies:
            copy_page(copy, self._pages, self.host_pages, plan.step)
        for load in plan.adapter_loads:
            assert load.number in self.adapters, f"adapter {load.number} is not on the host"
            assert load.slot >= 1
            self._adapter_slots[load.slot] = load.number
        for start in plan.started:
            adapter = self._adapter_slots[start.adapter] if start.adapter else 0
            slot = self._slots[start.slot] = Slot(start, [[] for _ in self._groups], adapter, self._weights(adapter))
            for token in (*start.prompt, *start.generated):
                slot.append(token)
        for number, begin, forced in plan.forced:
            slot = self._slots[number]
            assert slot is not None, f"slot {number} was never started"
            assert begin <= len(slot.tokens), "forced tokens leave a hole"
            for position, token in enumerate(forced, start=begin):
                if position < len(slot.tokens):
                    assert slot.tokens[position] == token, "a forced token is not the one that was sampled"
                else:
                    slot.append(token)
        tokens: list[list[int]] = []
        logprobs: dict[int, list[TokenLogprobs]] = {}
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        failed: dict[int, str] = {}
        slots_used = [chunk.slot for chunk in plan.chunks]
        assert len(set(slots_used)) == len(slots_used), "a slot has two chunks in one step"
        for index, chunk in enumerate(plan.chunks):
            used = self._slots[chunk.slot]
            assert used is not None, f"slot {chunk.slot} was never started"
            allowed = allows(masks[index]) if index in masks else lambda token: True
            new, states = (
                self._verify(used, chunk) if chunk.kind is Kind.VERIFY else self._compute(used, chunk, allowed)
            )
            if NAN in used.start.prompt:
                failed[index] = "the logits of this row are not numbers"
                new, states = [], []
            if chunk.samples:
                tokens.append(new)
                if used.start.sampling.logprobs is not None:
                    logprobs[index] = [logprobs_of(state, token) for state, token in zip(states, new, strict=True)]
            if used.start.prompt_logprobs is not None:
                prompt_logprobs[index] = self._score(used, chunk)
        self._save_states(plan, set(slots_used))
        return StepResult(plan.step, tokens, logprobs, prompt_logprobs, failed)

    def _weights(self, number: int) -> int:
        """Of an adapter that is a number, that; of others the number of their load."""
        adapter = self.adapters.get(number)
        return adapter if isinstance(adapter, int) else number

    def _compute(self, slot: Slot, chunk: Chunk, allowed: Allowed) -> tuple[list[int], list[int]]:
        """Write the chunk's positions and sample. Returns the new tokens and the digests that they follow."""
        chunk = self._begin(slot, chunk)
        new: list[int] = []
        if chunk.kind is Kind.DECODE:
            assert slot.num_sampled, "the slot has not sampled"
            assert chunk.samples or (self._replays and chunk.length == 1), "a decode samples nothing"
            is_last = chunk.start == len(slot.tokens) - 1
            assert is_last == chunk.samples, "a decode that samples begins with the last token, and no other"
        for position in range(chunk.start, chunk.start + chunk.length):
            assert position < len(slot.tokens), f"the slot does not know the token at {position}"
            self._write(slot, chunk.slot, position, chunk.kind)
            last = position == chunk.start + chunk.length - 1
            if chunk.samples and (last or chunk.kind is Kind.DECODE):
                assert position == len(slot.tokens) - 1, "a chunk samples before the end of the known tokens"
                new.append(sample(slot.states[position], slot.start, slot.num_sampled, allowed, slot.generated))
                slot.append(new[-1])
        slot.length = chunk.start + chunk.length
        return new, slot.states[slot.length - len(new) : slot.length]

    def _save_states(self, plan: StepPlan, used: set[int]) -> None:
        """Each snapshot is of a slot that the step computed."""
        assert len({number for _, number in plan.saves}) == len(plan.saves), "two states go to one snapshot"
        for number, snapshot in plan.saves:
            slot = self._slots[number]
            assert number in used
            assert slot is not None
            assert slot.length
            assert 1 <= snapshot <= (self._num_snapshots or 0), f"there is no snapshot {snapshot}"
            self._snapshots[snapshot] = slot.length, slot.states[slot.length - 1], plan.step

    def _resume(self, slot: Slot, start: int) -> None:
        """A slot begins with the state of exactly the tokens before its first chunk."""
        if self._num_snapshots is None or not start:
            assert not slot.start.snapshot, "a slot begins with a state that it has no use for"
            return
        assert slot.start.snapshot in self._snapshots, "a slot begins without the state of the tokens before"
        length, state, step = self._snapshots[slot.start.snapshot]
        assert length == start, f"a slot begins at {start} with the state of {length} tokens"
        assert state == slot.states[start - 1], "a slot begins with the state of other tokens"
        assert step <= self._last_collected, "a state was used too early"

    def _begin(self, slot: Slot, chunk: Chunk) -> Chunk:
        """Read what the chunk continues. Returns it as it is computed: where tokens are guessed, a decode starts where
        its slot is."""
        begins = slot.length is None
        if slot.length is None:
            slot.length = chunk.start
            self._resume(slot, chunk.start)
        elif self._guess_percent is not None and chunk.kind in (Kind.DECODE, Kind.VERIFY):
            assert chunk.start >= slot.length, f"the slot has {slot.length} positions, the most are {chunk.start}"
            chunk = chunk._replace(start=slot.length)
        assert chunk.start == slot.length, f"the slot has {slot.length} positions, the chunk starts at {chunk.start}"
        assert chunk.length >= 1
        in_slot = self._adapter_slots[slot.start.adapter] if slot.start.adapter else 0
        assert in_slot == slot.adapter, f"adapter {slot.adapter} is used, its slot has {in_slot}"
        if chunk.new_pages:
            for table, pages in zip(slot.tables, chunk.new_pages, strict=True):
                table += pages
        self._read(slot, chunk.start, begins)
        return chunk

    def _verify(self, slot: Slot, chunk: Chunk) -> tuple[list[int], list[int]]:
        """Write the last token and the guesses, and draw the token after each. Those after right guesses count."""
        assert self._guess_percent is not None, "nothing is to be guessed"
        assert chunk.samples
        assert chunk.length > 1
        chunk = self._begin(slot, chunk)
        assert chunk.start == len(slot.tokens) - 1, "guesses follow the last token"
        new: list[int] = []
        first, is_right = len(slot.tokens), True
        for position in range(chunk.start, chunk.start + chunk.length):
            self._write(slot, chunk.slot, position, chunk.kind)
            token = sample(slot.states[position], slot.start, slot.num_sampled, generated=slot.generated)
            if is_right:
                new.append(token)
            is_right &= hash((position, token, slot.start.seed)) % 100 < self._guess_percent
            slot.append(token if is_right else (token + 1) % VOCABULARY)  # the guess that the next position has
        end = first + len(new)
        del slot.tokens[end - 1 :], slot.states[end - 1 :]
        slot.append(new[-1])
        slot.length = end - 1
        return new, slot.states[slot.length - len(new) : slot.length]

    def _score(self, slot: Slot, chunk: Chunk) -> list[TokenLogprobs]:
        end = min(chunk.start + chunk.length, len(slot.start.prompt) - 1)
        return [logprobs_of(slot.states[p], slot.tokens[p + 1]) for p in range(chunk.start, end)]

    def _write(self, slot: Slot, number: int, position: int, kind: Kind) -> None:
        written = self._as_written(slot.states[position], kind is not Kind.PREFILL)
        for group, table in enumerate(slot.tables):
            page = table[position // self._page_size]
            assert page, f"position {position} of group {group} is written to page 0"
            # A device writes in no order.
            assert self._writers.setdefault(page, number) == number, f"two slots write to page {page} in one step"
            self._pages[page][position % self._page_size] = (group, position, written, self._step)

    def _as_written(self, state: int, by_decode: bool) -> int:
        return ~state if self._replays and by_decode else state

    def _read(self, slot: Slot, end: int, begins: bool) -> None:
        """Verify the positions before `end` that the layers of each group read to go on there.

        A sequence `begins` with pages that were computed by steps that the host knows to have worked.
        """
        for group, (reach, table) in enumerate(zip(self._groups, slot.tables, strict=True)):
            for position in (position for position in range(end) if is_read(reach, position, end)):
                page = table[position // self._page_size]
                assert page, f"position {position} of group {group} is read from page 0"
                stored = self._pages[page][position % self._page_size]
                what = f"position {position} of group {group} is read from page {page}"
                assert stored is not None, f"{what}, where nothing was written"
                assert stored[:2] == (group, position), f"{what}, which holds position {stored[1]} of group {stored[0]}"
                wanted = self._as_written(slot.states[position], position >= len(slot.start.prompt))
                assert stored[2] != ~wanted, f"{what}, which another kind of chunk wrote"
                assert stored[2] == wanted, f"{what}, which holds another prefix"
                assert not begins or stored[3] <= self._last_collected, f"position {position} was shared too early"
