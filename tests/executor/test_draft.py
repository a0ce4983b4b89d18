"""Guesses by a second model: the same answers, and as many right guesses as the models are alike."""

from typing import Any

import pytest

from quire.request import SamplingParams
from tests.executor.rig import Rig
from tests.executor.test_speculation import SAMPLING, check_same, repeating
from tests.executor.workload import GREEDY, workload

SCHEDULES: dict[str, dict[str, Any]] = {
    "two steps ahead": {"lookahead": 2},
    "no prefix cache, small chunks": {"prefix_caching": False, "max_batch_prefill_tokens": 7},
    "few pages": {"num_pages": 14},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_draft_that_is_the_same_model_guesses_right_however_requests_are_scheduled(
    drafted_llama: Rig, name: str
) -> None:
    """Also in prompts whose pages were shared, copied or computed again: its own keys and values are there."""
    requests = workload(drafted_llama, 8, seed=1, longest=90)
    run = check_same(drafted_llama, requests, **SCHEDULES[name])
    counters = run.engine.scheduler.counters
    assert counters.guesses > 40
    assert counters.right_guesses == counters.guesses
    assert (counters.preemptions > 0) == (name == "few pages")


@pytest.mark.parametrize("name", ["hot", "two best", "penalties", "bias"])
def test_sampled_tokens_are_guessed_too(drafted_llama: Rig, name: str) -> None:
    """They are drawn with the same numbers."""
    sampling = SamplingParams(temperature=1.5) if name == "hot" else SAMPLING[name]
    run = check_same(drafted_llama, repeating(drafted_llama, 5, sampling, seed=2), lookahead=2)
    counters = run.engine.scheduler.counters
    assert counters.guesses > 40
    assert counters.right_guesses == counters.guesses


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLING["two best"]], ids=["greedy", "sampled"])
def test_a_draft_of_another_family_changes_no_token(drafted_gemma: Rig, sampling: SamplingParams) -> None:
    assert drafted_gemma.limits().page_groups != (None,)
    run = check_same(drafted_gemma, repeating(drafted_gemma, 5, sampling, seed=3), lookahead=2)
    counters = run.engine.scheduler.counters
    assert counters.guesses > counters.right_guesses
