"""A scheduler joined to the fake executor by the shortest possible loop, with every invariant checked on the way."""

from collections import deque
from collections.abc import Callable, Sequence

from quire.core.limits import Limits
from quire.core.plan import Failure, Kind, StepPlan, Tier, TokenLogprobs, Update
from quire.core.requests import PrefixKey
from quire.core.scheduler import Scheduler
from quire.core.sequence import State
from quire.request import FinishReason, Request, SamplingParams
from tests.fake_executor import FakeExecutor, Pending
from tests.fake_host_pages import PLACE_BYTES

# By a request with a grammar, its sample and the number of tokens that it has generated: the next ones that the grammar
# leaves no choice about.
MustFollow = Callable[[Request, int, int], Sequence[int]]
GREEDY = SamplingParams(temperature=0)


def limits(**changes: object) -> Limits:
    defaults: dict[str, object] = {
        "page_size": 4,
        "num_pages": 33,
        "max_batch_size": 4,
        "max_step_tokens": 16,
        "max_batch_prefill_tokens": 16,
        "max_sequence_tokens": 64,
    }
    return Limits(**(defaults | changes))  # type: ignore[arg-type]


def request(request_id: int, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 4, **changes: object) -> Request:
    return Request(request_id=request_id, prompt=prompt, max_tokens=max_tokens, **changes)  # type: ignore[arg-type]


