"""An executor whose every token can be worked out by hand.

Its pages hold tokens where real ones hold keys and values. What it samples is a checksum of everything it reads back
through a slot's page table, so that a scheduling error becomes a wrong token, and what could hide one (a page never
written, a page of other tokens, a hole in the positions) fails at once.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from quire.core.plan import Chunk, SlotStart, StepPlan, StepResult, TokenLogprobs
from quire.request import Request, SamplingParams

VOCABULARY = 50
POISON = 48  # a request whose prompt holds this fails its steps, where a test says so
NAN = 49  # a request whose prompt holds this fails alone, without failing the step

Allowed = Callable[[int], bool]  # whether a token may be sampled
Guide = Callable[[list[int]], Allowed]  # after what was generated


def digest(previous: int, token: int) -> int:
    """Stands for a position's keys and values: it depends on the token and on everything before it."""
    return hash((previous, token))  # of ints, so the same in every process


def sample(state: int, start: SlotStart, index: int, allowed: Allowed = lambda token: True) -> int:
    """The `index`-th token generated after a prefix whose digest is `state`. Greedy requests draw nothing."""
    draw = (start.seed, start.sample, index) if start.sampling.temperature else ()
    token = hash((state, *draw)) % (VOCABULARY - 2)
    while not allowed(token) or (index < start.min_tokens and token in start.end_ids):
        token = (token + 1) % (VOCABULARY - 2)
    return token


