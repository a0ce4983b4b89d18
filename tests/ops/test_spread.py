"""Keys whose runs are turned: nothing changes but what rounding loses."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.attention.spread import MOST, run_of, signs, spread
from quire.ops.pages import coded, spread_for_cache, widened

SIZES = (8, 24, 64, 80, 96, 128, 192, 256)
turned = jax.jit(partial(spread_for_cache, dtype="int8"))
rounded = jax.jit(lambda k: widened(*coded(k, jnp.dtype("int8")), "float32"))


def hadamard(run: int) -> Any:
    """By its definition."""
    matrix = np.ones((1, 1))
    while len(matrix) < run:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(run)


@pytest.mark.parametrize("size", SIZES)
def test_each_run_is_turned_by_hadamards_matrix(size: int) -> None:
    run = run_of(size)
    assert size % run == 0
    assert run <= MOST
    x = np.random.default_rng(0).standard_normal((5, 2, size)).astype(np.float32)
    right = (x.reshape(5, 2, -1, run) @ hadamard(run)).reshape(x.shape)
    np.testing.assert_allclose(jax.jit(spread)(x), right, atol=1e-5)


@pytest.mark.parametrize("run", [8, 16, 32, 64])
def test_kernels_have_the_same_matrix(run: int) -> None:
    matrix = np.asarray(signs(run, "float32"))
    assert len(matrix) >= 16
    np.testing.assert_allclose(matrix / np.sqrt(run), np.kron(np.eye(len(matrix) // run), hadamard(run)), rtol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_products_of_queries_and_keys_stay(size: int) -> None:
    q, k = np.random.default_rng(1).standard_normal((2, 6, size)).astype(np.float32)
    turned_q, turned_k = map(np.asarray, turned(q, k))
    np.testing.assert_allclose(turned_q @ turned_k.T, q @ k.T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_other_pages_get_heads_as_they_are(dtype: str) -> None:
    q, k = jnp.ones((1, 2, 3, 16)), jnp.ones((1, 2, 16))
    found = spread_for_cache(q, k, jnp.dtype(dtype))
    assert found[0] is q
    assert found[1] is k


def test_the_bits_of_a_row_do_not_depend_on_others() -> None:
    x = np.random.default_rng(2).standard_normal((300, 3, 64)).astype(np.float32)
    run = jax.jit(spread)
    among_others = np.asarray(run(x))
    for rows in (slice(0, 1), slice(7, 8), slice(100, 133)):
        np.testing.assert_array_equal(run(x[rows]), among_others[rows])


def test_a_large_feature_no_longer_takes_the_others_their_bits() -> None:
    rng = np.random.default_rng(3)
    q, k = rng.standard_normal((2, 200, 64)).astype(np.float32)
    k[:, 11] *= 40
    q[:, 11] /= 40

    def loss(q: Any, k: Any) -> float:
        return float(np.linalg.norm(np.asarray(q) @ (np.asarray(rounded(k)) - np.asarray(k)).T))

    assert loss(*turned(q, k)) < 0.5 * loss(q, k)
