"""The recurrence of a step's tokens, in any cut and beside any others, against the definition token by token."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.gpu.recurrence import recur_single
from quire.ops.native import library
from quire.ops.native import recurrence as native
from quire.ops.pages import TILE, Tiles
from quire.ops.recurrence import PLAIN, Recurrence, RecurrentKernels, RecurrentOps, recur_in_tiles, recur_one_by_one
from quire.ops.slot_access import slot_access

Array = np.ndarray[Any, Any]

TOKENS, TILES = 112, 9
SLOTS, HEADS, GROUP, KEYS, VALUES, TAPS, CHANNELS = 5, 2, 3, 8, 12, 4, 7
interpreted = partial(recur_single, interpret=jax.default_backend() != "gpu")
KERNELS: dict[str, RecurrentKernels] = {
    "plain": PLAIN,
    "gpu": PLAIN._replace(recur=partial(recur_in_tiles, recur_single=interpreted)),
}
if library.load():
    KERNELS["native"] = native.NATIVE
# The lengths of the chunks of some steps: singles first, by slot.
STEPS = [{0: 70, 1: 3}, {1: 1, 3: 1, 0: 5, 2: 33}, {0: 1, 1: 1, 2: 1, 3: 1}, {2: 1, 3: 64, 4: 2, 0: 40}]


def drawn(count: int, seed: int) -> Recurrence:
    """Keys have the length one, as those of the delta rule do; some repeat, which makes corrections matter."""
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((count, HEADS, KEYS))
    k[count // 3 : count // 2] = k[count // 3]
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    arrays = (
        rng.standard_normal((count, HEADS, KEYS)),
        k,
        rng.standard_normal((count, HEADS, GROUP, VALUES)),
        -rng.exponential(0.3, (count, HEADS, GROUP)),
        rng.uniform(0.05, 1, (count, HEADS, GROUP)),
    )
    return Recurrence(*(array.astype(np.float32) for array in arrays))


SEQUENCES = [drawn(130, seed) for seed in range(SLOTS)]


def places_of(chunks: dict[int, tuple[int, int]]) -> tuple[Array, Array, Tiles]:
    """Slots, positions and tiles of chunks (start, length) by slot, those of one token first, then padding.

    All steps have the same shape. Tiles of prompts stand in no order.
    """
    used = sum(length for _, length in chunks.values())
    slots = [slot for slot, (_, length) in chunks.items() for _ in range(length)] + [SLOTS] * (TOKENS - used)
    positions = [start + at for start, length in chunks.values() for at in range(length)] + [-1] * (TOKENS - used)
    singles = [slot for slot, (_, length) in chunks.items() if length == 1]
    rows, tiles, offset = [(slot, chunks[slot][0], 1, index) for index, slot in enumerate(singles)], [], 0
    for slot, (start, length) in chunks.items():
        if length > 1:
            tiles += [(slot, start + at, min(TILE, length - at), offset + at) for at in range(0, length, TILE)]
        offset += length
    none = (SLOTS, 0, 0, 0)
    rows += [none] * (SLOTS - len(rows))
    columns = np.array([*rows, *reversed(tiles), *[none] * (TILES - len(tiles))], np.int32).T
    tiles_of_step: Any = Tiles(*columns, num_single=SLOTS)
    return np.array(slots, np.int32), np.array(positions, np.int32), tiles_of_step


def joined(arrays: list[Array]) -> Array:
    """With padding that is not a number."""
    used = sum(map(len, arrays))
    return np.concatenate([*arrays, np.full((TOKENS - used, *arrays[0].shape[1:]), np.nan, np.float32)])


def tokens_of(chunks: dict[int, tuple[int, int]]) -> Recurrence:
    def of(field: int) -> Any:
        return joined([SEQUENCES[slot][field][start : start + length] for slot, (start, length) in chunks.items()])

    return Recurrence(*map(of, range(len(Recurrence._fields))))


def steps_of(lengths: list[dict[int, int]]) -> list[dict[int, tuple[int, int]]]:
    """Chunks of each step, each behind those of the steps before."""
    done: dict[int, int] = {}
    steps = []
    for step in lengths:
        steps.append({slot: (done.get(slot, 0), length) for slot, length in step.items()})
        for slot, length in step.items():
            done[slot] = done.get(slot, 0) + length
    return steps


def outputs(kernels: RecurrentKernels, corrects: bool, steps: list[dict[int, tuple[int, int]]]) -> dict[int, Array]:
    """By slot: the outputs of all its tokens, over matrices that begin as NaN."""
    matrices = jnp.full((SLOTS + 1, HEADS, GROUP, KEYS, VALUES), jnp.nan)
    found: dict[int, list[Array]] = {}

    @jax.jit
    def run(tokens: Recurrence, matrices: jax.Array, places: Any) -> tuple[jax.Array, jax.Array]:
        return kernels.recur(corrects, tokens, matrices, slot_access(*places, SLOTS))

    for chunks in steps:
        out, matrices = run(tokens_of(chunks), matrices, places_of(chunks))
        offset = 0
        for slot, (_, length) in chunks.items():
            found.setdefault(slot, []).append(np.asarray(out)[offset : offset + length])
            offset += length
    return {slot: np.concatenate(parts) for slot, parts in found.items()}


@pytest.mark.parametrize("corrects", [True, False])
@pytest.mark.parametrize("name", KERNELS)
def test_tokens_of_ragged_steps_are_those_of_the_recurrence(name: str, corrects: bool) -> None:
    found = outputs(KERNELS[name], corrects, steps_of(STEPS))
    assert sorted(found) == list(range(SLOTS))
    for slot, out in found.items():
        whole = Recurrence(*(array[: len(out)] for array in SEQUENCES[slot]))
        np.testing.assert_allclose(out, recur_one_by_one(corrects, whole), rtol=2e-4, atol=2e-5)


def test_the_recurrence_is_the_one_that_its_words_describe() -> None:
    q, k, v, decay, rate = (np.asarray(array, np.float64) for array in SEQUENCES[0])
    for corrects in (True, False):
        matrix = np.zeros((HEADS, GROUP, KEYS, VALUES))
        expected = []
        for t in range(40):
            matrix *= np.exp(decay[t])[..., None, None]
            known = np.einsum("ki,kgiv->kgv", k[t], matrix) if corrects else 0.0
            matrix += np.einsum("ki,kgv->kgiv", k[t], (v[t] - known) * rate[t][..., None])
            expected.append(np.einsum("ki,kgiv->kgv", q[t], matrix))
        found = recur_one_by_one(corrects, Recurrence(*(array[:40] for array in SEQUENCES[0])))
        np.testing.assert_allclose(found, np.stack(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif("native" not in KERNELS, reason="there is no C++ compiler")
def test_bits_depend_neither_on_the_cut_nor_on_neighbours() -> None:
    expected = outputs(native.NATIVE, True, [{0: (0, 109)}])[0]
    beside = outputs(native.NATIVE, True, steps_of([{0: 70, 1: 3}, {1: 1, 3: 1, 0: 5, 2: 33}, {2: 1, 0: 34}]))[0]
    one_by_one = outputs(native.NATIVE, True, [{0: (at, 1)} for at in range(109)])[0]
    np.testing.assert_array_equal(beside, expected)
    np.testing.assert_array_equal(one_by_one, expected)


@pytest.mark.parametrize("name", KERNELS)
def test_a_neighbour_without_numbers_changes_nothing(name: str) -> None:
    chunks = {1: (0, 1), 0: (0, 40), 2: (0, 7)}
    expected = outputs(KERNELS[name], True, [chunks])
    broken = SEQUENCES[1]
    try:
        SEQUENCES[1] = Recurrence(*(np.full_like(array, np.nan) for array in broken))
        found = outputs(KERNELS[name], True, [chunks])
    finally:
        SEQUENCES[1] = broken
    assert np.isnan(found[1]).all()
    for slot in (0, 2):
        np.testing.assert_array_equal(found[slot], expected[slot])


@pytest.mark.parametrize("name", KERNELS)
def test_the_convolution_continues_over_steps(name: str) -> None:
    ops = RecurrentOps(KERNELS[name])
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((SLOTS, 100, HEADS, CHANNELS)).astype(np.float32)
    weight = jnp.asarray(rng.standard_normal((HEADS, CHANNELS, TAPS)), jnp.float32)
    bias = jnp.asarray(rng.standard_normal((HEADS, CHANNELS)), jnp.float32)
    whole, _ = ops.convolve(jnp.asarray(inputs[0]), weight, bias, None)
    padded = np.pad(inputs[0], ((TAPS - 1, 0), (0, 0), (0, 0)))
    windows = np.stack([padded[at : at + 100] for at in range(TAPS)], axis=-1)
    np.testing.assert_allclose(whole, (windows * np.asarray(weight)).sum(-1) + np.asarray(bias), rtol=1e-5, atol=1e-5)
    right = [np.asarray(ops.convolve(one, weight, bias, None)[0]) for one in jnp.asarray(inputs)]

    @jax.jit
    def step(x: jax.Array, state: jax.Array, places: Any) -> tuple[jax.Array, jax.Array]:
        return ops.kernels.convolve(x, weight, bias, state, slot_access(*places, SLOTS))

    state = jnp.full((SLOTS + 1, TAPS - 1, HEADS, CHANNELS), jnp.nan)
    for chunks in steps_of([{0: 1, 1: 2}, {0: 1, 2: 5}, {0: 1}, {1: 1, 0: 2}, {1: 1, 0: 66}, {0: 1, 1: 40}]):
        parts = [inputs[slot, start : start + length] for slot, (start, length) in chunks.items()]
        out, state = step(joined(parts), state, places_of(chunks))
        offset = 0
        for slot, (start, length) in chunks.items():
            found = np.asarray(out)[offset : offset + length]
            np.testing.assert_allclose(found, right[slot][start : start + length], rtol=1e-5, atol=1e-5)
            offset += length
