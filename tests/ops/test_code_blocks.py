"""The blocks of products of few rows in e4m3."""

import pytest

from quire.ops.gpu.code_product import SHARED_BYTES, CodeBlocks, blocks_of


@pytest.mark.parametrize(
    ("num_rows", "outputs", "inputs", "blocks"),
    [
        (16, 4096, 4096, CodeBlocks(64, 1, 512, 5)),
        (64, 6144, 4096, CodeBlocks(64, 1, 512, 3)),
        (16, 28672, 4096, CodeBlocks(128, 2, 256, 3)),  # as many programs as run at once
        (64, 28672, 4096, CodeBlocks(128, 2, 128, 5)),
        (32, 57344, 8192, CodeBlocks(128, 2, 128, 5)),  # more than run at once
        (24, 192, 384, CodeBlocks(64, 1, 128, 3)),
        (16, 64, 256, CodeBlocks(64, 1, 256, 1)),
    ],
)
def test_blocks_suit_the_matrix(num_rows: int, outputs: int, inputs: int, blocks: CodeBlocks) -> None:
    assert blocks_of(num_rows, outputs, inputs) == blocks


@pytest.mark.parametrize("num_rows", range(16, 72, 8))
@pytest.mark.parametrize("outputs", [64, 128, 1024, 6144, 8448, 16896, 28672, 33792, 57344])
@pytest.mark.parametrize("inputs", [384, 2048, 4096, 14336])
def test_blocks_cover_the_matrix_and_fit_the_memory_of_a_program(num_rows: int, outputs: int, inputs: int) -> None:
    blocks = blocks_of(num_rows, outputs, inputs)
    assert blocks is not None
    assert outputs % (blocks.outputs * blocks.groups) == 0
    assert inputs % blocks.inputs == 0
    assert blocks.ahead <= inputs // blocks.inputs
    assert (blocks.outputs * blocks.groups + num_rows) * blocks.inputs * blocks.ahead <= SHARED_BYTES


@pytest.mark.parametrize(
    ("num_rows", "outputs", "inputs"),
    [(8, 4096, 4096), (20, 4096, 4096), (72, 4096, 4096), (16, 96, 4096), (16, 4096, 320)],
)
def test_products_that_the_kernel_is_not_for(num_rows: int, outputs: int, inputs: int) -> None:
    assert blocks_of(num_rows, outputs, inputs) is None
