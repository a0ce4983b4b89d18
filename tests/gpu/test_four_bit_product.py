"""Few rows times four-bit weights by the kernel, against the plain product in float32."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.gpu.four_bit_product import FourBitBlocks, blocks_of, four_bit_product
from quire.ops.weights.coded import Coded
from quire.ops.weights.four_bits import FourBits

pytestmark = pytest.mark.gpu
INTERPRET = jax.default_backend() != "gpu"


def coded(outputs: int, inputs: int, group: int, *, has_zeros: bool = False, scales: str = "bfloat16") -> Coded:
    rng = np.random.default_rng(0)
    groups = inputs // group
    return Coded(
        codes=jnp.asarray(rng.integers(0, 256, (outputs, inputs // 2)), jnp.uint8),
        scales=jnp.asarray(rng.uniform(0.01, 0.1, (outputs, groups)), scales),
        zeros=jnp.asarray(rng.integers(0, 17, (outputs, groups)), jnp.int8) if has_zeros else None,
        index=None, input_scale=None, input_zero=None, shape=(outputs, inputs), num_contracted=1,
        is_of_experts=False, bits=4, group=group,
    )  # fmt: skip


def rows_of(count: int, inputs: int, dtype: str = "bfloat16") -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).standard_normal((count, inputs)), dtype)


def turned(weight: Coded) -> FourBits:
    found = FourBits.of(weight)
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "group"),
    [
        (1, 64, 256, 32),
        (8, 96, 512, 128),
        (17, 128, 640, 64),
        (64, 40, 512, 256),
        (3, 72, 1024, 1024),
        (2, 64, 256, 16),
    ],
)
def test_the_product_is_that_of_the_widened_weight(
    rows: int, outputs: int, inputs: int, group: int, has_zeros: bool, dtype: str
) -> None:
    weight = coded(outputs, inputs, group, has_zeros=has_zeros, scales=dtype)
    x = rows_of(rows, inputs, dtype)
    got = np.asarray(jax.jit(partial(four_bit_product, interpret=INTERPRET))(x, turned(weight)))
    right = np.asarray(weight.product(x.astype(jnp.float32)))
    assert np.linalg.norm(got - right) <= 1e-5 * np.linalg.norm(right)


@pytest.mark.parametrize("splits", [1, 2, 3, 8])
def test_programs_share_the_inputs_of_few_outputs(splits: int) -> None:
    weight, x = coded(64, 1280, 128), rows_of(3, 1280)
    blocks = FourBitBlocks(rows=16, columns=32, splits=splits, warps=4, stages=2)
    got = np.asarray(four_bit_product(x, turned(weight), blocks=blocks, interpret=INTERPRET))
    right = np.asarray(weight.product(x.astype(jnp.float32)))
    assert np.linalg.norm(got - right) <= 1e-5 * np.linalg.norm(right)


def test_a_rows_numbers_do_not_depend_on_the_others() -> None:
    weight, x = turned(coded(64, 512, 128)), rows_of(16, 512)
    run: Any = jax.jit(partial(four_bit_product, interpret=INTERPRET))
    np.testing.assert_array_equal(run(x[:5], weight), np.asarray(run(x, weight))[:5])


def test_an_8b_has_programs_for_the_whole_device() -> None:
    for outputs, inputs in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
        for rows in (1, 8, 64):
            blocks = blocks_of(rows, outputs, inputs // 128)
            assert outputs // blocks.columns * blocks.splits >= 384
