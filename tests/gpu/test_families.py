"""Families with layers of their own kinds where there is a GPU, against forward passes without pages on a CPU."""

import jax
import pytest

from tests.executor.rig import FEW_SHAPES, Rig, config_of
from tests.executor.test_schedules import check
from tests.executor.workload import workload

pytestmark = pytest.mark.gpu
# Sinks and windows, latents, recurrent states, chunks, experts, caps.
NAMES = (
    "gpt_oss", "deepseek_v2", "deepseek_v3", "qwen3_next", "granitemoehybrid", "llama4", "qwen3_moe", "mixtral",
    "glm4_moe", "gemma2", "gemma3", "exaone4",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_greedy_answers_of_a_family_are_those_of_the_plain_forward(name: str) -> None:
    rig = Rig(config_of(name), FEW_SHAPES)
    try:
        requests = workload(rig, 6)
        assert check(rig, requests, rig.run(requests)) <= 1
    finally:
        rig.executor.close()
        jax.clear_caches()
