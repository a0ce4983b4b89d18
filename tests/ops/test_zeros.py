"""Zeros whose memory is taken when it is first written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.native import library
from quire.ops.native.zeros import zeros

pytestmark = pytest.mark.skipif(not library.load(), reason="needs a C++ compiler")

FLOAT = np.dtype("float32")


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("size", [0, 1, 15, 1023, 1024, 1025, 5000, 100_003, 10_000_000])
def test_memory_that_was_used_before_reads_as_zeros(size: int) -> None:
    for _ in range(3):
        jnp.full((size,), 3.0).block_until_ready()  # freed at once: the next array of the size may be in its place
        assert not np.asarray(zeros((size,), FLOAT)).any()


def test_zeros_take_no_memory_until_they_are_written() -> None:
    write = jax.jit(lambda pages, at: pages.at[at].set(1.0), donate_argnums=0)
    num_bytes, shape = 1 << 30, (1 << 10, 1 << 18)
    write(zeros(shape, FLOAT), 0).block_until_ready()  # compiled
    before = resident_bytes()
    pages = zeros(shape, FLOAT)
    written = write(pages, 7)
    written.block_until_ready()
    assert resident_bytes() - before < num_bytes // 8
    assert float(written[7].sum()) == shape[1]
    assert float(written[6].sum()) == float(written[8].sum()) == 0
