"""Products of few rows with weights in codes of eight bits by `few_row_product`; rows stay as they are."""

from functools import partial
from typing import Any

import jax

from quire.ops.gpu.code_fragments import WIDE
from quire.ops.gpu.eight_bit_fragments import SIZE, EightBitSteps
from quire.ops.gpu.few_row_product import (
    MOST_AHEAD,
    MULTIPROCESSORS,
    NARROW,
    RowBlocks,
    ahead_of,
    few_row_product,
    splits_of,
)

MOST_ROWS = 16
LEAST_BUSY = 86  # multiprocessors
STEPS = (4, 2, 1)  # of a block, the most that fit


def blocks_of(num_rows: int, outputs: int, inputs: int) -> RowBlocks | None:
    """Those of a product; None: the kernel is not for it."""
    is_narrow = num_rows <= NARROW or num_rows % NARROW == 0
    if num_rows > MOST_ROWS or not is_narrow or outputs % WIDE or inputs % SIZE:
        return None
    num_rows = max(num_rows, NARROW)
    is_tall = outputs % (2 * WIDE) == 0 and outputs >= 2 * WIDE * MULTIPROCESSORS
    wide = 2 * WIDE if is_tall else WIDE
    splits = splits_of(outputs // wide, inputs // SIZE, LEAST_BUSY)
    for steps in STEPS:
        width = steps * SIZE
        ahead = ahead_of(num_rows, wide, outputs // wide * splits, splits, width * (wide + 2 * num_rows))
        if inputs % (width * splits) == 0 and ahead >= 2:
            return RowBlocks(wide, steps, min(ahead, MOST_AHEAD, inputs // width // splits), splits)
    return None


@partial(jax.jit, static_argnums=(3, 4))
def eight_bit_rows(x: jax.Array, codes: jax.Array, scales: jax.Array, blocks: RowBlocks, dtype: Any) -> jax.Array:
    """[t, outputs] in `dtype` of x [t, inputs], numbers of two bytes, with codes [outputs, inputs] of e4m3 or int8, and
    the scale of each output."""
    steps = EightBitSteps(blocks.steps, blocks.outputs, x.dtype, codes.dtype)
    like: Any = jax.ShapeDtypeStruct((len(x), len(codes)), dtype)  # type: ignore[no-untyped-call]
    return few_row_product(x, (codes, scales), steps, blocks, like)
