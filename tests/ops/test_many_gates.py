"""The blocks of gates of many rows in e4m3."""

import pytest

from quire.ops.gpu.hopper.many_gates import GROUPS, TILES, WIDE, gate_blocks_of, store_width
from quire.ops.gpu.hopper.mosaic import MULTIPROCESSORS

MOST_SHARED_BYTES = 227 << 10


@pytest.mark.parametrize("num_rows", range(200, 264, 8))
def test_groups_have_all_rows_and_blocks_have_room(num_rows: int) -> None:
    blocks = gate_blocks_of(num_rows, 14336, 4096)
    assert blocks is not None
    height = blocks.height
    starts = {tile * (num_rows - height) + group * (height - WIDE) for tile in range(TILES) for group in range(GROUPS)}
    assert {start + row for start in starts for row in range(WIDE)} == set(range(num_rows))
    assert all(start % 8 == 0 for start in starts)
    of_blocks, of_results = (height + 2 * blocks.part) * 128, GROUPS * WIDE * store_width(blocks.part) * 2
    assert blocks.ahead * of_blocks + of_results < MOST_SHARED_BYTES


@pytest.mark.parametrize(("numbers", "part"), [(14336, 112), (12288, 96), (18944, 128), (9728, 128), (6144, 96)])
def test_multiprocessors_have_about_as_much_to_do_each(numbers: int, part: int) -> None:
    blocks = gate_blocks_of(256, numbers, 4096)
    assert blocks is not None
    assert (blocks.height, blocks.part) == (128, part)
    assert numbers % part == 0
    assert blocks.clusters(numbers) * TILES <= MULTIPROCESSORS
    assert blocks.clusters(numbers) * blocks.most_gates(numbers) >= numbers


@pytest.mark.parametrize(
    ("num_rows", "numbers", "inputs"),
    [(128, 4096, 4096), (192, 4096, 4096), (204, 4096, 4096), (264, 4096, 4096), (256, 4096, 448)],
)
def test_products_that_the_kernel_is_not_for(num_rows: int, numbers: int, inputs: int) -> None:
    assert gate_blocks_of(num_rows, numbers, inputs) is None
