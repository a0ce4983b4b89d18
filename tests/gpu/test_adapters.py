"""Adapters where there is a GPU, below the weights that they change and beside them: the tokens of merged weights."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import jax
import pytest

from tests.executor.rig import FEW_SHAPES, Rig, config_of, quickly_compiled
from tests.executor.test_adapters import NAMES, SHAPES, crowd, engine
from tests.models.adapter_files import Merged, write_adapter
from tests.models.tiny import NamedTensors

pytestmark = pytest.mark.gpu
CONFIG = config_of("llama", head_dim=16)  # as wide as blocks of the kernels are at least


@pytest.fixture(params=[True, False], ids=["below", "beside"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with nullcontext() if jax.default_backend() == "gpu" else quickly_compiled():
        made = Rig(CONFIG, SHAPES, has_room=request.param)
    yield made
    made.executor.close()


def test_a_mixed_batch_has_the_tokens_of_merged_weights(rig: Rig, tmp_path: Path) -> None:
    folders = {
        name: write_adapter(tmp_path / name, rig.model, seed=rank, rank=rank) for rank, name in enumerate(NAMES, 2)
    }
    requests = crowd()
    run = rig.run(requests, engine=engine(rig, folders))
    assert not run.failures
    for rank, name in enumerate((None, *NAMES), 1):
        other = rig
        if name is not None:
            merged = Merged(NamedTensors(rig.model), rig.model, folders[name], 4 / rank)
            other = Rig(CONFIG, FEW_SHAPES, checkpoint=merged)
        for request in requests:
            if request.adapter == name:
                other.near_ties(request, run.tokens()[request.request_id, 0])
        if other is not rig:
            other.executor.close()
    assert len({tuple(tokens) for tokens in run.tokens().values()}) > 4, "the adapters change nothing"
