"""A mesh of one GPU runs the kernels that a GPU without a mesh runs, and gives the same tokens."""

import jax
import pytest

from quire.executor.programs.ladder import StepShape
from quire.models.random_weights import random_weights
from quire.models.registry import build_model
from quire.ops.sharding import sharding, tensor_mesh
from tests.executor.rig import executor_of
from tests.executor.tensor_parallel import CONFIG, SHAPES, generate

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_executor_on_a_mesh_of_one_gives_the_tokens_of_one_without(dtype: str) -> None:
    mesh = tensor_mesh(jax.devices()[:1])
    model = build_model({**CONFIG, "head_dim": 32})  # the least that a GPU multiplies as a matrix
    alone = executor_of(model, random_weights(model, seed=1, dtype=dtype), SHAPES)
    weights = random_weights(
        model, seed=1, dtype=dtype, placement=lambda param: sharding(param.shape, param.axes, mesh)
    )
    meshed = executor_of(model, weights, SHAPES, mesh=mesh)
    assert generate(meshed) == generate(alone)
    if jax.default_backend() == "gpu":
        texts = [executor.programs.get(StepShape(4)).as_text() for executor in (meshed, alone)]
        assert all("place_heads" in text for text in texts), "plain jnp runs in place of the kernels"