def bits(tokens: Iterable[int]) -> bytes:
    """The mask that allows these."""
    return sum(1 << token for token in set(tokens)).to_bytes(4 * -(-VOCABULARY // 32), "little")


def allows(mask: bytes) -> Allowed:
    number = int.from_bytes(mask, "little")
    return lambda token: bool(number >> token & 1)


def logprobs_of(state: int, token: int) -> TokenLogprobs:
    return TokenLogprobs(-float(state % 1000) - token / 100, (token,), (-0.5,))


def expected_tokens(request: Request, sample_index: int = 0, guide: Guide = lambda tokens: lambda _: True) -> list[int]:
    """What `request` generates, worked out without pages, slots or steps. `guide` tells what its grammar allows."""
    start = slot_start(request, sample_index)
    state = 0
    for token in request.prompt:
        state = digest(state, token)
    tokens: list[int] = []
    while len(tokens) < request.max_tokens:
        tokens.append(sample(state, start, len(tokens), guide(tokens)))
        state = digest(state, tokens[-1])
        if len(tokens) >= request.min_tokens and (
            (tokens[-1] in request.end_ids and not request.ignore_end) or tokens[-1] in request.stop_ids
        ):
            break
    return tokens


def expected_prompt_logprobs(request: Request) -> list[TokenLogprobs]:
    state, logprobs = 0, []
    for token, following in zip(request.prompt, request.prompt[1:], strict=False):
        state = digest(state, token)
        logprobs.append(logprobs_of(state, following))
    return logprobs


def slot_start(request: Request, sample_index: int = 0) -> SlotStart:
    return SlotStart(
        0, 0, request.sampling, request.seed, sample_index, request.prompt, (), request.min_tokens,
        request.end_ids + request.stop_ids, request.prompt_logprobs,
    )  # fmt: skip


def drafter(tokens: list[int], room: int) -> tuple[int, ...]:
    """Guesses that are right now and then: what a greedy request would say, or something else."""
    state = 0
    for token in tokens:
        state = digest(state, token)
    right = state % 4
    start = SlotStart(0, 0, SamplingParams(temperature=0), 0, 0, (), (), 0, (), None)
    guesses = []
    for guess in range(min(room, 3)):
        token = sample(state, start, 0) if guess < right else 1
        guesses.append(token)
        state = digest(state, token)
    return tuple(guesses)


@dataclass
class Slot:
    start: SlotStart
    epoch: int | None = None  # of the sequence in it; known from its first chunk
    length: int = 0
    pages: list[int] = field(default_factory=list)
    last_token: int | None = None
    num_sampled: int = 0


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
    ) -> None:
        self._num_pages = num_pages
        self._page_size = page_size
        self._num_slots = num_slots
        self._before_submit = before_submit
        self._before_result = before_result
        self._before_sample = before_sample  # of steps that wait for masks
        self._before_check = before_check
        self.num_resets = 0
        self.plans: list[StepPlan] = []
        self._step = 0  # the one that runs
        self._last_collected = 0
        self._writers: dict[int, int] = {}  # which sequence writes to each page in this step
        self._clear()

    def _clear(self) -> None:
        # What stands at each place of each page: its position, its token, its digest, the step that wrote it.
        self._pages: list[list[tuple[int, int, int, int] | None]] = [
            [None] * self._page_size for _ in range(self._num_pages)
        ]
        self._slots: list[Slot | None] = [None] * self._num_slots
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

    def submit(self, plan: StepPlan) -> Pending:
        assert self._unsampled is None, "a step was submitted before the last one could sample"
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
            return results[0]

        return Pending(outcome, sample)

    def _prompts(self, plan: StepPlan) -> list[tuple[int, ...]]:
        starting = {start.slot: start for start in plan.started}
        running = {number: slot.start for number, slot in enumerate(self._slots) if slot is not None}
        return [(running | starting)[chunk.slot].prompt for chunk in plan.chunks]

    def _run(self, plan: StepPlan, masks: Mapping[int, bytes] = MappingProxyType({})) -> StepResult:
        self._step, self._writers = plan.step, {}
        for start in plan.started:
            self._slots[start.slot] = Slot(start, num_sampled=len(start.generated))
        tokens: list[list[int]] = []
        logprobs: dict[int, list[TokenLogprobs]] = {}
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        failed: dict[int, str] = {}
        slots_used = [chunk.slot for chunk in plan.chunks]
        assert len(set(slots_used)) == len(slots_used), "a slot has two chunks in one step"
        for index, chunk in enumerate(plan.chunks):
            slot = self._slots[chunk.slot]
            assert slot is not None, f"slot {chunk.slot} was never started"
            allowed = allows(masks[index]) if index in masks else lambda token: True
            new, states = self._compute(slot, chunk, allowed)
            if NAN in slot.start.prompt:
                failed[index] = "the logits of this row are not numbers"
                new, states = [], []
            if chunk.samples:
                tokens.append(new)
                if slot.start.sampling.logprobs is not None:
                    logprobs[index] = [logprobs_of(state, token) for state, token in zip(states, new, strict=True)]
            if slot.start.prompt_logprobs is not None:
                prompt_logprobs[index] = self._score(slot, chunk)
        return StepResult(plan.step, tokens, logprobs, prompt_logprobs, failed)

    def _compute(self, slot: Slot, chunk: Chunk, allowed: Allowed) -> tuple[list[int], list[int]]:
        """Write the chunk's positions and sample after the last one. Returns the new tokens and their digests."""
        assert slot.start.sequence_id == chunk.sequence_id, "the slot belongs to another sequence"
        begins = slot.epoch is None
        if begins:
            slot.epoch, slot.length = chunk.epoch, chunk.start
        assert slot.epoch == chunk.epoch, "the chunk is of another epoch than its slot"
        assert chunk.start == slot.length, f"the slot has {slot.length} positions, the chunk starts at {chunk.start}"
        assert 0 not in chunk.new_pages, "page 0 was handed out"
        slot.pages += chunk.new_pages
        if begins:
            self._check_collected(slot)
        if chunk.tokens is None:
            assert slot.last_token is not None, "the slot has not sampled"
            return self._compute_burst(slot, chunk, allowed)
        assert len(chunk.tokens) == chunk.length >= 1
        given = list(chunk.tokens)
        state = self._read(slot, chunk.start)
        new: list[int] = []
        states: list[int] = []
        for offset, token in enumerate(given):
            if offset > chunk.length - 1 - chunk.drafts and token != new[-1]:
                break  # a wrong guess; what would follow it means nothing
            state = digest(state, token)
            self._write(slot, chunk.start + offset, token, state)
            if chunk.samples and offset >= chunk.length - 1 - chunk.drafts:
                new.append(sample(state, slot.start, slot.num_sampled + len(new), allowed))
                states.append(state)
        slot.length = chunk.start + (chunk.length if not chunk.drafts else len(new))
        slot.num_sampled += len(new)
        if new:
            slot.last_token = new[-1]
        return new, states

    def _compute_burst(self, slot: Slot, chunk: Chunk, allowed: Allowed) -> tuple[list[int], list[int]]:
        """The token sampled last, and as many more as the chunk is long, each sampled after the one before."""
        state = self._read(slot, chunk.start)
        new: list[int] = []
        states: list[int] = []
        for position in range(chunk.start, chunk.start + chunk.length):
            token = slot.last_token
            assert token is not None
            state = digest(state, token)
            self._write(slot, position, token, state)
            slot.last_token = sample(state, slot.start, slot.num_sampled, allowed)
            slot.num_sampled += 1
            new.append(slot.last_token)
            states.append(state)
        slot.length = chunk.start + chunk.length
        return new, states

    def _score(self, slot: Slot, chunk: Chunk) -> list[TokenLogprobs]:
        end = min(chunk.start + chunk.length, len(slot.start.prompt) - 1)
        return [logprobs_of(self._read(slot, p + 1), slot.start.prompt[p + 1]) for p in range(chunk.start, end)]

    def _check_collected(self, slot: Slot) -> None:
        """What a sequence starts with must have been computed by steps that the host knows to have worked."""
        for position in range(slot.length):
            stored = self._pages[slot.pages[position // self._page_size]][position % self._page_size]
            assert stored is None or stored[3] <= self._last_collected, f"position {position} was shared too early"

    def _write(self, slot: Slot, position: int, token: int, state: int) -> None:
        page = slot.pages[position // self._page_size]
        writer = self._writers.setdefault(page, slot.start.sequence_id)
        # A device writes in no order.
        assert writer == slot.start.sequence_id, f"two sequences write to page {page} in one step"
        self._pages[page][position % self._page_size] = (position, token, state, self._step)

    def _read(self, slot: Slot, length: int) -> int:
        """The digest of the first `length` positions, read back through the page table and verified."""
        state = 0
        for position in range(length):
            page = slot.pages[position // self._page_size]
            stored = self._pages[page][position % self._page_size]
            assert stored is not None, f"position {position} is read from page {page}, where nothing was written"
            where, token, after, _ = stored
            assert where == position, f"position {position} is read from page {page}, which holds position {where}"
            assert after == digest(state, token), f"position {position} in page {page} belongs to another prefix"
            state = after
        return state
