"""Pages between their arrays and blocks, by one launch for each block.

XLA gathers from every array by itself, stacks what it has gathered, and scatters into every array by itself: dozens of
launches, and twice the bytes. Here a program has a part of one page in a few arrays.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.gpu.tiles import array, power_of_two, whole

CHUNK_BYTES = 4096  # of a page in one array that a program moves, at most
GROUP = 8  # arrays of a program, of which all is loaded before anything is stored
MOST_ARRAYS = 192  # of a launch: each needs two pointers, and a kernel takes about 500


def gather(
    arrays: Sequence[jax.Array],
    sources: jax.Array,
    rows: int,
    *,
    most_arrays: int = MOST_ARRAYS,
    interpret: bool = False,
) -> list[jax.Array]:
    """`PageMoves.gather` for one NVIDIA GPU."""
    flat, page_shape = _flat(arrays), arrays[0].shape[1:]
    take = partial(_gather_block, sources=sources, rows=rows, interpret=interpret)
    blocks = []
    for first in _first_rows(sources, rows):
        parts = [take(flat[begin:end], first=first) for begin, end in _spans(len(flat), most_arrays)]
        block = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
        blocks.append(block.reshape(rows, len(arrays), *page_shape))
    return blocks


def scatter(
    arrays: Sequence[jax.Array],
    targets: jax.Array,
    blocks: Sequence[jax.Array],
    *,
    most_arrays: int = MOST_ARRAYS,
    interpret: bool = False,
) -> list[jax.Array]:
    """`PageMoves.scatter` for one NVIDIA GPU. In place, where the arrays are given away."""
    flat, shape, rows = _flat(arrays), arrays[0].shape, blocks[0].shape[0]
    for first, block in zip(_first_rows(targets, rows), blocks, strict=True):
        contents = block.reshape(rows, len(flat), -1)
        for begin, end in _spans(len(flat), most_arrays):
            flat[begin:end] = _scatter_block(flat[begin:end], targets, first, contents, begin, interpret)
    return [pages.reshape(shape) for pages in flat]


def _flat(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    return [pages.reshape(pages.shape[0], prod(pages.shape[1:])) for pages in arrays]


def _first_rows(numbers: jax.Array, rows: int) -> Iterator[np.ndarray[Any, Any]]:
    """int32 [1] for each block: an array, not a constant, so that one kernel serves all blocks."""
    return (np.array([first], np.int32) for first in range(0, numbers.shape[0], rows))


def _spans(count: int, most: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + most, count)) for begin in range(0, count, most)]


@partial(jax.jit, static_argnames=("rows", "interpret"))
def _gather_block(
    arrays: list[jax.Array], sources: jax.Array, first: jax.Array, rows: int, interpret: bool
) -> jax.Array:
    """[rows, arrays, size]."""
    size = arrays[0].shape[1]
    chunk, operands = _chunk(arrays[0]), [sources, first, *arrays]
    shape = array((rows, len(arrays), size), arrays[0].dtype)
    out: jax.Array = pl.pallas_call(
        partial(_gather, chunk),
        grid=(pl.cdiv(size, chunk), pl.cdiv(len(arrays), GROUP), rows),
        in_specs=[whole(operand) for operand in operands],
        out_specs=whole(shape),
        out_shape=shape,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="gather_pages",
    )(*operands)
    return out


@partial(jax.jit, static_argnums=(4, 5))
def _scatter_block(
    arrays: list[jax.Array], targets: jax.Array, first: jax.Array, block: jax.Array, offset: int, interpret: bool
) -> list[jax.Array]:
    """The arrays with their pages. `offset`: the place of the first array in the block."""
    rows, _, size = block.shape
    chunk, operands = _chunk(block), [targets, first, block, *arrays]
    shapes = [array(pages.shape, pages.dtype) for pages in arrays]
    out: list[jax.Array] = pl.pallas_call(
        partial(_scatter, chunk, offset, len(arrays)),
        grid=(pl.cdiv(size, chunk), pl.cdiv(len(arrays), GROUP), rows),
        in_specs=[whole(operand) for operand in operands],
        out_specs=[whole(shape) for shape in shapes],
        out_shape=shapes,
        input_output_aliases={len(operands) - len(arrays) + at: at for at in range(len(arrays))},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="scatter_pages",
    )(*operands)
    return out


def _chunk(of: jax.Array) -> int:
    """Numbers of a page in one array that a program moves."""
    return min(CHUNK_BYTES // of.dtype.itemsize, power_of_two(of.shape[-1]))


def _gather(chunk: int, sources_ref: Any, first_ref: Any, *refs: Any) -> None:
    *array_refs, block_ref = refs
    row, group = pl.program_id(2), pl.program_id(1)
    column, is_there = _columns(chunk, block_ref.shape[2])
    page = sources_ref[first_ref[0] + row]
    for index, (begin, end) in enumerate(_spans(len(array_refs), GROUP)):
        sources = [ref.at[page, column] for ref in array_refs[begin:end]]
        targets = [block_ref.at[row, at, column] for at in range(begin, end)]
        pl.when(group == index)(partial(_copy, sources, targets, is_there))


def _scatter(
    chunk: int, offset: int, num_arrays: int, targets_ref: Any, first_ref: Any, block_ref: Any, *refs: Any
) -> None:
    array_refs = refs[num_arrays:]  # the first ones are the same arrays, not to be read
    row, group = pl.program_id(2), pl.program_id(1)
    column, is_there = _columns(chunk, block_ref.shape[2])
    page = targets_ref[first_ref[0] + row]
    for index, (begin, end) in enumerate(_spans(num_arrays, GROUP)):
        sources = [block_ref.at[row, offset + at, column] for at in range(begin, end)]
        targets = [ref.at[page, column] for ref in array_refs[begin:end]]
        pl.when((group == index) & (page > 0))(partial(_copy, sources, targets, is_there))


def _columns(chunk: int, size: int) -> tuple[jax.Array, jax.Array | None]:
    """The places of a program's numbers in a page, and a mask where some are behind its end."""
    column = pl.program_id(0) * chunk + jnp.arange(chunk)
    return column, None if size % chunk == 0 else column < size


def _copy(sources: list[Any], targets: list[Any], is_there: jax.Array | None) -> None:
    """Nothing waits for a store before all is asked for."""
    loaded = [plgpu.load(source, mask=is_there) for source in sources]
    for target, numbers in zip(targets, loaded, strict=True):
        plgpu.store(target, numbers, mask=is_there)
