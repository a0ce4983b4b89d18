"""Any interleaving of events gives every request the tokens it has when it runs alone, and leaves nothing behind."""

import itertools
import random
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from hypothesis import event, given, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.core.limits import Limits
from quire.errors import Overloaded, PromptTooLong
from quire.reach import ChunkReach, Reach
from quire.request import FinishReason, Grammar, GrammarKind, Request, SamplingParams
from tests.core.harness import GREEDY, Harness, limits
from tests.fake_executor import NAN, expected_prompt_logprobs, expected_tokens

TIMEOUT_S = 20.0
ADAPTERS = ["a", "b", "c"]
FORCING = Grammar(GrammarKind.TOKENS, "{}")  # leaves no choice about runs of tokens

prompts = st.one_of(
    # Few distinct tokens and few distinct lengths: prefixes are shared, end inside pages and at their ends.
    st.lists(st.integers(0, 1), min_size=1, max_size=24),
    st.builds(lambda head, tail: [*range(head), *tail], st.integers(1, 20), st.lists(st.integers(0, 2), max_size=3)),
).map(tuple)


@st.composite
def requests(draw: st.DrawFn, request_id: int) -> Request:
    """Plain ones by and large, with any feature now and then: what is drawn first is what shrinking keeps simple."""
    features: dict[str, object] = {}
    if draw(st.booleans()):
        features = draw(
            st.fixed_dictionaries(
                {},
                optional={
                    "sampling": st.sampled_from([GREEDY, SamplingParams(logprobs=1)]),
                    "samples": st.integers(2, 3),
                    "min_tokens": st.just(2),
                    "end_ids": st.sampled_from([(3,), tuple(range(0, 48, 6))]),
                    "ignore_end": st.just(True),
                    "stop_ids": st.just((7, 8)),
                    "priority": st.sampled_from([1, -1]),
                    "salt": st.just("tenant"),
                    "queue_timeout_s": st.just(TIMEOUT_S),
                    "timeout_s": st.just(3 * TIMEOUT_S),
                    "prompt_logprobs": st.just(1),
                    "grammar": st.just(FORCING),
                },
            )
        )
    prompt = draw(prompts)
    if draw(st.integers(0, 30)) == 30:
        prompt = (*prompt, NAN)
    max_tokens = draw(st.sampled_from([1, 0, 2, 5, 8, 13, 20]))
    return Request(request_id, prompt, max_tokens, seed=draw(st.integers(0, 2)), **features)  # type: ignore[arg-type]


# Padding must be hundreds of tokens before a prompt that is alone is cut.
STEP_SIZES = [(), (3, 400), (2, 5, 9, 80), (6, 400)]
GROUPS: list[tuple[Reach, ...]] = [
    (None,),
    (None,),
    (8,),
    (None, 8),
    (None, 3),
    (None, 8, 8, 24),
    (ChunkReach(8),),
    (None, ChunkReach(5)),
    (None, 8, ChunkReach(12), ChunkReach(2)),
]


class Setup(NamedTuple):
    limits: Limits
    lookahead: int
    switch_length: int | None = None


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    page_size = draw(st.sampled_from([2, 1, 4, 8]))
    slots = draw(st.integers(1, 6))
    groups = draw(st.sampled_from(GROUPS))
    prefix_caching = draw(st.sampled_from([True, True, False]))
    host = {}
    snapshots = draw(st.sampled_from([None, None, None, 0, 1, 3, 12]))
    if prefix_caching and snapshots is None and draw(st.booleans()):
        host = {
            "host_pages": draw(st.sampled_from([100, 3, 12])),
            "max_page_saves": draw(st.sampled_from([16, 0, 2])),
            "max_page_restores": draw(st.sampled_from([16, 1, 3])),
            "restores_ahead": draw(st.booleans()),
        }
    has_guesses = snapshots is None and draw(st.booleans())
    replays = snapshots is None and not has_guesses and draw(st.booleans())
    chosen = limits(
        page_size=page_size,
        num_pages=draw(st.sampled_from([24, 32, 40, 64])) * len(groups) // page_size + 1,
        max_batch_size=slots,
        max_step_tokens=slots + draw(st.integers(0, 12) | st.just(96)),
        max_batch_prefill_tokens=draw(st.integers(1, 12) | st.just(96)),
        short_prompt=draw(st.sampled_from([0, 4, 256])),
        max_sequence_tokens=44,
        max_queued=draw(st.sampled_from([None, None, 4])),
        max_batch_total_tokens=draw(st.sampled_from([None, None, 60])),
        waiting_served_ratio=draw(st.sampled_from([0.0, 0.0, 0.5, 1.2])),
        max_waiting_tokens=draw(st.sampled_from([0, 3])),
        prefix_caching=prefix_caching,
        **host,
        max_burst=draw(st.integers(1, page_size)),
        max_guesses=draw(st.sampled_from([page_size - 1, min(1, page_size - 1)])) if has_guesses else 0,
        looks_up=has_guesses and draw(st.booleans()),
        replays=replays,
        forces_tokens=not replays,
        snapshots=snapshots,
        snapshot_tokens=draw(st.sampled_from([0, 5, 12])) if snapshots else 0,
        page_groups=groups,
        max_loras=draw(st.sampled_from([0, 1, 2])),
    )
    return Setup(chosen, draw(st.integers(0, 2)), draw(st.sampled_from([None, None, 9, 20])))


