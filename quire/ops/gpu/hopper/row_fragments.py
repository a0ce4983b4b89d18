"""Common pieces of `few_row_kernel`: products of tiles, sums in registers, and single numbers of memory.

Outputs are the wide side of the device's products, as in `code_fragments`: a group of 128 threads, four warps, has them
in tiles of sixteen, and the warps take tiles in turn. Each warp multiplies its own tiles with all rows.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from quire.ops.gpu.hopper.code_fragments import (
    BY_PRODUCT,
    OF_HALVES,
    assembly,
    empty,
    fragments,
    i32,
    in_registers,
    nothing,
    number,
    place_in_memory,
    several,
    store_where,
)

COLUMNS, INPUTS = 8, 16  # of a warp's product with a tile of outputs
SHORT = {"bfloat16": "bf16", "float16": "f16"}  # types in assembly

_MULTIPLY = (
    "mma.sync.aligned.m16n8k16.row.col.f32.TYPE.TYPE.f32 "
    "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
)

# A thread's sums: by 64 outputs, by eight rows, by half of a tile and by which of two rows.
Sums = dict[tuple[int, int, int, int], Any]


def _close_block(_: Any) -> None:
    """Wait until all threads of the group have read the block."""
    utils.warpgroup_barrier()  # type: ignore[no-untyped-call]


close_block = in_registers((), None, _close_block)


def zero() -> Any:
    return utils.c(0.0, ir.F32Type.get())


def twice(bits: int) -> str:
    """The text of a word with these sixteen bits twice."""
    return f"{bits << 16 | bits:#x}"


def multiply(dtype: Any, wide: list[Any], rows: list[Any], sums: list[Any]) -> list[Any]:
    """A thread's four sums of a tile times eight rows, added to `sums`."""
    kind = ir.F32Type.get()
    text, constraints = _MULTIPLY.replace("TYPE", SHORT[jnp.dtype(dtype).name]), "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
    four = assembly(several(kind, 4), [*wide, *rows, *sums], text, constraints, is_pure=True)
    return [llvm.extractvalue(kind, four, [index]) for index in range(4)]


def by_place(registers: Any) -> dict[tuple[int, int, int], Any]:
    """The place of each register: by 64 rows of the array, by eight columns, and by half of a tile."""
    return {(at[0], at[1], sum(at[2:])): at for at in np.ndindex(registers.shape)}


def adds_to_sums(given: tuple[Any, ...], outputs: int, tokens: int, body: Callable[..., None]) -> Callable[..., Any]:
    """A function of the `given` arrays, rows and sums [outputs, tokens] that returns the sums as changed by
    `body(*given, rows, sums)`."""

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
    """A register with two float32, neighbours of a row."""
    both = llvm.mlir_undef(ir.VectorType.get((2,), ir.F32Type.get()))
    return llvm.insertelement(llvm.insertelement(both, first, number(0)), second, number(1))


def single(value: Any) -> Any:
    """A register with one float32."""
    return llvm.insertelement(llvm.mlir_undef(ir.VectorType.get((1,), ir.F32Type.get())), value, number(0))


# Single numbers of arrays in global memory, as a thread loads and stores them.
_LOADS = {2: "ld.global.nc.u16 $0, [$1];", 4: "ld.global.nc.b32 $0, [$1];"}
_FROM_FLOAT16 = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, low; }"


def load_bits(ref: Any, index: Any, dtype: Any) -> Any:
    """The bits of an element, in a float32 register and not converted, so that nothing waits for the load."""
    size = jnp.dtype(dtype).itemsize
    bits = assembly(i32(), [place_in_memory(ref, index, size)], _LOADS[size], "=r,l")
    return llvm.bitcast(ir.F32Type.get(), bits)


def widened(bits: Any, dtype: Any) -> Any:
    """The float32 of bits from `load_bits`."""
    kind = ir.F32Type.get()
    if dtype == jnp.float32:
        return bits
    word = llvm.bitcast(i32(), bits)
    if dtype == jnp.bfloat16:
        return llvm.bitcast(kind, arith.shli(word, number(16)))
    assert dtype == jnp.float16
    return assembly(kind, [word], _FROM_FLOAT16, "=f,r", is_pure=True)


def rounded(value: Any, dtype: Any) -> tuple[Any, Any]:
    """The bits of a float32 rounded to `dtype`, and the rounded value."""
    if dtype == jnp.float32:
        return value, value
    text = f"cvt.rn.{'bf16' if dtype == jnp.bfloat16 else 'f16'}.f32 $0, $1;"
    bits = assembly(ir.IntegerType.get_signless(16), [value], text, "=h,f", is_pure=True)
    return bits, widened(llvm.bitcast(ir.F32Type.get(), arith.extui(i32(), bits)), dtype)


def store(condition: Any | None, ref: Any, index: Any, value: Any, dtype: Any) -> None:
    """Store a float32, rounded, where the condition holds."""
    bits, _ = rounded(value, dtype)
    kind, constraint = ("f32", "f") if dtype == jnp.float32 else ("b16", "h")
    where = place_in_memory(ref, index, jnp.dtype(dtype).itemsize)
    if condition is None:
        assembly(nothing(), [where, bits], f"st.global.{kind} [$0], $1;", f"l,{constraint}")
    else:
        store_where(condition, f"st.global.{kind} [$1], $2;", where, [bits], f"l,{constraint}")
