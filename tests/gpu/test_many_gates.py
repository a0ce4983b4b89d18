"""Gates of 200 to 256 rows in e4m3 in one launch with their product, against products in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.gpu.hopper import IS_HOPPER
from tests.gpu.test_code_product import HAS_SCALES, codes, product, runs, scales  # noqa: F401

pytestmark = [pytest.mark.gpu, HAS_SCALES]
many_gates = pytest.importorskip("quire.ops.gpu.hopper.many_gates")


SMALL = [(128, 512), (480, 512), (672, 512), (768, 512)]  # numbers and inputs; parts of 128, 96, 112 and 128


def gated(rows: jax.Array, of_rows: jax.Array, matrix: jax.Array, of_columns: jax.Array) -> np.ndarray:
    return np.asarray(many_gates.gated(rows, of_rows, matrix, of_columns, jnp.bfloat16), np.float32)


@pytest.mark.parametrize("num_rows", [200, 208, 256])
@pytest.mark.parametrize("shape", [*SMALL, *[(14336, 4096)] * IS_HOPPER], ids=str)
def test_gates_are_those_of_the_numbers(shape: tuple[int, int], num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, inputs = shape
    if numbers < 1024:  # programs have several parts of the matrix, if it has some
        monkeypatch.setattr(many_gates, "MULTIPROCESSORS", 2)
    rows, matrix = codes((num_rows, inputs), 1), codes((2 * numbers, inputs), 2)
    of_rows, of_columns = scales((num_rows, 1), 3), scales((2 * numbers,), 4)
    gate, up = np.split(product(rows, matrix) * np.asarray(of_rows) * np.asarray(of_columns), 2, axis=1)
    expected = np.asarray(jax.nn.silu(gate) * up)
    off = np.linalg.norm(gated(rows, of_rows, matrix, of_columns) - expected, axis=1)
    # The device keeps 14 bits of a sum: as much as XLA's products of so many rows lose.
    assert (off <= 0.01 * np.linalg.norm(expected, axis=1)).all()


def test_gates_of_rows_do_not_touch_each_other() -> None:
    numbers, inputs = (14336, 4096) if IS_HOPPER else (256, 512)
    rows, matrix = codes((208, inputs), 1), codes((2 * numbers, inputs), 2)
    of_rows, of_columns = scales((208, 1), 3), scales((2 * numbers,), 4)
    alone = gated(rows, of_rows, matrix, of_columns)
    beside = gated(rows.at[5].set(jnp.nan).at[9].set(0), of_rows, matrix, of_columns)
    assert np.isnan(beside[5]).all()
    assert (beside[9] == 0).all()
    others = ~np.isin(np.arange(208), (5, 9))
    np.testing.assert_array_equal(beside[others], alone[others])
