"""The whole executor where there is a GPU, against forward passes without pages on a CPU."""

from collections.abc import Iterator

import jax
import pytest

from tests.executor.rig import SHAPES, Rig, config_of
from tests.executor.test_schedules import check
from tests.executor.workload import workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="tests/executor has the same for CPUs"),
]


@pytest.fixture(scope="module")
def llama() -> Iterator[Rig]:
    rig = Rig(config_of("llama"), SHAPES)
    yield rig
    rig.executor.close()


@pytest.mark.parametrize(
    "settings", [{}, {"lookahead": 2}, {"num_pages": 49}, {"max_batch_prefill_tokens": 7}], ids=str
)
def test_greedy_answers_are_those_of_a_cpu(llama: Rig, settings: dict[str, int]) -> None:
    requests = workload(llama, 24)
    assert check(llama, requests, llama.run(requests, **settings)) <= 1
