"""Single tokens of recurrent layers by the kernels, at the sizes of models, on a GPU where there is one and interpreted
elsewhere, with fewer heads."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.gpu.recurrence import TILING, Tiling, convolve_single, recur_single
from quire.ops.pages import TILE, Tiles
from quire.ops.recurrence import PLAIN, Recurrence, recur_in_tiles
from quire.ops.slot_access import slot_access
from tests.gpu.test_kernels import INTERPRET
from tests.ops.test_gpu_recurrence import access_of, check_state, drawn, kept

pytestmark = pytest.mark.gpu
# Key heads, groups, sizes of keys and values, whether values are corrected, and channels of a key head.
MODELS = {"qwen3-next": (16, 2, 128, 128, True, 512), "granite-4.0": (1, 128, 128, 64, False, 8448)}
if INTERPRET:
    MODELS = {"qwen3-next": (1, 2, 128, 128, True, 512), "granite-4.0": (1, 3, 128, 64, False, 700)}
SLOTS = 5 if INTERPRET else 40
ROWS = [1, 3] if INTERPRET else [1, 8, 33]
each_model = pytest.mark.parametrize("name", MODELS)


def rows_of(count: int) -> tuple[list[int], list[int]]:
    """Slots in no order, one of whose sequences begins, and padding at the end of more than one."""
    slots = np.random.default_rng(count).permutation(SLOTS)[:count].tolist()
    positions = [7 * row for row in range(1, count + 1)]
    if count > 1:
        slots[-1], positions[-1], positions[0] = SLOTS, -1, 0
    return slots, positions


def run_on(tiling: Tiling, corrects: bool) -> Any:
    """In place, as in a step."""
    return jax.jit(partial(recur_single, corrects, tiling=tiling, interpret=INTERPRET), donate_argnums=1)


@each_model
@pytest.mark.parametrize("rows", ROWS)
def test_matrices_and_outputs_are_those_of_plain_jnp(name: str, rows: int) -> None:
    *shape, corrects, _ = MODELS[name]
    slots, positions = rows_of(rows)
    before = kept(slots, positions, *shape, rows=SLOTS + 1)
    tokens, access = drawn(rows, *shape), access_of(slots, positions, SLOTS)
    expected, right = jax.jit(partial(PLAIN.recur, corrects))(tokens, jnp.asarray(before), access)
    for tiling in {TILING, Tiling(16, 1)}:
        out, matrices = run_on(tiling, corrects)(tokens, jnp.array(before), access.tiles)
        scale = np.abs(np.asarray(expected)).max()
        np.testing.assert_allclose(out, expected, atol=3e-6 * scale)
        check_state(matrices, right, before, slots, positions)


@each_model
def test_bits_are_those_of_a_row_alone(name: str) -> None:
    *shape, corrects, _ = MODELS[name]
    slots, positions = rows_of(ROWS[-1])
    before, run = kept(slots, positions, *shape, rows=SLOTS + 1), run_on(TILING, corrects)
    tokens = drawn(len(slots), *shape)
    out, matrices = run(tokens, jnp.array(before), access_of(slots, positions, SLOTS).tiles)
    for row in (0, 1, len(slots) - 2):
        own = Recurrence(*(array[row : row + 1] for array in tokens))
        alone = access_of(slots[row : row + 1], positions[row : row + 1], SLOTS).tiles
        found, state = run(own, jnp.array(before), alone)
        np.testing.assert_array_equal(found[0], out[row])
        np.testing.assert_array_equal(state[slots[row]], matrices[slots[row]])


@each_model
def test_errors_do_not_add_up_over_many_tokens(name: str) -> None:
    """One row, token by token, against sums in float64."""
    *shape, corrects, _ = MODELS[name]
    count = 4 if INTERPRET else 64
    tokens, matrices, run = drawn(count, *shape), jnp.full((2, *shape), jnp.nan), run_on(TILING, corrects)
    q, k, v, decay, rate = (np.asarray(array, np.float64) for array in tokens)
    right = np.zeros(shape)
    for t in range(count):
        right *= np.exp(decay[t])[..., None, None]
        value = v[t] - np.einsum("ki,kgiv->kgv", k[t], right) if corrects else v[t]
        right += np.einsum("ki,kgv->kgiv", k[t], value * rate[t][..., None])
        own = Recurrence(*(array[t : t + 1] for array in tokens))
        out, matrices = run(own, matrices, access_of([0], [t], 1).tiles)
        expected = np.einsum("ki,kgiv->kgv", q[t], right)
        np.testing.assert_allclose(out[0], expected, atol=1e-5 * np.abs(expected).max())
    assert np.isnan(np.asarray(matrices[1])).all()


@each_model
def test_decodes_beside_a_prompt_are_those_of_plain_jnp(name: str) -> None:
    *shape, corrects, _ = MODELS[name]
    length = 40  # of the prompt, in tiles that stand in no order
    slots = np.array([3, 1, *[0] * length], np.int32)
    positions = np.array([9, 0, *range(length)], np.int32)
    columns = np.array([[3, 9, 1, 0], [1, 0, 1, 1], [0, TILE, length - TILE, 2 + TILE], [0, 0, TILE, 2]], np.int32).T
    tiles: Any = Tiles(*map(jnp.asarray, columns), num_single=2)
    before = jnp.asarray(kept([3], [9], *shape, rows=5))
    given = drawn(len(slots), *shape), before, slot_access(jnp.asarray(slots), jnp.asarray(positions), tiles, 4)
    kernel = partial(recur_single, interpret=INTERPRET)
    out, matrices = jax.jit(partial(recur_in_tiles, corrects, recur_single=kernel))(*given)
    expected, right = jax.jit(partial(recur_in_tiles, corrects))(*given)
    np.testing.assert_allclose(out, expected, atol=3e-6 * np.abs(np.asarray(expected)).max())
    np.testing.assert_allclose(matrices, right, atol=1e-5)


@each_model
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_convolution_is_that_of_plain_jnp(name: str, dtype: str) -> None:
    heads, channels, taps = MODELS[name][0], MODELS[name][-1], 4
    slots, positions = rows_of(ROWS[-1])
    x, weight, bias = (
        jax.random.normal(jax.random.key(seed), shape, dtype)
        for seed, shape in enumerate(((len(slots), heads, channels), (heads, channels, taps), (heads, channels)))
    )
    before = kept(slots, positions, taps - 1, heads, channels, dtype=dtype, rows=SLOTS + 1)
    access = access_of(slots, positions, SLOTS)
    given = x, weight, bias, jnp.asarray(before), access
    out, inputs = jax.jit(partial(convolve_single, interpret=INTERPRET))(*given)
    expected, right = jax.jit(PLAIN.convolve)(*given)
    real = np.asarray(positions) >= 0
    np.testing.assert_allclose(np.asarray(out)[real], np.asarray(expected)[real], atol=1e-5)
    check_state(inputs, right, before, slots, positions)
