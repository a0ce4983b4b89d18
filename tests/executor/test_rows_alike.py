"""The numbers of a sequence do not depend on its neighbours, nor on how its prompt is cut: bit by bit on a CPU."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quire.ops.native import library
from quire.request import Request, SamplingParams
from tests.executor.rig import Rig
from tests.executor.workload import GREEDY, workload

pytestmark = pytest.mark.skipif(not library.load(), reason="there is no C++ compiler")

Array = np.ndarray[Any, Any]

PROMPT_LENGTH = 61
SCHEDULES: tuple[dict[str, Any], ...] = (
    {"max_batch_size": 1},
    {"max_batch_prefill_tokens": 1, "prefix_caching": False},
    {"max_batch_prefill_tokens": 7, "lookahead": 2},
)


def keys_and_values(rig: Rig, **settings: Any) -> list[Array]:
    """Those of every layer after a prompt that runs alone, by position."""
    prompt = tuple(np.random.default_rng(0).integers(0, rig.model.vocab_size, PROMPT_LENGTH).tolist())
    rig.run([Request(0, prompt, 1, GREEDY, salt=rig.salt(prompt))], **settings)
    state = rig.executor.state
    table = np.asarray(state.slots.page_table)[:, 0]
    pages = next(row for row in table if row.any())[: -(-PROMPT_LENGTH // rig.shapes.page_size)]
    return [
        np.asarray(array)[pages].reshape(-1, *array.shape[2:])[:PROMPT_LENGTH] for pair in state.pages for array in pair
    ]


def assert_pages_alike(rig: Rig) -> None:
    expected = keys_and_values(rig)
    assert all(array.any() for array in expected)
    for chunk in (1, 7, 32):
        for found, right in zip(keys_and_values(rig, max_batch_prefill_tokens=chunk), expected, strict=True):
            np.testing.assert_array_equal(found, right)


def test_pages_do_not_depend_on_the_chunks_of_a_prompt(llama: Rig) -> None:
    assert_pages_alike(llama)


def test_pages_of_other_families_do_not_depend_on_the_chunks_of_a_prompt(family: Rig) -> None:
    assert_pages_alike(family)


def assert_answers_alike(rig: Rig, few_pages: int) -> None:
    drawn = workload(rig, 10, seed=3, sampling=SamplingParams(temperature=1.0))
    filtered = workload(rig, 6, seed=4, sampling=SamplingParams(temperature=1.5, top_p=0.9))
    requests = [*workload(rig, 8, seed=5), *drawn, *filtered]
    requests = [replace(request, request_id=number) for number, request in enumerate(requests)]
    expected = rig.run(requests).tokens()
    for settings in (*SCHEDULES, {"num_pages": few_pages, "max_batch_prefill_tokens": 11}):
        assert rig.run(requests, **settings).tokens() == expected, settings


def test_greedy_and_sampled_answers_do_not_depend_on_scheduling(llama: Rig) -> None:
    assert_answers_alike(llama, few_pages=49)


def test_answers_of_other_families_do_not_depend_on_scheduling(family: Rig) -> None:
    assert_answers_alike(family, few_pages=27)
