"""The GPU's kernels for single tokens of recurrent layers against plain jnp, interpreted where there is no GPU.

Slots that no row has hold NaN, and so do those of sequences that begin.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.gpu.recurrence import Tiling, convolve_single, recur_single
from quire.ops.pages import Tiles
from quire.ops.recurrence import PLAIN, Recurrence
from quire.ops.slot_access import SlotAccess, slot_access

Array = np.ndarray[Any, Any]
INTERPRET = jax.default_backend() != "gpu"
SLOTS = 9
# By row: slots out of order, sequences that begin (position 0), and padding (-1), also between others.
ROWS = ([7, 2, SLOTS, 4, 0, SLOTS], [5, 0, -1, 1, 300, -1])
# Key heads, groups, sizes of keys and values, and the most columns of a program: some sizes are no powers of two.
SIZES = [(2, 2, 16, 16, 16), (3, 1, 16, 32, 8), (1, 5, 12, 16, 16), (1, 3, 8, 20, 16), (2, 1, 24, 7, 32)]
plainly_recur, plainly_convolve = jax.jit(PLAIN.recur, static_argnums=0), jax.jit(PLAIN.convolve)
each_size = pytest.mark.parametrize("sizes", SIZES, ids=str)


def access_of(slots: list[int], positions: list[int], num_slots: int = SLOTS) -> SlotAccess:
    at = jnp.asarray(slots, jnp.int32), jnp.asarray(positions, jnp.int32)
    return slot_access(*at, Tiles.single(*at), num_slots)


def drawn(rows: int, heads: int, group: int, key_dim: int, value_dim: int) -> Recurrence:
    """Keys have the length one."""
    chance = np.random.default_rng(rows + key_dim)
    k = chance.standard_normal((rows, heads, key_dim))
    arrays = (
        chance.standard_normal((rows, heads, key_dim)),
        k / np.linalg.norm(k, axis=-1, keepdims=True),
        chance.standard_normal((rows, heads, group, value_dim)),
        -chance.exponential(0.3, (rows, heads, group)),
        chance.uniform(0.05, 1, (rows, heads, group)),
    )
    return Recurrence(*(jnp.asarray(array, jnp.float32) for array in arrays))


def kept(slots: list[int], positions: list[int], *shape: int, dtype: Any = jnp.float32, rows: int = SLOTS + 1) -> Array:
    """The state of all slots; NaN where nothing is to be read."""
    state = np.random.default_rng(1).standard_normal((rows, *shape)).astype(np.float32)
    read = [slot for slot, position in zip(slots, positions, strict=True) if position > 0]
    state[np.setdiff1d(np.arange(rows), read)] = np.nan
    return np.asarray(jnp.asarray(state, dtype))


def check_state(found: Any, expected: Any, before: Array, slots: list[int], positions: list[int]) -> None:
    """Near the expected one where a row has a token; elsewhere as it was, bit by bit."""
    written = [slot for slot, position in zip(slots, positions, strict=True) if position >= 0]
    others = np.setdiff1d(np.arange(len(before)), written)
    found, expected = np.asarray(found), np.asarray(expected)
    np.testing.assert_allclose(found[written].astype(np.float32), expected[written].astype(np.float32), atol=1e-5)
    np.testing.assert_array_equal(found[others].view(np.uint8), before[others].view(np.uint8))


@each_size
@pytest.mark.parametrize("corrects", [True, False])
def test_a_token_of_each_row_changes_the_matrices_of_its_slot(sizes: tuple[int, ...], corrects: bool) -> None:
    slots, positions = ROWS
    *shape, block = sizes
    tokens, before, access = drawn(len(slots), *shape), kept(slots, positions, *shape), access_of(slots, positions)
    run = partial(recur_single, corrects, tiling=Tiling(block, 1), interpret=INTERPRET)
    out, matrices = jax.jit(run)(tokens, jnp.asarray(before), access.tiles)
    expected, right = plainly_recur(corrects, tokens, jnp.asarray(before), access)
    np.testing.assert_allclose(out, expected, atol=1e-5)  # padding becomes zero in both
    check_state(matrices, right, before, slots, positions)


@pytest.mark.parametrize("corrects", [True, False])
def test_bits_depend_neither_on_neighbours_nor_on_their_number(corrects: bool) -> None:
    (slots, positions), (*shape, block) = ROWS, SIZES[3]
    tokens, before = drawn(len(slots), *shape), jnp.asarray(kept(slots, positions, *shape))
    run = jax.jit(partial(recur_single, corrects, tiling=Tiling(block, 1), interpret=INTERPRET))
    out, matrices = run(tokens, before, access_of(slots, positions).tiles)
    for row, slot in enumerate(slots):
        if slot < SLOTS:
            own = Recurrence(*(array[row : row + 1] for array in tokens))
            alone, state = run(own, before, access_of([slot], positions[row : row + 1]).tiles)
            np.testing.assert_array_equal(alone[0], out[row])
            np.testing.assert_array_equal(state[slot], matrices[slot])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("heads", "channels", "taps", "has_bias"), [(2, 16, 4, False), (1, 21, 2, True)])
def test_the_convolution_of_single_tokens_keeps_their_inputs(
    heads: int, channels: int, taps: int, has_bias: bool, dtype: str
) -> None:
    slots, positions = ROWS
    chance = np.random.default_rng(2)
    x, weight, bias = (
        jnp.asarray(chance.standard_normal(shape), dtype)
        for shape in ((len(slots), heads, channels), (heads, channels, taps), (heads, channels))
    )
    before, access = kept(slots, positions, taps - 1, heads, channels, dtype=dtype), access_of(slots, positions)
    given = x, weight, bias if has_bias else None, jnp.asarray(before), access
    out, inputs = jax.jit(partial(convolve_single, interpret=INTERPRET))(*given)
    expected, right = plainly_convolve(*given)
    real = np.asarray(positions) >= 0
    np.testing.assert_allclose(np.asarray(out)[real], np.asarray(expected)[real], atol=1e-5)
    assert not np.asarray(out)[~real].any()
    check_state(inputs, right, before, slots, positions)
