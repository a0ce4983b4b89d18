"""The blocks of products of few rows in e4m3."""

import jax.numpy as jnp
import pytest

from quire.ops.gpu.hopper.code_product import BLOCK, SCALES_APART, SHARED_BYTES, CodeBlocks, blocks_of
from quire.ops.gpu.hopper.gated_codes import SHARED_BYTES as SHARED_BYTES_OF_GATES
from quire.ops.gpu.hopper.gated_codes import GatedBlocks, gated_blocks_of


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


@pytest.mark.parametrize("num_rows", range(16, 72, 8))
@pytest.mark.parametrize("inputs", [2048, 4096, 14336])
def test_scales_of_blocks_have_room(num_rows: int, inputs: int) -> None:
    blocks = blocks_of(num_rows, 4096, inputs, has_scales=True)
    assert blocks is not None
    scale_bytes = 4 * num_rows * blocks.inputs // BLOCK
    assert scale_bytes % SCALES_APART == 0
    assert ((blocks.outputs * blocks.groups + num_rows) * blocks.inputs + scale_bytes) * blocks.ahead <= SHARED_BYTES


def test_scales_that_copies_cannot_begin_at() -> None:
    assert blocks_of(24, 192, 384) is not None
    assert blocks_of(24, 192, 384, has_scales=True) is None


@pytest.mark.parametrize(
    ("num_rows", "numbers", "inputs", "dtype", "blocks"),
    [
        (16, 14336, 4096, "bfloat16", GatedBlocks(256, 3)),
        (32, 14336, 4096, "bfloat16", GatedBlocks(256, 3)),
        (64, 14336, 4096, "bfloat16", GatedBlocks(128, 5)),
        (64, 14336, 4096, "float32", GatedBlocks(128, 4)),
        (16, 128, 384, "bfloat16", GatedBlocks(128, 3)),
        (8, 14336, 4096, "bfloat16", None),
        (20, 14336, 4096, "bfloat16", None),
        (72, 14336, 4096, "bfloat16", None),
        (16, 64, 4096, "bfloat16", None),
        (16, 14336, 320, "bfloat16", None),
    ],
)
def test_blocks_of_gates(num_rows: int, numbers: int, inputs: int, dtype: str, blocks: GatedBlocks | None) -> None:
    assert gated_blocks_of(num_rows, numbers, inputs, dtype) == blocks
    if blocks is not None:
        exchanged = num_rows * BLOCK * jnp.dtype(dtype).itemsize
        assert (2 * BLOCK + num_rows) * blocks.inputs * blocks.ahead + exchanged <= SHARED_BYTES_OF_GATES
