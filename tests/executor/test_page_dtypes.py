"""Pages of every dtype leave an engine, lie in files and enter another one with the bytes that they had."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.executor.host.host_pages import HostPages
from quire.executor.host.stacks import as_bytes, gather_pages
from quire.models.checkpoint import load_weights
from quire.models.registry import build_model
from quire.ops.page_moves import PLAIN_MOVES
from quire.page_folder.page_file import ArrayForm, PageFiles
from tests.executor.conftest import SHAPES, config_of
from tests.executor.rig import NamedTensors, executor_of
from tests.executor.test_host_pages import host_copies
from tests.fake_executor import plan_of

DTYPES = ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2"]


class Coded(NamedTuple):
    """Keys and values in few bits, with scales."""

    keys: Any
    values: Any
    scales: Any


def noise(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    numbers = np.random.default_rng(len(shape)).normal(0, 20, shape)
    return np.clip(numbers, -100, 100).astype(jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_of_any_dtype_with_scales_are_the_same_in_files_and_elsewhere(dtype: str) -> None:
    codes, scales = noise((9, 4, 2, 8), dtype), noise((9, 4, 2), "float32")
    pages = [Coded(jnp.asarray(codes), jnp.asarray(codes[::-1]), jnp.asarray(scales)) for _ in range(2)]
    host = HostPages(pages, 6)
    arrays = [ArrayForm(stack.names, str(stack.dtype), stack.shape) for stack in host.stacks]
    assert sorted(name for one in arrays for name in one.names) == [
        f"{layer}.{name}" for layer in (0, 1) for name in ("keys", "scales", "values")
    ]
    assert {one.dtype for one in arrays} == {dtype, "float32"}
    sources = jnp.array([7, 2, 5, 0])
    data = as_bytes([(3, gather_pages(PLAIN_MOVES, host.stacks, pages, sources))])
    files = PageFiles("0" * 32, 4, host.page_bytes, arrays)
    for place, page in enumerate((3, 1, 4)):
        name = bytes([place]) * 16, 0
        file = b"".join(files.encode(name, data[place * host.page_bytes : (place + 1) * host.page_bytes]))
        host.write_bytes([page], [files.decode(name, memoryview(file))])
    written = host.read([3, 1, 4])
    for stack, found in zip(host.stacks, written, strict=True):
        for at, leaf in enumerate(stack.members):
            expected = np.asarray(jax.tree.leaves(pages)[leaf])[[7, 2, 5]]
            assert found[:, at].tobytes() == expected.tobytes()
    host.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_pages_of_half_the_width_go_from_one_device_to_another(dtype: str) -> None:
    """As between peers: read from the device, written into host memory, copied back by a plan, and read again."""
    model = build_model(config_of("llama", num_hidden_layers=1))
    weights = load_weights(model, NamedTensors(model), dtype=dtype)
    executor = executor_of(model, weights, SHAPES, threads=1, num_host_pages=8)
    filled = jax.tree.map(lambda leaf: jnp.asarray(noise(leaf.shape, dtype)), executor.state.pages)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(filled)} == {dtype}
    executor.state = executor.state._replace(pages=filled)
    data = executor.read_pages([3, 9, 4])()
    size = executor.host_pages.page_bytes
    executor.reset()
    executor.write_host_pages([2, 7, 5], [data[at * size : (at + 1) * size] for at in range(3)])
    executor.submit(plan_of(1, (), copies=host_copies({11: 2, 12: 7, 13: 5}, to_host=False))).result()
    assert executor.read_pages([11, 12, 13])() == data
    assert executor.read_pages([14])() != data[:size]
    executor.close()
