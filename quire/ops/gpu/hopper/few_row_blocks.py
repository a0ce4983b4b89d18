"""The division of products of few rows with codes: what a program of `few_row_kernel` computes and fetches ahead.

Chosen by measurements on an H200 with the products of an 8B model (docs/notes/four-bits.md).
"""

from collections.abc import Callable
from math import ceil
from typing import NamedTuple

from quire.ops.gpu.hopper.code_fragments import WIDE
from quire.ops.gpu.hopper.mosaic import MULTIPROCESSORS
from quire.ops.weights.four_bits import PLACES

NARROW = 8  # rows are a multiple of it, or fewer
MOST_BY_WARP = 16  # with more rows, the warps of a group multiply together
MOST_ROWS = 64
ENOUGH_BUSY = 0.7  # mean work of a multiprocessor, relative to the busiest
LEAST_BUSY, LEAST_BUSY_OF_MANY = 86, 118  # multiprocessors, up to MOST_BY_WARP rows and above
SHARED_BYTES = 220 << 10  # of a multiprocessor, for all its programs
MOST_PROGRAMS = 2  # of a multiprocessor at once
SPLITS = (1, 2, 4)  # programs of a cluster
# Blocks that a group fetches ahead, at least, and steps of a block: the best first.
DEPTHS = (4, 4), (2, 4), (4, 2), (2, 2), (2, 1), (1, 1)
DEPTHS_OF_MANY = (4, 4), (4, 2), (2, 4), (2, 2), (2, 1), (1, 1)
DEPTHS_OF_EIGHT_BITS = (4, 4), (2, 4), (3, 2), (4, 1), (2, 2), (2, 1), (1, 1)
MOST_AHEAD = 8
MOST_STEPS = 1.15  # computed steps per real step; those beyond the last are zeros
EIGHT_BIT_STEP = 128  # inputs


class RowBlocks(NamedTuple):
    """The work of a program: some outputs, and a part of the inputs, which its groups of threads share."""

    outputs: int
    steps: int  # of a block
    ahead: int  # blocks of a group that have room at once
    splits: int  # programs, a cluster, that share the inputs of the same outputs
    groups: int  # of threads


class Matrix(NamedTuple):
    """The matrix. Outputs come in `pieces` (gates, then ups); a program has as many of each."""

    outputs: int
    inputs: int
    pieces: int
    step: int  # inputs
    group: int  # inputs with the same scale: whole steps or parts of a step
    bytes_of: Callable[[int, int, int], int]  # of a block, by rows, outputs and inputs


def of_four_bits(num_rows: int, outputs: int, inputs: int, group: int, run: int, pieces: int = 1) -> RowBlocks | None:
    """None where the kernel does not apply."""
    step, by_warp = PLACES * run, num_rows <= MOST_BY_WARP

    def bytes_of(rows: int, wide: int, width: int) -> int:
        return width * (wide // 2 + rows * 2) + max(1, width // group) * wide * 4

    if num_rows > MOST_ROWS or not (by_warp or group % step == 0):
        return None
    matrix = Matrix(outputs, inputs, pieces, step, group, bytes_of)
    return _blocks_of(num_rows, matrix, DEPTHS if by_warp else DEPTHS_OF_MANY)


def of_eight_bits(num_rows: int, outputs: int, inputs: int, pieces: int = 1) -> RowBlocks | None:
    if num_rows > MOST_BY_WARP or inputs % EIGHT_BIT_STEP:
        return None

    def bytes_of(rows: int, wide: int, width: int) -> int:
        return width * (wide + rows * 2)

    matrix = Matrix(outputs, inputs, pieces, EIGHT_BIT_STEP, EIGHT_BIT_STEP, bytes_of)
    return _blocks_of(num_rows, matrix, DEPTHS_OF_EIGHT_BITS)


def bytes_of_sums(rows: int, outputs: int, splits: int, groups: int) -> int:
    """Shared memory in which a program's groups receive the sums of others. A group adds whole tiles of warps, of which
    there are four."""
    sources = splits * groups
    return groups * max(sources, 4) * outputs * rows if sources > 1 else 0


def _blocks_of(num_rows: int, matrix: Matrix, depths: tuple[tuple[int, int], ...]) -> RowBlocks | None:
    is_narrow, by_warp = num_rows <= NARROW or num_rows % NARROW == 0, num_rows <= MOST_BY_WARP
    outputs, step = matrix.outputs, matrix.step
    if not is_narrow or outputs % (WIDE * matrix.pieces):
        return None
    rows, num_steps = max(num_rows, NARROW), ceil(matrix.inputs / step)
    is_tall = by_warp and outputs % (2 * WIDE) == 0 and outputs >= 2 * WIDE * MULTIPROCESSORS
    wide = WIDE * max(matrix.pieces, 2 if is_tall else 1)
    splits = _splits(outputs // wide, num_steps, LEAST_BUSY if by_warp else LEAST_BUSY_OF_MANY)
    programs = min(-(-outputs // wide * splits // MULTIPROCESSORS), MOST_PROGRAMS)  # of a multiprocessor at once
    for groups in (2, 1) if by_warp and not is_tall else (1,):
        sources = splits * groups
        room = (SHARED_BYTES // programs - bytes_of_sums(rows, wide, splits, groups)) // groups
        for ahead, steps in depths:
            width = steps * step
            if (matrix.group % width and width % matrix.group) or not _is_full(num_steps, steps * sources):
                continue
            num_ahead = min(room // matrix.bytes_of(rows, wide, width), ceil(num_steps / (steps * sources)))
            if num_ahead >= ahead:
                return RowBlocks(wide, steps, min(num_ahead, MOST_AHEAD), splits, groups)
    return None


def _splits(tiles: int, num_steps: int, least: int) -> int:
    """The fewest with which multiprocessors have about equal work, or else those with which they come closest."""

    def busy(splits: int) -> float:
        share = tiles * splits / MULTIPROCESSORS
        return share / ceil(share)

    possible = [splits for splits in SPLITS if _is_full(num_steps, splits)]
    good = (splits for splits in possible if busy(splits) >= ENOUGH_BUSY and tiles * splits >= least)
    return next(good, max(possible, key=busy))


def _is_full(num_steps: int, at_once: int) -> bool:
    """True if rounding the steps up to a multiple of `at_once` adds few."""
    return ceil(num_steps / at_once) * at_once <= MOST_STEPS * num_steps
