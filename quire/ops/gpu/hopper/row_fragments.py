"""Pieces of a kernel that multiplies few rows with codes, for Mosaic, where each thread's registers count.

A group of 128 threads, four warps, has outputs in tiles of sixteen, one after the other for each warp: the wide side of
the device's products, as in `code_fragments`. Each warp multiplies its own tiles with all rows.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from quire.ops.gpu.hopper.code_fragments import (
    BY_PRODUCT,
    OF_HALVES,
    assembly,
    empty,
    fragments,
    in_registers,
    number,
    several,
)

COLUMNS, INPUTS = 8, 16  # of a warp's product, which has a tile of outputs
SHORT = {"bfloat16": "bf16", "float16": "f16"}  # types in assembly

_MULTIPLY = (
    "mma.sync.aligned.m16n8k16.row.col.f32.TYPE.TYPE.f32 "
    "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
)

# A thread's sums, by 64 outputs, by eight rows, by half of a tile and by one of two rows.
Sums = dict[tuple[int, int, int, int], Any]


def _close_block(_: Any) -> None:
    """All threads have read the block."""
    utils.warpgroup_barrier()  # type: ignore[no-untyped-call]


close_block = in_registers((), None, _close_block)


def zero() -> Any:
    return utils.c(0.0, ir.F32Type.get())


def twice(bits: int) -> str:
    """A word of two elements that are alike."""
    return f"{bits << 16 | bits:#x}"


def multiply(dtype: Any, wide: list[Any], rows: list[Any], sums: list[Any]) -> list[Any]:
    """A thread's four sums of a product of a tile with eight rows."""
    kind = ir.F32Type.get()
    text, constraints = _MULTIPLY.replace("TYPE", SHORT[jnp.dtype(dtype).name]), "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
    four = assembly(several(kind, 4), [*wide, *rows, *sums], text, constraints, is_pure=True)
    return [llvm.extractvalue(kind, four, [index]) for index in range(4)]


def by_place(registers: Any) -> dict[tuple[int, int, int], Any]:
    """The places of registers, by 64 rows of a tall array, by eight columns, and by half of a tile."""
    return {(at[0], at[1], sum(at[2:])): at for at in np.ndindex(registers.shape)}


def adds_to_sums(given: tuple[Any, ...], outputs: int, tokens: int, body: Callable[..., None]) -> Callable[..., Any]:
    """A step of a kernel that takes what is `given`, rows and sums [outputs, tokens] and gives the sums that
    `body(*given, rows, sums)` has changed."""

    def add(_: Any, *arrays: Any) -> Any:
        *others, before = arrays
        places = by_place(before.registers)
        sums: Sums = {
            (*place, which): vector.extract(before.registers[at], [], [which])
            for place, at in places.items()
            for which in range(2)
        }
        body(*others, sums)
        layout = BY_PRODUCT.to_mgpu()
        registers = empty(layout, (outputs, tokens))
        for place, at in places.items():
            registers[at] = pair(sums[(*place, 0)], sums[(*place, 1)])
        return fragments(registers, layout)

    result = plgpu.ShapeDtypeStruct((outputs, tokens), jnp.float32, BY_PRODUCT)
    return in_registers((*given, plgpu.RefType(OF_HALVES), BY_PRODUCT), result, add)


def pair(first: Any, second: Any) -> Any:
    """Two float32 as the device has neighbours of a row."""
    both = llvm.mlir_undef(ir.VectorType.get((2,), ir.F32Type.get()))
    return llvm.insertelement(llvm.insertelement(both, first, number(0)), second, number(1))
