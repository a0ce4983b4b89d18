"""Products of few rows with weights in codes of eight bits by `few_row_product`; rows stay as they are."""

from functools import partial
from typing import Any

import jax

from quire.ops.gpu import few_row_product as kernel
from quire.ops.gpu.code_fragments import WIDE
from quire.ops.gpu.eight_bit_fragments import SIZE, EightBitSteps
from quire.ops.gpu.few_row_product import NARROW, RowBlocks

MOST_ROWS = 16
LEAST_BUSY = 86  # multiprocessors


def blocks_of(num_rows: int, outputs: int, inputs: int) -> RowBlocks | None:
    """Those of a product; None: the kernel is not for it."""
    is_narrow = num_rows <= NARROW or num_rows % NARROW == 0
    if num_rows > MOST_ROWS or not is_narrow or outputs % WIDE or inputs % SIZE:
        return None
    rows = max(num_rows, NARROW)
    splits = kernel.splits_of(outputs // WIDE, inputs // SIZE, LEAST_BUSY)
    return kernel.blocks_of(rows, (outputs, inputs), SIZE, splits, 2, lambda width: width * (WIDE + 2 * rows))


@partial(jax.jit, static_argnums=(3, 4))
def eight_bit_rows(x: jax.Array, codes: jax.Array, scales: jax.Array, blocks: RowBlocks, dtype: Any) -> jax.Array:
    """[t, outputs] in `dtype` of x [t, inputs], numbers of two bytes, with codes [outputs, inputs] of e4m3 or int8, and
    the scale of each output."""
    steps = EightBitSteps(blocks.steps, blocks.outputs, x.dtype, codes.dtype)
    like: Any = jax.ShapeDtypeStruct((len(x), len(codes)), dtype)  # type: ignore[no-untyped-call]
    return kernel.few_row_product(x, (codes, scales), steps, blocks, like)
