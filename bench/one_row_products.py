"""Products of one row with dense matrices on a GPU, without tensor cores, with and without the norm before them.

    python bench/one_row_products.py [--only qwen3-30b-a3b gpt-oss-20b] [--xla]
    python bench/one_row_products.py --check      # against plain products, interpreted, on any machine

Every program asks for all that it reads of the matrix at once, and normalises the row itself while that is on its way,
so that norms are no launches of their own. Times are those of a kernel on the device, by its profile: the middle of
eight calls with matrices of their own. The floor is the time of reading the matrix once at 4.2 TB/s. With `--xla`
beside them what XLA takes for eight rows, sums of parts included, and the norm with its sum that it needs before.
"""

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_time import kernels as device_kernels
from device_time import profiled
from few_expert_rows import CALLS, device_us
from gpu_experts import BYTES_A_SECOND, DTYPE
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.gpu.add_norm import add_norm
from quire.ops.gpu.tiles import array, whole
from quire.ops.norms import add_rms_norm

EPS = 1e-6
# Outputs, inputs, and whether the row is normalised before.
MATRICES = {
    "qwen3-30b-a3b": {"qkv": (5120, 2048, True), "out": (2048, 4096, False), "router": (128, 2048, True)},
    "gpt-oss-20b": {"qkv": (5120, 2880, True), "out": (2880, 4096, False), "router": (32, 2880, True)},
}
BLOCKS = "1,1024,4 2,1024,4 4,1024,4 8,1024,4 2,2048,8 4,2048,8 8,2048,8"  # columns, inputs of a load, warps


