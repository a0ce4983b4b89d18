"""The blocks of products of many rows in e4m3."""

import pytest

from quire.ops.gpu.hopper.many_gates import gate_blocks_of, leaving
from quire.ops.gpu.hopper.mosaic import MULTIPROCESSORS
from quire.ops.gpu.hopper.row_tiles import GROUPS, WIDE, RowTiles

MOST_SHARED_BYTES = 227 << 10


@pytest.mark.parametrize("num_rows", [*range(72, 136, 8), *range(200, 264, 8)])
def test_groups_have_all_rows_and_blocks_have_room(num_rows: int) -> None:
    blocks = gate_blocks_of(num_rows, 14336, 4096)
    assert blocks is not None
    tiles = blocks.tiles
    starts = {tiles.first(num_rows, tile, group)[1] for tile in range(tiles.num_tiles) for group in range(GROUPS)}
    assert {start + row for start in starts for row in range(WIDE)} == set(range(num_rows))
    assert all(start % 8 == 0 for start in starts)
    of_blocks, of_results = (tiles.height + 2 * blocks.part) * 128, GROUPS * WIDE * leaving(blocks.part) * 2
    assert blocks.ahead * of_blocks + of_results < MOST_SHARED_BYTES


@pytest.mark.parametrize(
    ("num_rows", "tiles"),
    [
        (96, RowTiles(1, 96)),
        (128, RowTiles(1, 128)),
        (200, RowTiles(2, 104)),
        (256, RowTiles(2, 128)),
    ],
)
def test_tiles_of_rows(num_rows: int, tiles: RowTiles) -> None:
    blocks = gate_blocks_of(num_rows, 14336, 4096)
    assert blocks is not None
    assert blocks.tiles == tiles


@pytest.mark.parametrize(("numbers", "part"), [(14336, 112), (12288, 96), (18944, 128), (9728, 128), (6144, 96)])
@pytest.mark.parametrize("num_rows", [128, 256])
def test_multiprocessors_have_about_as_much_to_do_each(num_rows: int, numbers: int, part: int) -> None:
    blocks = gate_blocks_of(num_rows, numbers, 4096)
    assert blocks is not None
    assert blocks.part == part
    assert numbers % blocks.part == 0
    assert blocks.programs(numbers) * (1 + blocks.pairs) <= MULTIPROCESSORS
    assert blocks.programs(numbers) * blocks.parts_at_once * blocks.most_gates(numbers) >= numbers


@pytest.mark.parametrize(
    ("num_rows", "numbers", "inputs"),
    [(64, 4096, 4096), (136, 4096, 4096), (192, 4096, 4096), (100, 4096, 4096), (264, 4096, 4096), (128, 4096, 448)],
)
def test_products_that_the_kernel_is_not_for(num_rows: int, numbers: int, inputs: int) -> None:
    assert gate_blocks_of(num_rows, numbers, inputs) is None
