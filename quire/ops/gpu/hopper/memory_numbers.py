"""Single numbers of arrays outside of shared memory, as a thread loads and stores them; see `code_fragments`."""

from typing import Any

import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from quire.ops.gpu.hopper.code_fragments import assembly, i32, nothing, number, store_where
from quire.ops.gpu.hopper.code_stores import place_in_memory

_LOADS = {2: "ld.global.nc.u16 $0, [$1];", 4: "ld.global.nc.b32 $0, [$1];"}
_FROM_FLOAT16 = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, low; }"


def load_bits(ref: Any, index: Any, dtype: Any) -> Any:
    """Those of an element, as a float32 that is none yet. No instruction waits for it."""
    size = jnp.dtype(dtype).itemsize
    bits = assembly(i32(), [place_in_memory(ref, index, size)], _LOADS[size], "=r,l")
    return llvm.bitcast(ir.F32Type.get(), bits)


def widened(bits: Any, dtype: Any) -> Any:
    """The float32 of what `load_bits` gives."""
    kind = ir.F32Type.get()
    if dtype == jnp.float32:
        return bits
    word = llvm.bitcast(i32(), bits)
    if dtype == jnp.bfloat16:
        return llvm.bitcast(kind, arith.shli(word, number(16)))
    assert dtype == jnp.float16
    return assembly(kind, [word], _FROM_FLOAT16, "=f,r", is_pure=True)


def rounded(value: Any, dtype: Any) -> tuple[Any, Any]:
    """Bits of a float32 that is rounded, and its value."""
    if dtype == jnp.float32:
        return value, value
    text = f"cvt.rn.{'bf16' if dtype == jnp.bfloat16 else 'f16'}.f32 $0, $1;"
    bits = assembly(ir.IntegerType.get_signless(16), [value], text, "=h,f", is_pure=True)
    return bits, widened(llvm.bitcast(ir.F32Type.get(), arith.extui(i32(), bits)), dtype)


def store(condition: Any | None, ref: Any, index: Any, value: Any, dtype: Any) -> None:
    """A float32, rounded, where the condition holds."""
    bits, _ = rounded(value, dtype)
    kind, constraint = ("f32", "f") if dtype == jnp.float32 else ("b16", "h")
    where = place_in_memory(ref, index, jnp.dtype(dtype).itemsize)
    if condition is None:
        assembly(nothing(), [where, bits], f"st.global.{kind} [$0], $1;", f"l,{constraint}")
    else:
        store_where(condition, f"st.global.{kind} [$1], $2;", where, [bits], f"l,{constraint}")
