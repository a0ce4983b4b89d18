"""The whole executor where there is a GPU, against forward passes without pages on a CPU."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import jax
import pytest

from tests.executor.rig import SHAPES, Rig, config_of, quickly_compiled
from tests.executor.test_schedules import check
from tests.executor.workload import workload

# Also runs where there is no GPU, with the programs that one has: `pytest -m gpu tests/gpu/test_engine.py`.
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def llama() -> Iterator[Rig]:
    with nullcontext() if jax.default_backend() == "gpu" else quickly_compiled():
        shapes = replace(SHAPES, burst=4, specialised=True, is_fine=True)
        rig = Rig(config_of("llama"), shapes, programs="all", num_host_pages=60, pins_host_pages=True)
    yield rig
    rig.executor.close()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lookahead": 2},
        {"num_pages": 49},
        {"num_pages": 49, "host_pages": 60, "max_page_restores": 5},
        {"num_pages": 49, "host_pages": 60, "max_page_restores": 20, "restores_ahead": True},
        {"max_batch_prefill_tokens": 7},
        {"max_batch_prefill_tokens": 1},
        {"max_burst": 4},
        {"max_burst": 4, "max_batch_prefill_tokens": 1, "lookahead": 2},
        {"max_burst": 3, "num_pages": 49, "lookahead": 2},
    ],
    ids=str,
)
def test_greedy_answers_are_those_of_a_cpu(llama: Rig, settings: dict[str, int]) -> None:
    requests = workload(llama, 24)
    assert check(llama, requests, llama.run(requests, **settings)) <= 1
