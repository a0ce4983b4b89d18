"""The memory of the largest step, estimated and compiled. Half a minute on a GPU:

python -m pytest -m gpu tests/gpu/test_step_memory.py
"""

from pathlib import Path

import jax
import pytest

from quire.engine.building.page_count import estimated_step_bytes, measured_step_bytes
from quire.engine.building.plan import plan_deployment
from quire.settings.config import Config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="there is no GPU, whose compiler lays steps out"),
]


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-0.6b"])
def test_no_step_needs_more_memory_than_was_estimated(name: str, tmp_path: Path) -> None:
    deployment = plan_deployment(Config(f"random:{name}", cache_dir=tmp_path))
    measured, estimated = measured_step_bytes(deployment), estimated_step_bytes(deployment)
    pages_bytes = deployment.limits.num_pages * deployment.page_bytes
    print(f"{name}: {measured / 2**20:.0f} of {estimated / 2**20:.0f} MiB; {pages_bytes / 2**20:.0f} MiB of pages")
    assert measured <= estimated
