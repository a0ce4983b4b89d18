"""Models over 2, 4 and 8 devices give the logits of one."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from quire.models.checkpoint import leaves
from quire.models.registry import build_model
from quire.ops.sharding import MESH_AXES, TENSOR, key_copies, sharding
from tests.models.cases import CASES
from tests.shared_programs import printed_by


def test_sharded_models_give_the_logits_of_one_device() -> None:
    families = ("llama-biases", "olmo2", "mixtral", "glm4", "gpt_oss", "deepseek_v3", "llama4")
    printed = printed_by("tests.models.sharded", *families, num_devices=8)
    assert printed.count("devices, error") == 15
    assert printed.count("int8 on two devices as on one") == 7
    assert printed.count("fp8 on two devices as on one") == 4


@pytest.mark.parametrize("name", CASES)
def test_every_axis_of_every_weight_is_in_the_table(name: str) -> None:
    for param in leaves(build_model(CASES[name]).params()):
        assert {axis for axis in param.axes if axis is not None} <= set(MESH_AXES), param


def test_a_dimension_that_devices_do_not_divide_stays_whole() -> None:
    mesh = Mesh(np.asarray(jax.devices()[:1]), (TENSOR,))
    assert sharding((3, 8), ("vocab", "embed"), mesh).spec == PartitionSpec(TENSOR, None)
    abstract = jax.sharding.AbstractMesh((2,), (TENSOR,))
    assert sharding((3, 8), ("vocab", "embed"), abstract).spec == PartitionSpec(None, None)
    assert sharding((4, 8), ("vocab", "embed"), abstract).spec == PartitionSpec(TENSOR, None)


@pytest.mark.parametrize(
    ("kv_heads", "group", "num_devices", "copies"),
    [(8, 4, 8, 1), (8, 4, 4, 1), (2, 4, 8, 4), (1, 8, 4, 4), (3, 4, 8, 1), (2, 3, 4, 1), (2, 3, 6, 3)],
)
def test_keys_are_copied_where_that_gives_every_device_as_many(
    kv_heads: int, group: int, num_devices: int, copies: int
) -> None:
    assert key_copies(kv_heads, group, num_devices) == copies
