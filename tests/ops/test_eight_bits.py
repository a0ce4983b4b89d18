"""Products with codes of eight bits on a GPU: which rows the kernel has, and what it computes when interpreted."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.eight_bits import MOST_ROWS, code_product, kernel_rows, widened_product
from quire.ops.gpu.eight_bit_product import blocks_of, eight_bit_product
from tests.gpu.test_eight_bit_product import SHAPES, codes_of, off, right_of, rows_of, scales_of


@pytest.mark.parametrize(
    ("capability", "rows"), [("9.0", MOST_ROWS), ("8.9", 0), ("12.0", 0), ("gfx942", 0), (None, 0)]
)
def test_the_kernel_is_for_gpus_that_it_was_made_for(capability: str | None, rows: int) -> None:
    device: Any = SimpleNamespace(compute_capability=capability) if capability else jax.local_devices()[0]
    assert kernel_rows(device) == rows


@pytest.mark.parametrize(("rows", "dtype"), [(3, "bfloat16"), (20, "bfloat16"), (32, "float8_e4m3fn")])
def test_the_kernel_gives_what_the_plain_product_gives(rows: int, dtype: str) -> None:
    x, codes, scales = rows_of(rows, 384, dtype), codes_of(72, 384), scales_of(72)
    got = jax.jit(partial(eight_bit_product, interpret=True))(x, codes, scales)
    if dtype == "bfloat16":
        plain = widened_product(x, codes, scales, jnp.float32, 0)
    else:
        plain = code_product(x, codes, jnp.float32, 0) * scales
    right = right_of(x, codes) * np.asarray(scales)
    assert off(got, right) < 1e-5
    assert off(plain, right) < 1e-5


def test_blocks_have_all_rows_and_whole_steps() -> None:
    for outputs, inputs in SHAPES:
        for rows in range(1, MOST_ROWS + 1):
            blocks = blocks_of(rows, outputs, inputs)
            assert blocks.rows >= rows
            assert inputs % (blocks.inputs * blocks.splits) == 0
