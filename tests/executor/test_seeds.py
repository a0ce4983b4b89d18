"""The tokens that a request draws depend on its seed and on nothing around it."""

from typing import Any

import numpy as np
import pytest

from quire.request import Request, SamplingParams
from tests.executor.faulty_executor import FaultyExecutor
from tests.executor.rig import NEAR, Rig, Run
from tests.executor.sampling import sampling, slot_start, slots_of
from tests.executor.workload import workload

MAX_TOKENS = 20
NUM_REQUESTS = 16
KINDS = (
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.01, typical_p=0.95),
    SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=-0.3, logit_bias={3: 4.0}),
    SamplingParams(temperature=1.4, top_p=0.8, repetition_penalty=1.1),
)
SCHEDULES: dict[str, dict[str, Any]] = {
    "together": {},
    "alone": {"max_batch_size": 1, "prefix_caching": False},
    "preempted": {"num_pages": 49, "max_batch_prefill_tokens": 16},
    "two steps ahead": {"lookahead": 2, "max_batch_size": 5},
}


def requests_of(rig: Rig) -> list[Request]:
    plain = workload(rig, NUM_REQUESTS, seed=30, longest=120, max_tokens=MAX_TOKENS, samples=2)
    return [
        Request(
            r.request_id, r.prompt, MAX_TOKENS, KINDS[r.request_id % len(KINDS)], seed=r.request_id**9 * 77,
            samples=2, min_tokens=6, end_ids=(1, 2, 3, 4), ignore_end=True,
        )
        for r in plain
    ]  # fmt: skip


def near_misses(rig: Rig, request: Request, sample: int, tokens: list[int]) -> int:
    """How many tokens differ from the sampler's choice from the plain forward's logits.

    That may be only where logits that are NEAR those lead to the token.
    """
    num_prompt = len(request.prompt)
    logits = rig.logits([*request.prompt, *tokens], num_prompt)[num_prompt - 1 : -1]
    start = slot_start(
        request.sampling,
        seed=request.seed,
        sample=sample,
        prompt=request.prompt,
        generated=tuple(tokens),
        min_tokens=request.min_tokens,
        end_ids=request.end_ids,
    )
    positions = num_prompt - 1 + np.arange(len(tokens))
    rows = np.zeros(len(tokens), int)
    slots = slots_of([start])
    wrong = np.flatnonzero(sampling(logits, slots, rows, positions).tokens != tokens)
    noise = np.random.default_rng(0).normal(0, NEAR, (len(tokens), logits.shape[1])).astype(np.float32)
    for index in wrong:
        nearby = sampling(logits[index] + noise, slots, rows, np.full(len(tokens), positions[index])).tokens
        assert tokens[index] in nearby, f"token {index} of request {request.request_id} does not follow from its seed"
    return len(wrong)


def check(rig: Rig, requests: list[Request], run: Run) -> None:
    assert not run.failures
    misses = 0
    for request in requests:
        for sample in range(request.samples):
            tokens = run.answers[request.request_id, sample].tokens
            assert len(tokens) == MAX_TOKENS
            misses += near_misses(rig, request, sample, tokens)
    assert misses <= 2


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_seed_gives_the_same_tokens_alone_in_any_batch_and_after_preemption(any_llama: Rig, name: str) -> None:
    requests = requests_of(any_llama)
    run = any_llama.run(requests, **SCHEDULES[name])
    check(any_llama, requests, run)
    assert (run.engine.scheduler.counters.preemptions > 0) == (name == "preempted")
    # The two samples of a request draw apart.
    assert all(run.answers[n, 0].tokens != run.answers[n, 1].tokens for n in range(NUM_REQUESTS))


def test_a_seed_gives_the_same_tokens_after_the_device_state_was_lost(any_llama: Rig) -> None:
    requests = requests_of(any_llama)
    executor = FaultyExecutor(any_llama.executor, fails_at=lambda plan: plan.step in (5, 17, 40))
    run = any_llama.run(requests, executor=executor)
    assert executor.num_resets == 3
    check(any_llama, requests, run)
