"""Greedy answers of the executor are those of the plain forward, however requests are scheduled."""

from typing import Any

import numpy as np
import pytest

from quire.core.plan import Kind, StepPlan
from quire.engine.engine import Engine
from quire.request import Request
from tests.executor.conftest import HOST_PAGES
from tests.executor.faulty_executor import FaultyExecutor
from tests.executor.rig import Rig, Run
from tests.executor.workload import GREEDY, workload

SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no look-ahead": {"lookahead": 0},
    "two steps ahead": {"lookahead": 2},
    "no prefix cache": {"prefix_caching": False},
    "chunks of 1": {"max_batch_prefill_tokens": 1},
    "chunks of 1, bursts, two steps ahead": {"max_batch_prefill_tokens": 1, "max_burst": 4, "lookahead": 2},
    "chunks of 7": {"max_batch_prefill_tokens": 7},
    "chunks of 32": {"max_batch_prefill_tokens": 32},
    "one at a time": {"max_batch_size": 1},
    "bursts": {"max_burst": 4},
    "bursts, few pages, two steps ahead": {"max_burst": 3, "num_pages": 49, "lookahead": 2},
    "few pages": {"num_pages": 49},
    "few pages, no cache, two steps ahead": {"num_pages": 46, "prefix_caching": False, "lookahead": 2},
    "few pages, host memory": {"num_pages": 49, "host_pages": HOST_PAGES},
    "few pages, host memory, two steps ahead": {
        "num_pages": 49,
        "host_pages": 40,
        "max_page_saves": 5,
        "max_page_restores": 3,
        "lookahead": 2,
    },
    "few pages, small chunks": {"num_pages": 49, "max_batch_prefill_tokens": 11},
}
NUM_REQUESTS = 24


def check(rig: Rig, requests: list[Request], run: Run) -> int:
    """The number of tokens where the reference had two that were as good."""
    assert not run.failures
    ties = 0
    for request in requests:
        for sample in range(request.samples):
            tokens = run.answers[request.request_id, sample].tokens
            assert len(tokens) == request.max_tokens
            ties += rig.near_ties(request, tokens)
    return ties


@pytest.mark.parametrize("name", SCHEDULES)
def test_answers_do_not_depend_on_scheduling(any_llama: Rig, name: str) -> None:
    requests = workload(any_llama, NUM_REQUESTS)
    run = any_llama.run(requests, **SCHEDULES[name])
    assert check(any_llama, requests, run) <= 1
    counters = run.engine.scheduler.counters
    assert (counters.preemptions > 0) == ("few pages" in name)
    # Without the cache, a sequence that was preempted still finds its own pages where nobody needed them.
    assert (counters.cached_tokens > 0) == (name != "no prefix cache")
    assert (run.engine.scheduler.stats().evicted_pages > 0) == ("few pages" in name)


def test_a_prompt_whose_first_chunk_is_what_another_leaves_of_the_budget_is_not_changed(any_llama: Rig) -> None:
    """One token, beside a prompt that is computed apart because its log-probabilities are wanted."""
    scored = Request(1, tuple(range(1, 16)), 4, GREEDY, prompt_logprobs=1)
    other = Request(2, tuple(range(40, 60)), 8, GREEDY)
    run = any_llama.run([scored, other], max_batch_prefill_tokens=16)
    assert check(any_llama, [scored, other], run) <= 1


def test_answers_are_the_same_after_the_device_ran_out_of_memory(any_llama: Rig) -> None:
    """Its steps get smaller, down to one token of a prompt."""

    def is_too_much(plan: StepPlan) -> bool:
        return sum(chunk.length for chunk in plan.chunks if chunk.kind is Kind.PREFILL) > len(plan.chunks)

    requests = workload(any_llama, 6, seed=3, longest=40)
    faulty = FaultyExecutor(any_llama.executor, is_too_much, message="RESOURCE_EXHAUSTED")
    run = any_llama.run(requests, engine=any_llama.engine(executor=faulty))
    assert run.engine.scheduler.budget.prefill_tokens == 1
    assert check(any_llama, requests, run) <= 1


@pytest.mark.parametrize("settings", [{}, {"num_pages": 27, "max_batch_prefill_tokens": 7, "lookahead": 2}], ids=str)
def test_answers_of_other_families_do_not_depend_on_scheduling(family: Rig, settings: dict[str, Any]) -> None:
    requests = workload(family, 14, seed=1)
    run = family.run(requests, **settings)
    assert check(family, requests, run) <= 1
    assert (run.engine.scheduler.counters.preemptions > 0) == ("num_pages" in settings)


def test_samples_of_one_prompt_share_it_and_agree(llama: Rig) -> None:
    requests = workload(llama, 5, seed=2, samples=3)
    run = llama.run(requests)
    assert check(llama, requests, run) <= 1
    for request in requests:
        assert len({tuple(run.answers[request.request_id, sample].tokens) for sample in range(3)}) == 1


@pytest.mark.parametrize("seed", range(3))
def test_aborts_at_any_moment_leave_the_others_as_they_were(llama: Rig, seed: int) -> None:
    requests = workload(llama, NUM_REQUESTS, seed=seed + 10)
    rng = np.random.default_rng(seed)
    aborted: set[int] = set()

    def abort(engine: Engine, step: int) -> None:
        live = engine.scheduler.request_ids()
        if step % 4 == 3 and live:
            victim = int(rng.choice(live))
            aborted.add(victim)
            engine.abort(victim)

    run = llama.run(requests, between=abort, num_pages=60, lookahead=seed)
    left = [request for request in requests if request.request_id not in aborted]
    assert 5 < len(left) < NUM_REQUESTS - 5
    assert check(llama, left, run) <= 1
    for request_id in aborted:  # what they were told before was right too
        answer = run.answers.get((request_id, 0))
        if answer is not None and answer.tokens:
            llama.near_ties(requests[request_id], answer.tokens)


def test_requests_that_arrive_while_others_run_get_the_same_answers(llama: Rig) -> None:
    requests = workload(llama, NUM_REQUESTS, seed=20)
    later = list(requests[4:])

    def arrive(engine: Engine, step: int) -> None:
        if step % 2 and later:
            engine.add(later.pop(0))

    run = llama.run(requests[:4], between=arrive)
    assert not later
    assert check(llama, requests, run) <= 1


def test_an_answer_may_fill_a_sequence_to_its_last_position(llama: Rig) -> None:
    longest = llama.shapes.max_sequence_tokens
    prompts = [tuple(range(150)), (5,), (5, 6) * (longest // 2)]
    requests = [Request(number, p, longest - len(p), GREEDY) for number, p in enumerate(prompts)]
    run = llama.run(requests)
    assert [len(run.answers[number, 0].tokens) for number in range(3)] == [longest - 150, longest - 1, 0]
    assert sum(llama.near_ties(request, run.answers[request.request_id, 0].tokens) for request in requests) <= 1