def row_product(
    columns: int,
    chunk: int,
    warps: int,
    x: jax.Array,
    addend: jax.Array,
    scale: jax.Array,
    matrix: jax.Array,
    *,
    has_norm: bool,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The product [1, outputs] of x [1, inputs], or of the norm of x + addend; and that sum."""
    outputs, inputs = matrix.shape
    starts = range(0, inputs, chunk)

    def kernel(x_ref: Any, addend_ref: Any, scale_ref: Any, matrix_ref: Any, out_ref: Any, total_ref: Any) -> None:
        column = (pl.program_id(0) * columns + jnp.arange(columns))[:, None]

        def load(ref: Any, at: jax.Array, rows: int) -> jax.Array:
            if inputs % chunk == 0:
                return plgpu.load(ref)
            return plgpu.load(ref, mask=jnp.broadcast_to(at < inputs, (rows, chunk)), other=0.0)

        each = [first + jnp.arange(chunk)[None, :] for first in starts]
        loaded = [load(matrix_ref.at[column, at], at, columns) for at in each]
        row = [load(x_ref.at[0, at], at, 1).astype(jnp.float32) for at in each]
        if has_norm:
            others = [load(addend_ref.at[0, at], at, 1).astype(jnp.float32) for at in each]
            scales = [load(scale_ref.at[at], at, 1).astype(jnp.float32) for at in each]
            totals = [(one + other).astype(x_ref.dtype) for one, other in zip(row, others, strict=True)]

            @pl.when(pl.program_id(0) == 0)
            def _() -> None:
                for at, one in zip(each, totals, strict=True):
                    plgpu.store(total_ref.at[0, at], one, mask=at < inputs)

            row = [one.astype(jnp.float32) for one in totals]
            squares = row[0] * row[0]
            for one in row[1:]:
                squares = squares + one * one
            by = jax.lax.rsqrt(squares.sum() / inputs + EPS)
            row = [
                (one * by * its).astype(x_ref.dtype).astype(jnp.float32) for one, its in zip(row, scales, strict=True)
            ]
        sums = loaded[0].astype(jnp.float32) * row[0]
        for some, one in zip(loaded[1:], row[1:], strict=True):
            sums = sums + some.astype(jnp.float32) * one
        plgpu.store(out_ref.at[0, column[:, 0]], sums.sum(axis=1).astype(out_ref.dtype))

    operands, made = (x, addend, scale, matrix), [array((1, outputs), x.dtype), array(x.shape, x.dtype)]
    out, total = pl.pallas_call(
        kernel,
        grid=(outputs // columns,),
        in_specs=[whole(operand) for operand in operands],
        out_specs=[whole(one) for one in made],
        out_shape=made,
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="row_product",
    )(*operands)
    return out, total


def drawn(rows: int, outputs: int, inputs: int, count: int) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]:
    keys = jax.random.split(jax.random.key(0), 3 + count)
    x, addend = (jax.random.normal(key, (rows, inputs), DTYPE) for key in keys[:2])
    scale = jax.random.normal(keys[2], (inputs,), DTYPE)
    return x, addend, scale, [0.02 * jax.random.normal(key, (outputs, inputs), DTYPE) for key in keys[3:]]


def compiled(told: str, has_norm: bool, *given: jax.Array) -> Any:
    call = partial(row_product, *map(int, told.split(",")), has_norm=has_norm)
    try:
        return jax.jit(call).lower(*given).compile()
    except Exception as error:  # a block that is too large must not end the run
        return (str(error).splitlines() or [repr(error)])[0][:90]


def measured(name: str, outputs: int, inputs: int, has_norm: bool, with_xla: bool) -> Iterator[str]:
    x, addend, scale, matrices = drawn(1, outputs, inputs, CALLS)
    floor = outputs * inputs * 2 / BYTES_A_SECOND * 1e6
    told = [(blocks, norm) for norm in ((False, True) if has_norm else (False,)) for blocks in BLOCKS.split()]
    with ThreadPoolExecutor(16) as threads:
        programs = list(threads.map(lambda one: compiled(*one, x, addend, scale, matrices[0]), told))
    ready = [(one, program) for one, program in zip(told, programs, strict=True) if not isinstance(program, str)]
    runs = [partial(lambda program, call: program(x, addend, scale, matrices[call]), program) for _, program in ready]
    yield f"{name}: floor {floor:.1f} µs"
    for us, ((blocks, norm), _) in sorted(
        zip(device_us(runs, "row_product"), ready, strict=True), key=lambda one: one[0]
    ):
        yield f"  {blocks + (' with norm' if norm else ''):22} {us:6.2f} ({us / floor:.2f})"
    yield from (f"  {one}: {program}" for one, program in zip(told, programs, strict=True) if isinstance(program, str))
    if with_xla:
        yield f"  XLA, 8 rows: {xla(outputs, inputs, has_norm)}"


def xla(outputs: int, inputs: int, has_norm: bool) -> str:
    """Each kernel of a call by itself."""
    x, addend, scale, matrices = drawn(8, outputs, inputs, CALLS)

    @jax.jit
    def run(matrix: jax.Array) -> jax.Array:
        row = add_norm(x, addend, scale, EPS, 0.0)[1] if has_norm else x
        return jnp.einsum("ti,oi->to", row, matrix, preferred_element_type=DTYPE)

    jax.block_until_ready(run(matrices[0]))  # type: ignore[no-untyped-call]

    def all_calls() -> float:
        for matrix in matrices:
            jax.block_until_ready(run(matrix))  # type: ignore[no-untyped-call]
        return 0.0

    events = device_kernels(profiled(all_calls)[1])
    names = dict.fromkeys(event.name for event in events)
    times = {name: np.median([one.ended_ns - one.begun_ns for one in events if one.name == name]) for name in names}
    return ", ".join(f"{name[:30]} {ns / 1e3:.2f}" for name, ns in times.items())


def check() -> None:
    for outputs, inputs in ((16, 256), (32, 160)):
        x, addend, scale, (matrix,) = drawn(1, outputs, inputs, 1)
        total, normal = add_rms_norm(x, addend, scale, EPS, 0.0)
        for has_norm, row in ((False, x), (True, normal)):
            right = jnp.einsum("ti,oi->to", row.astype(jnp.float32), matrix.astype(jnp.float32), precision="highest")
            for columns, chunk in ((4, 128), (8, 256)):
                call = jax.jit(partial(row_product, columns, chunk, 1, has_norm=has_norm, interpret=True))
                out, found = call(x, addend, scale, matrix)
                np.testing.assert_allclose(out.astype(jnp.float32), right, atol=0.02 * float(jnp.max(jnp.abs(right))))
                if has_norm:
                    np.testing.assert_array_equal(found, total)
    print("right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MATRICES, default=[*MATRICES])
    parser.add_argument("--xla", action="store_true")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    if given.check:
        check()
        return
    begun = time.perf_counter()
    for model in given.only:
        for name, (outputs, inputs, has_norm) in MATRICES[model].items():
            lines = measured(f"{model} {name}", outputs, inputs, has_norm, given.xla)
            print(*lines, f"  {time.perf_counter() - begun:.0f} s", sep="\n", flush=True)


if __name__ == "__main__":
    main()
