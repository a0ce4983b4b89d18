"""Products of few rows with four-bit weights by `few_row_product`."""

from functools import partial
from typing import Any

import jax

from quire.ops.four_bits import PLACES, FourBits
from quire.ops.gpu import few_row_product as kernel
from quire.ops.gpu.code_fragments import WIDE
from quire.ops.gpu.few_row_product import MULTIPROCESSORS, NARROW, RowBlocks
from quire.ops.gpu.four_bit_fragments import MOST_BY_WARP, FourBitSteps

MOST_ROWS = 64
LEAST_BUSY = 86  # multiprocessors, where rows are few; else nearly all


def blocks_of(num_rows: int, outputs: int, inputs: int, group: int, run: int) -> RowBlocks | None:
    """Those of a product; None: the kernel is not for it."""
    step, by_warp = PLACES * run, num_rows <= MOST_BY_WARP
    is_narrow = num_rows <= NARROW or num_rows % NARROW == 0
    if num_rows > MOST_ROWS or not is_narrow or outputs % WIDE or not (by_warp or group % step == 0):
        return None
    rows = max(num_rows, NARROW)

    def block_bytes(width: int) -> int:
        if group % width and width % group:
            return 0
        return width * (WIDE // 2 + rows * 2) + max(1, width // group) * WIDE * 4

    splits = kernel.splits_of(outputs // WIDE, inputs // step, LEAST_BUSY if by_warp else MULTIPROCESSORS * 0.9)
    return kernel.blocks_of(rows, (outputs, inputs), step, splits, 2 if by_warp else 1, block_bytes)


@partial(jax.jit, static_argnums=(2, 3))
def four_bit_rows(x: jax.Array, weight: FourBits, blocks: RowBlocks, dtype: Any) -> jax.Array:
    """[t, outputs] in `dtype` of x [t, inputs], numbers of two bytes."""
    steps = FourBitSteps(weight.run, weight.group, blocks.steps, blocks.outputs, x.dtype, weight.scale_dtype)
    arrays = weight.codes.reshape(len(weight.codes), -1, weight.run), weight.factors
    like: Any = jax.ShapeDtypeStruct((len(x), weight.factors.shape[1]), dtype)  # type: ignore[no-untyped-call]
    return kernel.few_row_product(x, arrays, steps, blocks, like)
