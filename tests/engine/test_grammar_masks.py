"""Guided sequences through the engine: every token is one that the mask of exactly its position allows."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.plan import Kind
from quire.core.scheduler import Scheduler
from quire.engine.engine import Engine
from quire.engine.grammar_masks import Guided
from quire.errors import InvalidRequest, RequestFailed
from quire.request import FinishReason, Request, SamplingParams
from tests.core.harness import GREEDY, limits, request
from tests.engine.test_engine import DeviceError
from tests.engine.toy_grammars import END, FORCING, LOST, STUCK, ToyGrammars, guide, toy
from tests.fake_executor import FakeExecutor, expected_tokens


class Rig:
    """An engine, and what its requests were told."""

    def __init__(self, lookahead: int = 1, fails_in: frozenset[int] = frozenset(), **changes):
        chosen = limits(**({"num_pages": 60} | changes))

        def fault(plan, prompts):
            if plan.step in fails_in:
                raise DeviceError(f"step {plan.step}")

        self.executor = FakeExecutor(
            chosen.num_pages, chosen.page_size, chosen.max_batch_size, None, fault, page_groups=chosen.page_groups
        )
        self.grammars = ToyGrammars()
        scheduler = Scheduler(chosen, lambda: 0.0)
        self.engine = Engine(scheduler, self.executor, lookahead, grammars=self.grammars)
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.finished: dict[tuple[int, int], FinishReason] = {}
        self.failed: dict[int, Exception] = {}

    def step(self) -> None:
        updates, failures, _ = self.engine.step()
        self.engine.scheduler.check()
        self.check_budgets()
        for update in updates:
            self.tokens.setdefault((update.request_id, update.sample), []).extend(update.tokens)
            if update.finish is not None:
                self.finished[update.request_id, update.sample] = update.finish
        self.failed |= {failure.request_id: failure.error for failure in failures}

    def check_budgets(self) -> None:
        limits = self.engine.scheduler.limits
        for plan in self.executor.plans[-3:]:
            extra = {Kind.PREFILL: 0, Kind.DECODE: 1, Kind.FORCED: 1}  # tokens that count as a decode's
            assert plan.num_tokens <= limits.max_step_tokens
            beside = sum(chunk.length - extra[chunk.kind] for chunk in plan.chunks)
            assert beside <= limits.max_batch_prefill_tokens

    def run(self) -> None:
        for _ in range(2000):
            if self.engine.is_idle:
                break
            self.step()
        assert self.engine.is_idle
        assert not self.grammars.num_live, "a matcher outlives its request"


def expected(asked: Request, sample: int = 0) -> list[int]:
    if asked.grammar is None:
        return expected_tokens(asked, sample)
    return expected_tokens(asked, sample, partial(guide, asked.grammar))


def guided(request_id: int, number: int = 4, **changes: object) -> Request:
    return request(request_id, **({"grammar": toy(number), "end_ids": (END,), "max_tokens": 12} | changes))


@st.composite
def asks(draw: st.DrawFn, request_id: int) -> Request:
    prompt = tuple(draw(st.lists(st.integers(0, 2), min_size=1, max_size=14)))
    features = {
        "max_tokens": draw(st.integers(1, 14)),
        "samples": draw(st.sampled_from([1, 1, 2])),
        "seed": draw(st.integers(0, 3)),
        "sampling": draw(st.sampled_from([GREEDY, request(0).sampling])),
        "end_ids": (END,),
    }
    if draw(st.booleans()):
        features["grammar"] = toy(draw(st.sampled_from([2, 4, 9, 30, FORCING, FORCING + 3])))
        features["stop_ids"] = draw(st.sampled_from([(), (), tuple(range(1, 9))]))
    return request(request_id, prompt, **features)


@given(
    st.data(),
    st.integers(0, 2),
    st.sampled_from([16, 20, 60]),
    st.frozensets(st.integers(2, 40), max_size=2),
)
def test_answers_follow_their_grammars_and_the_others_do_not_change(data, lookahead, num_pages, fails_in):
    """With few pages sequences are preempted; steps that fail take the device's state with them. Forced tokens share
    a budget with prompts."""
    prefill_tokens = data.draw(st.sampled_from([2, 5, 16]))
    budget = {"max_batch_prefill_tokens": prefill_tokens, "max_step_tokens": 4 + data.draw(st.integers(1, 16))}
    windows = data.draw(st.sampled_from([(None,), (None, 6)]))
    rig = Rig(
        lookahead, fails_in, num_pages=num_pages * len(windows), max_sequence_tokens=40, page_groups=windows, **budget
    )
    asked: dict[int, Request] = {}
    aborted: set[int] = set()
    for number in range(data.draw(st.integers(1, 7))):
        asked[number] = data.draw(asks(number))
        rig.engine.add(asked[number])
        for _ in range(data.draw(st.integers(0, 4))):
            rig.step()
        if data.draw(st.integers(0, 8)) == 8:
            gone = data.draw(st.sampled_from(sorted(asked)))
            rig.engine.abort(gone)
            aborted.add(gone)
    rig.run()
    assert not rig.failed
    for number, one in asked.items():
        for sample in range(one.samples):
            told, whole = rig.tokens.get((number, sample), []), expected(one, sample)
            assert told == (whole[: len(told)] if number in aborted else whole)


@given(st.integers(0, 2), st.integers(0, 3), st.sampled_from([4, FORCING]), st.data())
def test_an_answer_goes_on_where_another_engine_left_it(lookahead, seed, number, data):
    asked = guided(1, number, samples=2, seed=seed)
    whole = [expected(asked, sample) for sample in range(2)]
    cut = [data.draw(st.integers(0, len(tokens) - 1)) for tokens in whole]
    rig = Rig(lookahead)
    rig.engine.add(asked, so_far=[tokens[:at] for tokens, at in zip(whole, cut, strict=True)])
    rig.run()
    assert [rig.tokens[1, sample] for sample in range(2)] == [t[at:] for t, at in zip(whole, cut, strict=True)]


def forced_lengths(rig: Rig) -> list[int]:
    return [chunk.length for plan in rig.executor.plans for chunk in plan.chunks if chunk.kind is Kind.FORCED]


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_tokens_that_a_grammar_forces_come_several_to_a_step(lookahead):
    """As many as fit in a page; the first is sampled while the others become known, unless nothing is ahead."""
    rig = Rig(lookahead, max_sequence_tokens=64)
    asked = [guided(number, FORCING, max_tokens=40, seed=number) for number in range(3)]
    for one in asked:
        rig.engine.add(one)
    rig.run()
    assert [rig.tokens[one.request_id, 0] for one in asked] == [expected(one) for one in asked]
    lengths = forced_lengths(rig)
    assert min(lengths) > 1
    assert max(lengths) == rig.engine.scheduler.limits.page_size
    num_tokens = sum(len(rig.tokens[one.request_id, 0]) for one in asked)
    num_chunks = sum(len(plan.chunks) for plan in rig.executor.plans)
    assert num_chunks < 0.7 * num_tokens
    assert all(index in plan.guided for plan in rig.executor.plans for index in range(len(plan.chunks)))


@pytest.mark.parametrize("prefill_tokens", [1, 2, 3])
def test_forced_tokens_keep_to_the_budget_of_prompts(prefill_tokens):
    rig = Rig(max_sequence_tokens=64, max_batch_prefill_tokens=prefill_tokens)
    asked = [guided(number, FORCING, max_tokens=40, seed=number) for number in range(3)]
    for one in asked:
        rig.engine.add(one)
    rig.run()
    assert [rig.tokens[one.request_id, 0] for one in asked] == [expected(one) for one in asked]
    assert max(forced_lengths(rig)) == 1 + prefill_tokens


def test_every_token_is_sampled_where_log_probabilities_are_wanted_or_forcing_is_off():
    sampling = SamplingParams(logprobs=1)
    rig = Rig(max_sequence_tokens=64)
    rig.engine.add(guided(1, FORCING, max_tokens=20, sampling=sampling))
    rig.run()
    assert not forced_lengths(rig)
    assert rig.tokens[1, 0] == expected(guided(1, FORCING, max_tokens=20, sampling=sampling))
    off = Rig(max_sequence_tokens=64, forces_tokens=False)
    off.engine.add(guided(1, FORCING, max_tokens=20))
    off.run()
    assert not forced_lengths(off)
    assert off.tokens[1, 0] == expected(guided(1, FORCING, max_tokens=20))


def test_a_stop_token_within_forced_tokens_is_the_last():
    whole = [token for token in expected(guided(1, FORCING, max_tokens=30)) if token != END]
    for at in range(1, len(whole)):
        asked = guided(1, FORCING, max_tokens=30, stop_ids=(whole[at],))
        rig = Rig(max_sequence_tokens=64)
        rig.engine.add(asked)
        rig.run()
        assert rig.tokens[1, 0] == expected(asked)
        assert rig.finished[1, 0] is FinishReason.STOP_TOKEN


@pytest.mark.parametrize("max_tokens", range(1, 30))
def test_forced_tokens_are_cut_at_the_length(max_tokens):
    asked = guided(1, FORCING, max_tokens=max_tokens)
    rig = Rig(max_sequence_tokens=64)
    rig.engine.add(asked)
    rig.run()
    assert rig.tokens[1, 0] == expected(asked)


def test_another_token_than_the_only_one_fails_its_request():
    """It cannot be sampled; should it be, the answer goes no further."""
    guiding = Guided(ToyGrammars().matcher(toy(FORCING)), 3, ())
    forced = guiding.forced()
    assert forced
    guiding.append([(forced[0] + 1) % 50])
    with pytest.raises(ValueError, match="the only one"):
        guiding.mask(5, 0.0)


def test_an_end_comes_only_where_the_grammar_allows_it():
    rig = Rig()
    for number in range(20):
        rig.engine.add(guided(number, seed=number))
    rig.run()
    ends = [rig.tokens[key] for key, reason in rig.finished.items() if reason is FinishReason.END]
    assert ends
    assert all(len(tokens) % 3 == 0 for tokens in ends)


def test_guided_sequences_get_a_token_in_every_step_while_the_next_is_under_way():
    """Nothing waits for a mask but the sampling itself: step n + 1 is submitted before step n is collected."""
    rig = Rig(lookahead=1)
    rig.engine.add(guided(1, 2, max_tokens=11, end_ids=(48,)))
    rig.engine.add(request(2, max_tokens=11))
    deepest = 0
    while not rig.engine.is_idle:
        while rig.engine.launch():
            deepest = max(deepest, rig.engine.num_in_flight)
        rig.engine.collect()
    assert deepest == 2
    assert len(rig.executor.plans) == 11
    assert all(len(plan.chunks) == 2 and len(plan.guided) == 1 for plan in rig.executor.plans)


@pytest.mark.parametrize(("number", "why"), [(STUCK, "too complex"), (LOST, "the grammar is lost")])
def test_a_grammar_that_cannot_be_followed_fails_its_request_alone(number, why):
    rig = Rig()
    others = [guided(2), request(3, max_tokens=9)]
    rig.engine.add(guided(1, number, samples=2))
    for one in others:
        rig.engine.add(one)
    rig.run()
    assert list(rig.failed) == [1]
    assert isinstance(rig.failed[1], RequestFailed)
    assert why in str(rig.failed[1])
    assert {request_id for request_id, _ in rig.finished} == {2, 3}, "it has an end after it failed"
    assert all(rig.tokens[one.request_id, 0] == expected(one) for one in others)


def test_a_grammar_that_is_wrong_is_refused_and_leaves_nothing():
    rig = Rig()
    with pytest.raises(InvalidRequest, match="must be a number"):
        rig.engine.add(guided(1, grammar=toy(1).__class__(toy(1).kind, "no number")))
    assert rig.engine.is_idle
    with pytest.raises(InvalidRequest, match="has no tokenizer"):
        Engine(Scheduler(limits(), lambda: 0.0), FakeExecutor(33, 4, 4)).add(guided(1))


def test_matchers_go_with_requests_that_are_refused_aborted_or_too_late():
    rig = Rig(max_queued=1)
    rig.engine.add(guided(1))
    with pytest.raises(Exception, match="wait"):
        rig.engine.add(guided(2))
    assert rig.grammars.num_live == 1
    rig.engine.abort(1)
    assert not rig.grammars.num_live


@pytest.mark.parametrize("changes", [{"ignore_end": True}, {"min_tokens": 1}, {"end_ids": ()}])
def test_what_contradicts_a_grammar_is_refused(changes):
    with pytest.raises(InvalidRequest, match="with a grammar"):
        guided(1, **changes)