class Schedules(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.asked: dict[int, Request] = {}
        self.adapters: dict[int, int] = {}  # by request: the number of its adapter
        self.aborted: set[int] = set()
        self.happened: Counter[str] = Counter()

    @initialize(
        setup=setups(),
        sizes=st.sampled_from(STEP_SIZES),
        beside=st.sampled_from([None, None, 1, 3, 5]),
        percent=st.sampled_from([60, 0, 95]),
    )
    def start(self, setup, sizes=(), beside=None, percent=60):
        chosen, lookahead, switch = setup
        self.harness = Harness(
            chosen,
            lookahead,
            lambda: self.now,
            prefix_key=None if switch is None else lambda length: int(length > switch),
            guess_percent=percent,
            switch_length=switch,
            must_follow=self._must_follow,
        )
        for name in ADAPTERS if chosen.max_loras else ():
            self.harness.load_adapter(name)
        self.harness.scheduler.budget.step_sizes = sizes
        self.harness.scheduler.budget.max_prefill_beside_decodes = beside

    def _must_follow(self, asked: Request, sample: int, num_generated: int) -> list[int]:
        """Up to four tokens."""
        adapter, end = self.adapters[asked.request_id], num_generated + hash((asked.request_id, num_generated)) % 5
        return expected_tokens(asked, sample, adapter=adapter)[num_generated:end]

    @rule(data=st.data(), count=st.integers(1, 4))
    def add(self, data, count):
        for _ in range(count):
            asked = data.draw(requests(len(self.asked) + 1))
            if self.harness.scheduler.limits.max_loras:
                asked = replace(asked, adapter=data.draw(st.sampled_from([None, *ADAPTERS])))
            self._add(asked)

    @precondition(lambda self: self.harness.scheduler.limits.max_loras)
    @rule(name=st.sampled_from(ADAPTERS))
    def reload(self, name):
        """Those that have the old one keep it."""
        self.harness.load_adapter(name)

    def _add(self, asked: Request) -> None:
        try:
            self.adapters[asked.request_id] = self.harness.scheduler.adapters.find(asked.adapter)
            self.harness.add(asked)
        except Overloaded:
            self.happened["refused: overloaded"] += 1
        except PromptTooLong:
            self.happened["refused: too long"] += 1
        else:
            self.asked[asked.request_id] = asked

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data):
        live = self.harness.scheduler.request_ids()  # and now and then one that has ended
        request_id = data.draw(st.sampled_from(live if live and data.draw(st.integers(0, 4)) else sorted(self.asked)))
        self.harness.abort(request_id)
        self.aborted.add(request_id)

    @rule()
    def plan(self):
        self.harness.plan()

    @rule(count=st.integers(1, 12))
    def steps(self, count):
        for _ in range(count):
            self.harness.step()

    @precondition(lambda self: self.harness.in_flight)
    @rule()
    def complete(self):
        self.harness.complete()

    @rule(seconds=st.sampled_from([1.0, TIMEOUT_S]))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def lose_everything(self):
        self.harness.lose_everything()
        self.happened["device lost"] += 1

    @precondition(lambda self: self.asked and self.harness.scheduler.limits.prefix_caching)
    @rule(data=st.data())
    def send(self, data):
        """The pages of a prompt go to another engine, or into a file, at any moment."""
        asked = self.asked[data.draw(st.sampled_from(sorted(self.asked)))]
        self.happened["sent"] += self.harness.send(asked)

    @precondition(lambda self: self.asked and self.harness.scheduler.limits.host_pages)
    @rule(data=st.data(), works=st.lists(st.booleans(), min_size=1, max_size=4))
    def bring(self, data, works):
        """And come back, as pages of other engines and files do; some are lost on the way."""
        asked, chance = self.asked[data.draw(st.sampled_from(sorted(self.asked)))], itertools.cycle(works)
        assert self.harness.scheduler.exchange.num_cached(asked) <= (len(asked.prompt) - 1) // self._page_size
        self.happened["brought"] += self.harness.bring(asked, lambda: next(chance))

    @property
    def _page_size(self) -> int:
        return self.harness.scheduler.limits.page_size

    @rule(data=st.data())
    def focus(self, data):
        live = self.harness.scheduler.request_ids()
        chosen = data.draw(st.none() if not live else st.one_of(st.none(), st.sets(st.sampled_from(live), min_size=1)))
        self.harness.scheduler.focus(chosen)
        self.harness.scheduler.check()

    @invariant()
    def what_was_said_is_right_so_far(self):
        for (request_id, sample), tokens in self.harness.tokens.items() if hasattr(self, "harness") else ():
            adapter = self.adapters[request_id]
            assert tokens == expected_tokens(self.asked[request_id], sample, adapter=adapter)[: len(tokens)]

    def teardown(self):
        if not hasattr(self, "harness"):
            return
        harness = self.harness
        harness.scheduler.focus(None)
        harness.run()
        for request_id, asked in self.asked.items():
            if request_id in self.aborted:
                continue
            if request_id in harness.failures:
                deadline = asked.queue_timeout_s or asked.timeout_s
                assert NAN in asked.prompt or deadline is not None, "a request failed without a reason"
                continue
            for sample in range(asked.samples):
                self._check_answer(asked, sample)
        counters = harness.scheduler.counters
        self.happened["preempted"] += counters.preemptions
        self.happened["evicted"] += harness.scheduler.stats().evicted_pages
        self.happened["reused"] += counters.cached_tokens
        self.happened["dropped"] += counters.dropped_chunks
        if harness.scheduler._running.host is not None:
            self.happened["saved"] += harness.scheduler._running.host.num_saved
            self.happened["restored"] += harness.scheduler._running.host.num_restored
        self.happened["guessed right"] += counters.right_guesses
        self.happened["guessed wrong"] += counters.guesses - counters.right_guesses
        for name, count in self.happened.items():
            if count:
                event(name)
        note(f"{self.happened}")

    def _check_answer(self, asked: Request, sample: int) -> None:
        key = asked.request_id, sample
        tokens = self.harness.tokens[key]
        adapter = self.adapters[asked.request_id]
        assert tokens == expected_tokens(asked, sample, adapter=adapter)
        finish = self.harness.finished[key]
        if asked.max_tokens == 0 or tokens[-1] not in asked.end_ids + asked.stop_ids:
            assert finish is FinishReason.LENGTH
        if asked.sampling.logprobs is not None:
            assert [one.top_ids[0] for one in self.harness.logprobs[key]] == tokens
        if asked.prompt_logprobs is not None:
            assert self.harness.prompt_logprobs[key] == expected_prompt_logprobs(asked, adapter)


