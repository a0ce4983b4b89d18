"""Products of few rows with four-bit weights by `few_row_product`."""

from functools import partial
from typing import Any

import jax

from quire.ops.four_bits import PLACES, FourBits
from quire.ops.gpu.code_fragments import WIDE
from quire.ops.gpu.few_row_product import (
    MOST_AHEAD,
    MULTIPROCESSORS,
    NARROW,
    RowBlocks,
    ahead_of,
    few_row_product,
    splits_of,
)
from quire.ops.gpu.four_bit_fragments import MOST_BY_WARP, FourBitSteps

MOST_ROWS = 64
LEAST_BUSY = 86  # multiprocessors, where rows are few; else nearly all
STEPS = (4, 2, 1)  # of a block, the most that fit


def blocks_of(num_rows: int, outputs: int, inputs: int, group: int, run: int) -> RowBlocks | None:
    """Those of a product; None: the kernel is not for it."""
    step, by_warp = PLACES * run, num_rows <= MOST_BY_WARP
    is_narrow = num_rows <= NARROW or num_rows % NARROW == 0
    if num_rows > MOST_ROWS or not is_narrow or outputs % WIDE or not (by_warp or group % step == 0):
        return None
    num_rows = max(num_rows, NARROW)
    is_tall = by_warp and outputs % (2 * WIDE) == 0 and outputs >= 2 * WIDE * MULTIPROCESSORS
    wide = 2 * WIDE if is_tall else WIDE
    splits = splits_of(outputs // wide, inputs // step, LEAST_BUSY if by_warp else MULTIPROCESSORS * 0.9)
    for steps in STEPS:
        width = steps * step
        ahead = ahead_of(num_rows, wide, outputs // wide * splits, splits, _bytes_of(num_rows, wide, width, group))
        if inputs % (width * splits) or (group % width and width % group) or ahead < 2:
            continue
        return RowBlocks(wide, steps, min(ahead, MOST_AHEAD, inputs // width // splits), splits)
    return None


def _bytes_of(num_rows: int, outputs: int, width: int, group: int) -> int:
    """Shared memory of a block."""
    return width * (outputs // 2 + num_rows * 2) + max(1, width // group) * outputs * 4


@partial(jax.jit, static_argnums=(2, 3))
def four_bit_rows(x: jax.Array, weight: FourBits, blocks: RowBlocks, dtype: Any) -> jax.Array:
    """[t, outputs] in `dtype` of x [t, inputs], numbers of two bytes."""
    steps = FourBitSteps(weight.run, weight.group, blocks.steps, blocks.outputs, x.dtype, weight.scale_dtype)
    arrays = weight.codes.reshape(len(weight.codes), -1, weight.run), weight.factors
    like: Any = jax.ShapeDtypeStruct((len(x), weight.factors.shape[1]), dtype)  # type: ignore[no-untyped-call]
    return few_row_product(x, arrays, steps, blocks, like)