class Harness:
    """Plans, submits and completes; remembers what every request was told."""

    def __init__(
        self,
        limits: Limits,
        lookahead: int = 0,
        clock: Callable[[], float] = lambda: 0.0,
        prefix_key: PrefixKey | None = None,
        guess_percent: int = 60,
        switch_length: int | None = None,
        must_follow: MustFollow | None = None,
    ) -> None:
        self.scheduler = Scheduler(limits, clock, prefix_key, switch_length)
        self.executor = FakeExecutor(
            limits.num_pages,
            limits.page_size,
            limits.max_batch_size,
            page_groups=limits.page_groups,
            guess_percent=guess_percent if limits.max_guesses else None,
            num_host_pages=limits.host_pages,
            num_snapshots=limits.snapshots,
            replays=limits.replays,
        )
        self.lookahead = lookahead
        self._must_follow = must_follow
        self._switch_length = switch_length
        self._is_long: dict[int, bool] = {}  # by slot: its tokens are computed as those of a sequence beyond the switch
        self._owners: dict[int, tuple[int, int, int]] = {}  # by slot: request, sample and epoch
        self._ran: dict[tuple[int, int], object] = {}  # the promises of those that ran before the last plan
        self._free_slots: list[int] = []  # before it
        self._head: tuple[int, int, int] | None = None  # the turn of the first that waited before it
        self.in_flight: deque[tuple[StepPlan, Pending]] = deque()
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.logprobs: dict[tuple[int, int], list[TokenLogprobs]] = {}
        self.prompt_logprobs: dict[tuple[int, int], list[TokenLogprobs]] = {}
        self.finished: dict[tuple[int, int], FinishReason] = {}
        self.cached: dict[tuple[int, int], int] = {}
        self.failures: dict[int, Failure] = {}
        self.elsewhere: dict[tuple[bytes, int], bytes] = {}  # pages of other engines, by name and group

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.scheduler.check()

    def load_adapter(self, name: str) -> int:
        number = self.scheduler.adapters.load(name)
        self.executor.add_adapter(number, name)
        return number

    def abort(self, request_id: int) -> None:
        self.scheduler.abort(request_id)
        self.scheduler.check()

    def send(self, request: Request) -> int:
        """The pages of a prompt go elsewhere. Returns their number."""
        exchange, names = self.scheduler.exchange, self._names(request)
        firsts, end = exchange.find(request, 0)
        rows = [(place, group) for group, first in enumerate(firsts) for place in range(first, end)]
        pages = exchange.pages(request, rows, end)
        assert pages is not None, "what was found is there"
        assert 0 not in pages, "a page is found that a group does not have"
        data, size = self.executor.read_pages(pages)(), self.scheduler.limits.page_size * PLACE_BYTES
        for at, (place, group) in enumerate(rows):
            self.elsewhere[names[place], group] = bytes(data[at * size : (at + 1) * size])
        return len(rows)

    def bring(self, request: Request, works: Callable[[], bool] = lambda: True) -> int:
        """Pages of a prompt that are elsewhere come here; those for which `works` says no are given up on the way.
        Returns the number of those that are written."""
        exchange, names = self.scheduler.exchange, self._names(request)
        groups = range(len(self.scheduler.limits.page_groups))
        rows = [(place, group) for group in groups for place in range(len(names))]
        rows = [row for row in rows if (names[row[0]], row[1]) in self.elsewhere]
        written = 0
        for at, page in exchange.reserve(request, rows) or ():
            place, group = rows[at]
            if works():
                data = memoryview(self.elsewhere[names[place], group])
                self.executor.write_host_pages([page.page], [data])
                exchange.confirm([page])
                written += 1
            else:
                exchange.abandon([page])
        self.scheduler.check()
        return written

    def _names(self, request: Request) -> list[bytes]:
        """The digest of an adapter's weights is its number."""
        number = self.scheduler.adapters.find(request.adapter)
        return self.scheduler.exchange.names(request, f"digest {number}" if number else "")

    def plan(self) -> StepPlan | None:
        """Plan one step and hand it to the executor, unless as many are in flight as may be."""
        for failure in self.scheduler.expire():
            self.failures[failure.request_id] = failure
        if len(self.in_flight) > self.lookahead:
            return None
        self._ran = self._promises()
        self._free_slots = list(self.scheduler._running._free_slots)
        head = self.scheduler._queue.head()
        self._head = None if head is None else head.turn
        self._force()
        plan = self.scheduler.plan()
        self.scheduler.check()
        if plan is None:
            assert self.in_flight or not self._may_run(), "requests are left, and nothing is planned for them"
        else:
            self._check_budgets(plan)
            self._check_owners(plan)
            self._check_kinds(plan)
            self._check_switches(plan)
            pending = self.executor.submit(plan)
            if plan.guided:
                pending.sample({})
            self.in_flight.append((plan, pending))
        return plan

    def _may_run(self) -> bool:
        """True if there are requests, of which a search for a fault leaves out none or not all."""
        focus = self.scheduler._queue.focus
        return self.scheduler.num_requests > 0 if focus is None else any(one.state is not State.ENDED for one in focus)

    def _force(self) -> None:
        """As the engine does once the last tokens of a sequence are known, and those that must follow them."""
        for request_id in self.scheduler.request_ids() if self._must_follow is not None else ():
            for one in self.scheduler._requests.sequences(request_id):
                if one.request.grammar is not None and len(one.tokens) >= one.forced_end:
                    tokens = self._must_follow(one.request, one.sample, one.num_generated)
                    self.scheduler.force(request_id, one.sample, tokens)

    def complete(self) -> list[Update]:
        _, pending = self.in_flight.popleft()
        updates, failures = self.scheduler.complete(pending.result())
        self.scheduler.check()
        for update in updates:
            key = update.request_id, update.sample
            assert key not in self.finished, "a sequence went on after its end"
            self.tokens.setdefault(key, []).extend(update.tokens)
            self.logprobs.setdefault(key, []).extend(update.logprobs or [])
            self.prompt_logprobs.setdefault(key, []).extend(update.prompt_logprobs or [])
            if update.finish is not None:
                self.finished[key] = update.finish
                self.cached[key] = update.cached_tokens
        for failure in failures:
            self.failures[failure.request_id] = failure
        return updates

    def lose_everything(self) -> None:
        """A step failed and took the device's state with it."""
        self.in_flight.clear()
        self.executor.reset()
        self.scheduler.restart()
        self.scheduler.check()

    def step(self) -> None:
        while self.plan() is not None:
            pass
        if self.in_flight:
            self.complete()

    def run(self, max_steps: int = 10_000) -> None:
        """Until nothing is left to do; that must happen, and leave nothing behind."""
        for _ in range(max_steps):
            if not self.scheduler.num_requests and not self.in_flight:
                break
            before = self.scheduler.counters.steps, len(self.in_flight), self.scheduler.num_requests
            self.step()
            after = self.scheduler.counters.steps, len(self.in_flight), self.scheduler.num_requests
            assert before != after, "requests are left and nothing happens"
        assert not self.scheduler.num_requests, "the requests do not come to an end"
        self.check_nothing_is_left()

    def check_nothing_is_left(self) -> None:
        scheduler = self.scheduler
        assert scheduler.num_running == scheduler.num_waiting == scheduler.num_in_flight == 0
        assert scheduler._running.is_balanced
        assert scheduler.stats().free_pages + scheduler.stats().cached_pages == scheduler.limits.num_pages - 1

    def _check_budgets(self, plan: StepPlan) -> None:
        limits = self.scheduler.limits
        if plan.burst > 1:
            assert max(chunk.length for chunk in plan.chunks) == plan.burst <= limits.max_burst
            assert all(chunk.kind is Kind.DECODE for chunk in plan.chunks), "a burst is of decodes alone"
            assert not plan.started
        else:
            assert plan.num_tokens <= limits.max_step_tokens
        assert plan.chunks or any(copy.source.tier is Tier.HOST for copy in plan.copies), "a step does nothing"
        self._check_copies(plan)
        prefilled = sum(chunk.length for chunk in plan.chunks if chunk.kind is Kind.PREFILL)
        assert prefilled <= limits.max_batch_prefill_tokens
        guesses = [chunk.length - 1 for chunk in plan.chunks if chunk.kind is Kind.VERIFY]
        assert all(0 < count <= limits.max_guesses for count in guesses)
        assert sum(guesses) <= limits.max_step_guesses
        self._check_shares(plan)
        starts = {start.slot for start in plan.started}
        for chunk in (chunk for chunk in plan.chunks if chunk.slot not in starts):
            most = limits.pages_for(chunk.start + chunk.length) - limits.pages_for(chunk.start)
            assert all(len(pages) <= most for pages in chunk.new_pages), "a chunk has pages that it does not fill"
        assert len(plan.chunks) <= limits.max_batch_size

    def _check_copies(self, plan: StepPlan) -> None:
        limits = self.scheduler.limits
        saves = sum(copy.target.tier is Tier.HOST for copy in plan.copies)
        restores = sum(copy.source.tier is Tier.HOST for copy in plan.copies)
        assert saves <= limits.max_page_saves
        assert restores <= max(limits.max_page_restores, len(limits.page_groups))
        assert all(copy.target.tier is Tier.HOST for copy in plan.copies[:saves]), "pages are saved after others"

    def _check_shares(self, plan: StepPlan) -> None:
        """The first prompt that does not end in this step has all tokens but a share for those behind it.

        Those that ran come first, in their turn, then those that start, as they do: mostly in their turn, but one that
        waited in vain for a snapshot of another is back in line when some have started. If the first that waited has
        its turn before it, the share is for the long one. During a search for a fault the order is that of the search.

        Nothing is said of steps in which one that ran loses its slot, or its promise since no snapshot is free. It, or
        those that waited for it, are back in line while the step is planned, and may then pass a long prompt that none
        passed before.
        """
        if self.scheduler._queue.focus is not None or not self._ran.items() <= self._promises().items():
            return
        lengths = {
            (chunk.request_id, chunk.sample): chunk.length for chunk in plan.chunks if chunk.kind is Kind.PREFILL
        }
        ran = [one for one in self.scheduler._running if (one.id, one.epoch) in self._ran]
        started = [one for one in self.scheduler._running if (one.id, one.epoch) not in self._ran]
        started.sort(key=lambda one: self._free_slots.index(one.slot), reverse=True)  # the last slot is taken first
        running = [*sorted(ran, key=lambda one: one.turn), *started]
        prefilling = self.scheduler._running.prefilling
        # One that is cut for a snapshot has all tokens that it may have.
        is_long = [one.id in prefilling and (not one.saved_end or one.saved_end < one.num_planned) for one in running]
        long = [at for at, is_so in enumerate(is_long) if is_so]
        if long and (running[long[0]].request_id, running[long[0]].sample) in lengths:
            first, others = running[long[0]], running[long[0] + 1 :]
            most = self.scheduler.limits.max_batch_prefill_tokens
            is_passed = self._head is not None and self._head < first.turn
            behind = sum(lengths.get((one.request_id, one.sample), 0) for one in others)
            assert behind <= (most - max(1, most // 4) if is_passed else most // 4)

    def _promises(self) -> dict[tuple[int, int], object]:
        """The page, if any, that others wait for each sequence that runs to compute; by its id and epoch."""
        return {(one.id, one.epoch): one.promised for one in self.scheduler._running}

    def _check_kinds(self, plan: StepPlan) -> None:
        """Where tokens are replayed, a prefill never has one that was generated, and a decode none of a prompt."""
        for chunk in plan.chunks if self.scheduler.limits.replays else ():
            (prompt,) = {len(one.request.prompt) for one in self.scheduler._requests.sequences(chunk.request_id)}
            assert chunk.kind in (Kind.PREFILL, Kind.DECODE)
            assert chunk.start >= prompt if chunk.kind is Kind.DECODE else chunk.start + chunk.length <= prompt

    def _check_switches(self, plan: StepPlan) -> None:
        """No position beyond the switch length is computed as those before are."""
        if self._switch_length is None:
            return
        for start in plan.started:
            assert start.min_length in (0, self._switch_length + 1)
            self._is_long[start.slot] = max(len(start.prompt), start.min_length) > self._switch_length
        for chunk in plan.chunks:
            end = chunk.start + chunk.length
            assert self._is_long[chunk.slot] or end <= self._switch_length, "a position is computed as those before"

    def _check_owners(self, plan: StepPlan) -> None:
        """A slot computes for one sequence from its start to the next."""
        starts = {start.slot: start for start in plan.started}
        assert starts.keys() <= {chunk.slot for chunk in plan.chunks}, "a slot starts without a chunk"
        for chunk in plan.chunks:
            owner = chunk.request_id, chunk.sample, chunk.epoch
            if chunk.slot in starts:
                assert starts[chunk.slot].sample == chunk.sample
                self._owners[chunk.slot] = owner
            assert self._owners[chunk.slot] == owner, "a chunk has the slot of another sequence"
