"""The GPU's kernels that move pages, against plain jnp bit by bit, interpreted where there is no GPU."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.gpu.capability import GpuCapability
from quire.ops.gpu.kernels import gpu_kernels
from quire.ops.gpu.move_pages import CHUNK_BYTES, GROUP, MOST_ARRAYS, gather, scatter
from quire.ops.kernels import kernels_for
from quire.ops.page_moves import PLAIN_MOVES
from quire.ops.sharding import tensor_mesh

INTERPRET = jax.default_backend() != "gpu"
NUM_PAGES = 7
DTYPES = ["bfloat16", "float32", "int8", "float8_e4m3fn"]
# Arrays, and a page in one of them: less than a chunk, several, and a part of one behind others.
SHAPES = [(1, (3,)), (2, (4, 2, 8)), (GROUP, (8, 2, 256)), (GROUP + 3, (7, 1, 300))]
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_shape = pytest.mark.parametrize(("count", "page"), SHAPES, ids=str)
Bytes = list[np.ndarray[Any, Any]]


def noise(seed: int, *shape: int, dtype: str) -> jax.Array:
    """Any bits, but one NaN alone: XLA makes it of the others of bfloat16 on a CPU."""
    width = jnp.dtype(dtype).itemsize
    bits = np.random.default_rng(seed).integers(0, 256, (*shape, width), np.uint8)
    numbers = bits.view(jnp.dtype(dtype))[..., 0]
    if dtype != "int8":
        with np.errstate(invalid="ignore"):  # for those that would signal
            numbers[np.isnan(numbers)] = np.nan
    return jnp.asarray(numbers)


def arrays_of(count: int, page: tuple[int, ...], dtype: str) -> list[jax.Array]:
    return [noise(at, NUM_PAGES, *page, dtype=dtype) for at in range(count)]


def as_bytes(arrays: list[jax.Array]) -> Bytes:
    return [np.ascontiguousarray(one)[..., None].view(np.uint8) for one in arrays]


def check_alike(found: list[jax.Array], expected: list[jax.Array]) -> None:
    assert [(one.shape, one.dtype) for one in found] == [(one.shape, one.dtype) for one in expected]
    for ours, plain in zip(as_bytes(found), as_bytes(expected), strict=True):
        np.testing.assert_array_equal(ours, plain)


def check_gather(arrays: list[jax.Array], sources: list[int], rows: int, most_arrays: int = MOST_ARRAYS) -> None:
    run = jax.jit(partial(gather, rows=rows, most_arrays=most_arrays, interpret=INTERPRET))
    found = run(arrays, jnp.asarray(sources, jnp.int32))
    assert [one.shape[:2] for one in found] == [(rows, len(arrays))] * (len(sources) // rows)
    check_alike(found, PLAIN_MOVES.gather(arrays, jnp.asarray(sources), rows))
    numbers, blocks = as_bytes(arrays), as_bytes(found)
    for at, source in enumerate(sources):
        np.testing.assert_array_equal(blocks[at // rows][at % rows], [one[source] for one in numbers])


def check_scatter(
    arrays: list[jax.Array], targets: list[int], blocks: list[jax.Array], most_arrays: int = MOST_ARRAYS
) -> None:
    before = as_bytes(arrays)
    expected = PLAIN_MOVES.scatter(arrays, jnp.asarray(targets), blocks)
    run = jax.jit(partial(scatter, most_arrays=most_arrays, interpret=INTERPRET), donate_argnums=0)
    found = run([jnp.array(one) for one in arrays], jnp.asarray(targets, jnp.int32), blocks)
    check_alike(found, expected)
    others = np.setdiff1d(np.arange(NUM_PAGES), [target for target in targets if target])
    for ours, old in zip(as_bytes(found), before, strict=True):
        np.testing.assert_array_equal(ours[others], old[others])


@each_dtype
@each_shape
def test_blocks_have_the_pages_of_all_arrays(count: int, page: tuple[int, ...], dtype: str) -> None:
    check_gather(arrays_of(count, page, dtype), [5, 2, 0, 6, 2, 0], 2)


@each_dtype
@each_shape
def test_pages_of_blocks_are_written_and_no_others(count: int, page: tuple[int, ...], dtype: str) -> None:
    blocks = [noise(100 + at, 2, count, *page, dtype=dtype) for at in range(3)]
    check_scatter(arrays_of(count, page, dtype), [3, 0, 0, 0, 6, 1], blocks)


def test_some_shapes_have_several_chunks_of_which_the_last_is_not_full() -> None:
    """Otherwise the tests above would show less than they seem to."""
    bytes_of = {dtype: [np.prod(page) * jnp.dtype(dtype).itemsize for _, page in SHAPES] for dtype in DTYPES}
    assert max(bytes_of["bfloat16"]) > CHUNK_BYTES
    assert any(size > CHUNK_BYTES and size % CHUNK_BYTES for size in bytes_of["float32"])
    assert any(size >= CHUNK_BYTES and size % CHUNK_BYTES == 0 for size in bytes_of["bfloat16"])


@pytest.mark.parametrize("most_arrays", [4, 9])
def test_more_arrays_than_a_launch_takes(most_arrays: int) -> None:
    arrays = arrays_of(11, (3, 5), "bfloat16")
    check_gather(arrays, [4, 1, 1, 3], 2, most_arrays)
    check_scatter(arrays, [4, 0, 2, 3], [noise(at, 2, 11, 3, 5, dtype="bfloat16") for at in range(2)], most_arrays)


def test_a_block_of_nothing_but_padding_writes_nothing() -> None:
    check_scatter(arrays_of(3, (4, 2), "float32"), [0, 0], [noise(9, 2, 3, 4, 2, dtype="float32")])


def test_gpus_have_kernels_that_move_pages_and_others_have_none() -> None:
    for computes in (None, 7.5, 8.6, 9.0, 12.0):
        assert gpu_kernels(GpuCapability.of(computes)).moves == (gather, scatter)
    assert kernels_for("gpu", "bfloat16", fixed_order=True).moves == (gather, scatter)
    mesh = tensor_mesh(jax.devices()[:1])
    for kernels in (kernels_for("gpu", "bfloat16", mesh), kernels_for("cpu", "float32"), kernels_for("tpu", "float32")):
        assert kernels.moves == PLAIN_MOVES