Schedules.TestCase.settings = settings(settings.default, stateful_step_count=30)
TestSchedules = Schedules.TestCase


@given(setup=setups(), seed=st.integers(0, 2**32))
def test_a_crowded_engine_answers_every_request_as_if_it_ran_by_itself(setup, seed):
    """More requests than pages and slots for all of them, so that eviction and preemption are the rule."""
    machine, chance = Schedules(), random.Random(seed)
    machine.start(setup)
    for _ in range(chance.randrange(10, 120)):
        action = chance.random()
        if action < 0.25:
            machine._add(crowd_request(chance, len(machine.asked) + 1))
        elif action < 0.30 and machine.asked:
            live = machine.harness.scheduler.request_ids()
            request_id = chance.choice(live if live and chance.random() < 0.8 else list(machine.asked))
            machine.harness.abort(request_id)
            machine.aborted.add(request_id)
        elif action < 0.31:
            machine.harness.lose_everything()
        elif action < 0.33 and machine.asked and setup.limits.prefix_caching:
            asked = machine.asked[chance.choice(list(machine.asked))]
            machine.happened["sent"] += machine.harness.send(asked)
            if setup.limits.host_pages:
                machine.happened["brought"] += machine.harness.bring(asked, lambda: chance.random() < 0.8)
        elif action < 0.35:
            machine.now += chance.choice([0.5, TIMEOUT_S])
        elif action < 0.6:
            machine.harness.plan()
        elif action < 0.75 and machine.harness.in_flight:
            machine.harness.complete()
        else:
            machine.harness.step()
    machine.what_was_said_is_right_so_far()
    machine.teardown()


def crowd_request(chance: random.Random, request_id: int) -> Request:
    length = chance.choice([1, 4, 7, 8, 12, 20])
    return Request(
        request_id=request_id,
        prompt=tuple(chance.randrange(2) for _ in range(length)) if chance.random() < 0.5 else tuple(range(length)),
        max_tokens=chance.choice([0, 1, 4, 12, 20]),
        seed=chance.randrange(3),
        samples=chance.choice([1, 1, 1, 2, 3]),
        sampling=chance.choice([GREEDY, SamplingParams()]),
        min_tokens=chance.choice([0, 0, 2]),
        end_ids=chance.choice([(), (3, 9, 27)]),
        priority=chance.choice([0, 0, 1]),
        salt=chance.choice(["", "", "tenant"]),
        timeout_s=chance.choice([None, None, 3 * TIMEOUT_S]),
        prompt_logprobs=chance.choice([None, None, None, 0]),
        grammar=chance.choice([None, None, None, FORCING]),
    )
