"""Products of 72 to 256 rows with a matrix, both in codes of e4m3, where each BLOCK of a row's inputs has a scale.

The sums of each BLOCK are multiplied by their scale and added to the others in float32. Outputs are too few for all
multiprocessors, so programs of a cluster share the inputs. Each then has some of the outputs of all, and adds for them
what the others have put into its memory, in the order of inputs.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from quire.ops.gpu.code_product import in_shared, load
from quire.ops.gpu.row_tiles import SIZE, WIDE, Ring, RowTiles, by_row, first_of, over_rows, ring
from quire.ops.gpu.row_tiles import tiles_of as row_tiles_of

BLOCK = SIZE  # inputs that share a scale
FEWEST_ROWS, MOST_ROWS = 72, 256
OUTPUTS = 128  # of a program
CLUSTER = 4  # programs
SHARED_BYTES = 224 << 10
LEAST_AHEAD, MOST_AHEAD = 3, 6
TILE, PART = "tile", "part"  # axes of a cluster: programs with other rows, and with other inputs


class ScaledBlocks(NamedTuple):
    tiles: RowTiles
    parts: int  # of inputs, each of another program
    ahead: int
    shares_matrix: bool  # tiles of rows get its blocks together


def scaled_blocks_of(num_rows: int, outputs: int, inputs: int) -> ScaledBlocks | None:
    """None: the kernel is not for it."""
    if not FEWEST_ROWS <= num_rows <= MOST_ROWS or num_rows % 8 or outputs % OUTPUTS or inputs % BLOCK:
        return None
    for count in (1, 2):
        tiles, parts = row_tiles_of(num_rows, count, 2), CLUSTER // count
        if tiles is None or inputs % (parts * BLOCK):
            continue
        steps = inputs // BLOCK // parts
        ahead = min(ahead_of(tiles, steps), steps)
        if ahead >= LEAST_AHEAD:
            return ScaledBlocks(tiles, parts, ahead, count > 1)
    return None


def ahead_of(tiles: RowTiles, steps: int) -> int:
    """Blocks that have room at once."""
    of_others = tiles.groups * WIDE * OUTPUTS * 4 + 4 * tiles.height * steps
    return min(MOST_AHEAD, (SHARED_BYTES - of_others) // ((tiles.height + OUTPUTS) * SIZE))


def many_scaled_product(
    rows: jax.Array, matrix: jax.Array, dtype: Any, scales: jax.Array, blocks: ScaledBlocks | None = None
) -> jax.Array:
    """As `code_product`."""
    (tokens, inputs), outputs = rows.shape, len(matrix)
    blocks = blocks or scaled_blocks_of(tokens, outputs, inputs)
    assert blocks is not None
    tiles, parts, ahead, shares_matrix = blocks
    steps, width = inputs // BLOCK // parts, OUTPUTS // parts
    memory, barriers = ring(tiles, OUTPUTS, ahead, 2, rows.dtype, TILE if shares_matrix else None)
    across: dict[str, Any] = (
        {"cluster": (tiles.num_tiles, parts), "cluster_names": (TILE, PART)} if parts > 1 or shares_matrix else {}
    )
    grid: Any = (outputs // OUTPUTS,) if across else (outputs // OUTPUTS, tiles.num_tiles, parts)
    run = plgpu.kernel(
        partial(_kernel, blocks),
        out_type=jax.ShapeDtypeStruct((tokens, outputs), dtype),  # type: ignore[no-untyped-call]
        scratch_types=(
            memory,
            plgpu.SMEM((parts, tiles.groups, WIDE, width), jnp.float32, transforms=in_shared(width, jnp.float32)),
            plgpu.SMEM((steps, tiles.height), jnp.float32),
            barriers,
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=parts, num_barriers=tiles.groups),
        ),
        grid=grid,
        grid_names=("program",) if across else ("program", TILE, PART),
        num_threads=tiles.groups + 1,
        thread_name="group",
        kernel_name="many_scaled_product",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, unsafe_no_auto_barriers=True
        ),
        **across,
    )
    out: jax.Array = run(rows, scales, matrix)
    return out


def _kernel(
    blocks: ScaledBlocks,
    rows_ref: Any,
    scales_ref: Any,
    matrix_ref: Any,
    out_ref: Any,
    memory: Any,
    sums_of_parts: Any,
    scales: Any,
    barriers: Any,
    scales_there: Any,
    all_there: Any,
) -> None:
    tokens, tiles, steps = rows_ref.shape[0], blocks.tiles, scales.shape[0]
    blocks_on_way, group = Ring(*memory, *barriers), lax.axis_index("group")
    tile, part = lax.axis_index(TILE), lax.axis_index(PART)
    start = lax.axis_index("program") * OUTPUTS
    in_tile, first = first_of(tiles, tokens, tile, group)

    def fetch() -> None:
        of_tile = pl.ds(tile * (tokens - tiles.height), tiles.height)
        plgpu.copy_gmem_to_smem(scales_ref.at[pl.ds(part * steps, steps), of_tile], scales, scales_there)

        def copy(step: Any, slot: Any, there: Any) -> None:
            at = pl.ds((part * steps + step) * SIZE, SIZE)
            together = (TILE,) if blocks.shares_matrix else None
            plgpu.copy_gmem_to_smem(rows_ref.at[of_tile, at], blocks_on_way.rows.at[slot], there)
            of_outputs = matrix_ref.at[pl.ds(start, OUTPUTS), at]
            plgpu.copy_gmem_to_smem(of_outputs, blocks_on_way.matrix.at[slot], there, collective_axes=together)

        blocks_on_way.fetch(steps, copy)

    def compute() -> None:
        plgpu.set_max_registers(tiles.registers, action="increase")
        plgpu.barrier_wait(scales_there)

        def add(step: Any, total: jax.Array) -> jax.Array:
            by = load(scales.at[step, pl.ds(in_tile, WIDE)], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

            def multiply(sums: Any) -> Any:
                slot = blocks_on_way.multiply([sums], step, in_tile)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(blocks_on_way.free.at[slot])
                return sums[...]

            sums = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((WIDE, OUTPUTS)))
            added: jax.Array = total + sums * over_rows(by, (WIDE, OUTPUTS))
            return added

        zeros = plgpu.layout_cast(jnp.zeros((WIDE, OUTPUTS), jnp.float32), plgpu.Layout.WGMMA)
        total = lax.fori_loop(0, steps, add, zeros)
        found = _exchange(blocks.parts, part, total, sums_of_parts, all_there, group)
        width = found.shape[1]
        out_ref[pl.ds(first, WIDE), pl.ds(start + part * width, width)] = found.astype(out_ref.dtype)

    lax.cond(group == tiles.groups, fetch, compute)


def _exchange(parts: int, part: Any, total: jax.Array, sums_of_parts: Any, all_there: Any, group: Any) -> jax.Array:
    """The sums of all inputs, of the outputs that this program has."""
    width = total.shape[1] // parts
    if parts == 1:
        sums_of_parts.at[0, group][...] = total
        plgpu.barrier_arrive(all_there.at[group])
    for other in range(parts) if parts > 1 else ():
        plgpu.async_store_smem(
            total[:, other * width : (other + 1) * width],
            sums_of_parts.at[part, group],
            all_there.at[group],
            cluster_idx=jnp.int32(other),
            cluster_dim=PART,
        )
    plgpu.barrier_wait(all_there.at[group])
    found = [load(sums_of_parts.at[source, group], layout=by_row(width)) for source in range(parts)]
    out: jax.Array = sum(found[1:], found[0])
    return out
