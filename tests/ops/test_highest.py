"""The highest number of each row, by the native kernel, compared with numpy."""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.ops.native import library
from quire.ops.native.sampling import highest

Array = np.ndarray[Any, Any]

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu" or not library.load(), reason="not a CPU, or there is no C++ compiler"
)
find = jax.jit(highest)
# About the numbers of lanes, of a block and of a task.
SIZES = (1, 2, 3, 5, 15, 16, 17, 63, 64, 65, 300, 1023, 1024, 1025, 5000, 16383, 16384, 16385, 32769, 49152)


def check(rows: Array) -> None:
    places, numbers = map(np.asarray, find(rows))
    expected = rows.argmax(axis=1)  # the first NaN, or the first of equals
    assert places.tolist() == expected.tolist()
    assert np.array_equal(numbers, rows[np.arange(len(rows)), expected], equal_nan=True)


@given(
    size=st.sampled_from(SIZES),
    seed=st.integers(0, 1000),
    spread=st.sampled_from([0.0, 0.7, 3.0, 1e37]),
    special=st.lists(st.sampled_from([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0]), max_size=3),
)
@example(size=49152, seed=0, spread=0.0, special=[])
@example(size=16385, seed=1, spread=0.7, special=[np.nan, np.nan])
def test_the_first_of_the_highest_or_a_nan_is_found(size: int, seed: int, spread: float, special: list[float]) -> None:
    """Of whole numbers, among which there are ties, and of others."""
    rng = np.random.default_rng(seed)
    rows = np.round(rng.normal(0, spread, (3, size))).astype(np.float32)
    rows[1] = rng.normal(0, spread, size)
    for number in special:
        rows[rng.integers(3), rng.integers(size)] = number
    check(rows)


@pytest.mark.parametrize("number", [-np.inf, np.inf, np.nan, -np.nan, 0.0, -0.0, np.finfo(np.float32).min, 1e-45])
def test_the_first_of_a_row_that_is_all_alike_is_found(number: float) -> None:
    for size in SIZES:
        check(np.full((2, size), number, np.float32))


@pytest.mark.parametrize("size", [65, 1025, 40_000])
def test_one_number_is_found_wherever_it_is(size: int) -> None:
    places = np.unique(np.linspace(0, size - 1, 300).astype(int))
    for background, number in ((-np.inf, -3e38), (-1.0, 1.0), (np.inf, np.nan)):
        rows = np.full((len(places), size), background, np.float32)
        rows[np.arange(len(places)), places] = number
        check(rows)


def test_a_nan_does_not_hide_behind_a_higher_number_before_it() -> None:
    rows = np.zeros((4, 40_000), np.float32)
    rows[:, 10], rows[:, 17_000], rows[:, 39_999] = np.inf, np.nan, 7
    check(rows)


@given(seed=st.integers(0, 100), first=st.integers(0, 20), count=st.integers(1, 20))
def test_a_row_gives_alone_what_it_gives_among_others(seed: int, first: int, count: int) -> None:
    rows = np.round(np.random.default_rng(seed).normal(0, 2, (40, 300))).astype(np.float32)
    for alone, among in zip(find(rows[first : first + count]), find(rows), strict=True):
        assert np.array_equal(alone, among[first : first + count])


@pytest.mark.parametrize("count", [0, 1, 3, 4, 9])
def test_rows_after_those_that_count_are_not_read(count: int) -> None:
    rows = np.random.default_rng(0).normal(0, 1, (4, 300)).astype(np.float32)
    places, numbers = find(rows, np.int32(count))
    assert places.tolist() == [*rows[:count].argmax(axis=1).tolist(), *[0] * (4 - count)]
    assert numbers.tolist() == [*rows[:count].max(axis=1).tolist(), *[0.0] * (4 - count)]
