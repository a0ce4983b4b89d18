"""The cuts of a kernel compared with sorts in numpy, and with XLA; interpreted where there is no GPU."""

from functools import partial
from itertools import product
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import example, given

from quire.executor.filters import filtered
from quire.executor.slots import MIN_P, TOP_P, TYPICAL_P
from quire.ops.gpu.filter_cuts import Tiling, filter_cuts
from quire.request import SamplingParams
from tests.executor.sampling_reference import kept, possibly_kept
from tests.executor.test_filters import VOCAB, params, rows_of_logits

Array = np.ndarray[Any, Any]
INTERPRET = jax.default_backend() != "gpu"
small = Tiling(64, 2, 4)  # so that a small vocabulary has many blocks
cut_by_kernel = jax.jit(partial(filtered, cuts=partial(filter_cuts, tiling=small, interpret=INTERPRET)))
cut_by_xla = jax.jit(filtered)


def cut(how: Any, logits: Array, asked: list[SamplingParams]) -> Array:
    numbers = np.zeros((len(asked), 7), np.float32)
    numbers[:, [TOP_P, MIN_P, TYPICAL_P]] = [(row.top_p, row.min_p, row.typical_p) for row in asked]
    return np.asarray(how(logits, np.asarray([row.top_k for row in asked]), numbers))


def check(logits: Array, asked: list[SamplingParams], out: Array) -> None:
    for row, (one, left) in enumerate(zip(asked, np.isfinite(out), strict=True)):
        # What has no chance anyway may stay or go.
        possible = np.exp(logits[row]) > 0
        limits = possibly_kept(logits[row], one)
        assert any(np.array_equal(left & possible, expected & possible) for expected in limits), (row, one)
        assert np.array_equal(out[row][left], logits[row][left])
        assert left.any()


@given(logits=rows_of_logits(), params=params)
@example(np.zeros(VOCAB, np.float32), SamplingParams(top_k=1, top_p=0.01, typical_p=0.01))
@example(np.asarray([0.0] + [-1e-42] * 3 + [-np.inf] * (VOCAB - 4), np.float32), SamplingParams(top_k=2))
def test_a_row_keeps_exactly_what_sorting_keeps(logits: Array, params: SamplingParams) -> None:
    check(logits[None], [params], cut(cut_by_kernel, logits[None], [params]))


def shapes_of_logits(size: int) -> dict[str, Array]:
    rng = np.random.default_rng(size)
    normal = rng.normal(0, 2, size)
    return {
        "random": normal,
        "flat": np.full(size, 3.0),
        "nearly flat": rng.normal(0, 1e-3, size),
        "peaked": normal * 8,
        "tied": np.round(normal),
        "mostly forbidden": np.where(rng.random(size) < 0.9, -np.inf, normal),
        "one token": np.where(np.arange(size) == size - 1, 0.0, -np.inf),
    }


COMBINATIONS = [
    SamplingParams(top_k=k, top_p=p, min_p=m, typical_p=t)
    for k, p, m, t in product([0, 1, 40, 1000], [1.0, 0.9, 0.3], [0.0, 0.05], [1.0, 0.8, 0.2])
]


def from_highest(logits: Array) -> Array:
    return (logits - logits.max(axis=-1, keepdims=True)).astype(np.float32)


def in_every_row(logits: Array) -> Array:
    return np.tile(from_highest(logits), (len(COMBINATIONS), 1))


@pytest.mark.parametrize("size", [300, 1003])
@pytest.mark.parametrize("name", shapes_of_logits(1))
def test_each_row_gets_the_filters_it_asks_for(name: str, size: int) -> None:
    logits = in_every_row(shapes_of_logits(size)[name])
    check(logits, COMBINATIONS, cut(cut_by_kernel, logits, COMBINATIONS))


def test_neighbouring_floats_are_told_apart() -> None:
    neighbours = (0x3F800000 + np.random.default_rng(0).permutation(299)).astype(np.int32).view(np.float32)
    logits = in_every_row(np.append(-neighbours, np.float32(0)))
    for asked in ({"top_k": 200}, {"top_p": 0.5}, {"top_p": 0.999}, {"top_k": 77, "top_p": 0.7}):
        rows = [SamplingParams(**asked)] * len(logits)  # type: ignore[arg-type]
        check(logits[:1], rows[:1], cut(cut_by_kernel, logits, rows)[:1])


@pytest.mark.parametrize("middle", [0x1F000000, 0x1F5A5A5A, 0x5F000000, 0x5FA5A5A5])
def test_every_search_ends_in_time(middle: int) -> None:
    """However a range is cut, there are others left in it, near to its middle."""
    away = 2 ** np.arange(29)
    bits = np.concatenate([[0, middle], middle - away, middle + away]).astype(np.int32)
    logits = np.full(300, -np.inf, np.float32)
    logits[: len(bits)] = -bits.view(np.float32)
    asked = [SamplingParams(top_k=row + 1) for row in range(len(bits))]
    rows, padded = in_every_row(logits), [*asked, *COMBINATIONS[len(asked) :]]
    left = np.isfinite(cut(cut_by_kernel, rows, padded))[: len(asked)]
    assert left.sum(axis=1).tolist() == [row + 1 for row in range(len(asked))]


def test_rows_that_ask_for_nothing_and_padding_come_back_as_they_are() -> None:
    logits = in_every_row(np.linspace(-3, 0, 300))
    for asked in (SamplingParams(), SamplingParams(top_k=300)):
        assert np.array_equal(cut(cut_by_kernel, logits, [asked] * len(logits)), logits)
    assert np.array_equal(cut_by_kernel(logits, np.zeros(len(logits), int), np.zeros((len(logits), 7))), logits)


def test_the_kernel_and_xla_cut_alike() -> None:
    logits = from_highest(np.random.default_rng(3).normal(0, 2, (len(COMBINATIONS), 1003)))
    assert np.array_equal(cut(cut_by_kernel, logits, COMBINATIONS), cut(cut_by_xla, logits, COMBINATIONS))


def test_rows_that_are_not_numbers_come_to_an_end_and_leave_the_others_alone() -> None:
    logits = in_every_row(np.linspace(-3, 0, 300))
    asked = [SamplingParams(top_k=9, top_p=0.9, typical_p=0.9)] * len(logits)
    alone = cut(cut_by_kernel, logits, asked)
    logits[0], logits[1, 7], logits[2] = np.nan, np.nan, -np.inf
    assert np.array_equal(cut(cut_by_kernel, logits, asked)[3:], alone[3:])


@pytest.mark.gpu
@pytest.mark.parametrize("size", [151936, 128256, 50257])
def test_a_whole_vocabulary_is_cut(size: int) -> None:
    """Where tokens are as near to a limit as sums of so many are exact, some more or fewer may be left."""
    asked = COMBINATIONS[::5]
    how = jax.jit(partial(filtered, cuts=partial(filter_cuts, interpret=INTERPRET)))
    for name, logits in shapes_of_logits(size).items():
        rows = in_every_row(logits)[: len(asked)]
        left = np.isfinite(cut(how, rows, asked))
        expected = np.asarray([kept(row, one) for row, one in zip(rows, asked, strict=True)])
        weights = np.exp(rows[0].astype(np.float64))
        wrong = ((left != expected) * weights).sum(axis=1) / (expected * weights).sum(axis=1)
        assert wrong.max() < 1e-4, (name, asked[wrong.argmax()])
