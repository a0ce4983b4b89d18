"""The blocks of products of many rows in e4m3."""

import pytest

from quire.ops.gpu.many_gated_codes import many_gated_blocks_of
from quire.ops.gpu.many_scaled_product import CLUSTER, scaled_blocks_of
from quire.ops.gpu.row_tiles import WIDE, RowTiles

MOST_SHARED_BYTES = 227 << 10


@pytest.mark.parametrize("num_rows", range(72, 264, 8))
def test_groups_have_all_rows_and_blocks_have_room(num_rows: int) -> None:
    gated, down = many_gated_blocks_of(num_rows, 14336, 4096, "bfloat16"), scaled_blocks_of(num_rows, 4096, 14336)
    assert gated is not None
    assert down is not None
    for tiles in (gated.tiles, down.tiles):
        starts = {
            tile * (num_rows - tiles.height) + group * tiles.apart
            for tile in range(tiles.num_tiles)
            for group in range(tiles.groups)
        }
        assert {start + row for start in starts for row in range(WIDE)} == set(range(num_rows))
        assert all(start % 8 == 0 for start in starts)
    assert down.tiles.num_tiles * down.parts == CLUSTER
    assert gated.ahead * (gated.tiles.height + 256) * 128 + gated.tiles.groups * WIDE * 128 < MOST_SHARED_BYTES
    assert down.ahead * (down.tiles.height + 128) * 128 + down.tiles.groups * WIDE * 128 * 4 < MOST_SHARED_BYTES


@pytest.mark.parametrize(
    ("num_rows", "tiles"),
    [
        (96, RowTiles(1, 96, 2)),
        (128, RowTiles(1, 128, 2)),
        (136, RowTiles(2, 72, 2)),
        (192, RowTiles(1, 192, 3)),
        (200, RowTiles(2, 104, 2)),
        (256, RowTiles(2, 128, 2)),
    ],
)
def test_tiles_of_rows(num_rows: int, tiles: RowTiles) -> None:
    blocks = many_gated_blocks_of(num_rows, 14336, 4096, "bfloat16")
    assert blocks is not None
    assert blocks.tiles == tiles


@pytest.mark.parametrize(
    ("num_rows", "outputs", "inputs"), [(64, 4096, 4096), (100, 4096, 4096), (264, 4096, 4096), (128, 4096, 448)]
)
def test_products_that_the_kernels_are_not_for(num_rows: int, outputs: int, inputs: int) -> None:
    assert many_gated_blocks_of(num_rows, outputs, inputs, "bfloat16") is None
    assert scaled_blocks_of(num_rows, outputs, inputs) is None
