"""The cuts of the kernels compared with sorts in numpy, and with XLA. The GPU's is interpreted where there is none."""

from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.executor.sample.filters import filtered
from quire.executor.slots import MIN_P, TOP_P, TYPICAL_P
from quire.ops.gpu.filter_cuts import Tiling, filter_cuts
from quire.ops.native import library
from quire.ops.native import sampling as native
from quire.request import SamplingParams
from tests.executor.sampling_reference import kept, possibly_kept
from tests.executor.test_filters import VOCAB, params, rows_of_logits

Array = np.ndarray[Any, Any]
INTERPRET = jax.default_backend() != "gpu"
small = Tiling(64, 2, 4)  # so that a small vocabulary has many blocks
BY_KERNEL = {
    "gpu": jax.jit(partial(filtered, cuts=partial(filter_cuts, tiling=small, interpret=INTERPRET))),
    "native": jax.jit(partial(filtered, cuts=native.filter_cuts)),
}
cut_by_xla = jax.jit(filtered)
needs_library = pytest.mark.skipif(
    jax.default_backend() != "cpu" or not library.load(), reason="not a CPU, or there is no C++ compiler"
)
by_each_kernel = pytest.mark.parametrize("kernel", ["gpu", pytest.param("native", marks=needs_library)])


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


@by_each_kernel
@given(logits=rows_of_logits(), params=params)
@example(np.zeros(VOCAB, np.float32), SamplingParams(top_k=1, top_p=0.01, typical_p=0.01))
@example(np.asarray([0.0] + [-1e-42] * 3 + [-np.inf] * (VOCAB - 4), np.float32), SamplingParams(top_k=2))
def test_a_row_keeps_exactly_what_sorting_keeps(kernel: str, logits: Array, params: SamplingParams) -> None:
    check(logits[None], [params], cut(BY_KERNEL[kernel], logits[None], [params]))


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


@by_each_kernel
@pytest.mark.parametrize("size", [300, 1003])
@pytest.mark.parametrize("name", shapes_of_logits(1))
def test_each_row_gets_the_filters_it_asks_for(kernel: str, name: str, size: int) -> None:
    logits = in_every_row(shapes_of_logits(size)[name])
    check(logits, COMBINATIONS, cut(BY_KERNEL[kernel], logits, COMBINATIONS))


@by_each_kernel
def test_neighbouring_floats_are_told_apart(kernel: str) -> None:
    neighbours = (0x3F800000 + np.random.default_rng(0).permutation(299)).astype(np.int32).view(np.float32)
    logits = in_every_row(np.append(-neighbours, np.float32(0)))
    for asked in ({"top_k": 200}, {"top_p": 0.5}, {"top_p": 0.999}, {"top_k": 77, "top_p": 0.7}):
        rows = [SamplingParams(**asked)] * len(logits)  # type: ignore[arg-type]
        check(logits[:1], rows[:1], cut(BY_KERNEL[kernel], logits, rows)[:1])


@by_each_kernel
@pytest.mark.parametrize("middle", [0x1F000000, 0x1F5A5A5A, 0x5F000000, 0x5FA5A5A5])
def test_every_search_ends_in_time(kernel: str, middle: int) -> None:
    """However a range is cut, there are others left in it, near to its middle."""
    away = 2 ** np.arange(29)
    bits = np.concatenate([[0, middle], middle - away, middle + away]).astype(np.int32)
    logits = np.full(300, -np.inf, np.float32)
    logits[: len(bits)] = -bits.view(np.float32)
    asked = [SamplingParams(top_k=row + 1) for row in range(len(bits))]
    rows, padded = in_every_row(logits), [*asked, *COMBINATIONS[len(asked) :]]
    left = np.isfinite(cut(BY_KERNEL[kernel], rows, padded))[: len(asked)]
    assert left.sum(axis=1).tolist() == [row + 1 for row in range(len(asked))]


@by_each_kernel
def test_rows_that_ask_for_nothing_and_padding_come_back_as_they_are(kernel: str) -> None:
    logits = in_every_row(np.linspace(-3, 0, 300))
    for asked in (SamplingParams(), SamplingParams(top_k=300)):
        assert np.array_equal(cut(BY_KERNEL[kernel], logits, [asked] * len(logits)), logits)
    assert np.array_equal(BY_KERNEL[kernel](logits, np.zeros(len(logits), int), np.zeros((len(logits), 7))), logits)


@by_each_kernel
def test_the_kernel_and_xla_cut_alike(kernel: str) -> None:
    logits = from_highest(np.random.default_rng(3).normal(0, 2, (len(COMBINATIONS), 1003)))
    assert np.array_equal(cut(BY_KERNEL[kernel], logits, COMBINATIONS), cut(cut_by_xla, logits, COMBINATIONS))


@by_each_kernel
def test_rows_that_are_not_numbers_come_to_an_end_and_leave_the_others_alone(kernel: str) -> None:
    logits = in_every_row(np.linspace(-3, 0, 300))
    asked = [SamplingParams(top_k=9, top_p=0.9, typical_p=0.9)] * len(logits)
    alone = cut(BY_KERNEL[kernel], logits, asked)
    logits[0], logits[1, 7], logits[2] = np.nan, np.nan, -np.inf
    assert np.array_equal(cut(BY_KERNEL[kernel], logits, asked)[3:], alone[3:])


@by_each_kernel
def test_a_row_is_cut_alone_as_it_is_among_others(kernel: str) -> None:
    logits = np.concatenate([from_highest(row)[None] for row in shapes_of_logits(1003).values()])
    for asked in COMBINATIONS[::7]:
        among = cut(BY_KERNEL[kernel], logits, [asked] * len(logits))
        for row, one in enumerate(logits):
            assert np.array_equal(cut(BY_KERNEL[kernel], one[None], [asked])[0], among[row])


@needs_library
@given(
    size=st.integers(1, 70),
    seed=st.integers(0, 1000),
    digits=st.sampled_from([0, 1, 7]),
    top_k=st.integers(0, 75),
    share=st.sampled_from([1e-30, 1e-6, 0.5, 0.9, 0.9999999, 1.0]),
)
@example(size=1, seed=0, digits=0, top_k=1, share=0.5)
def test_limits_are_numbers_of_the_row(size: int, seed: int, digits: int, top_k: int, share: float) -> None:
    """Whatever the vocabulary's size: each limit is a distance that occurs, and the next smaller one is too small."""
    rng = np.random.default_rng(seed)
    logits = from_highest(np.round(rng.normal(0, 3, size), digits))
    logits[(rng.random(size) < 0.2) & (logits < 0)] = -np.inf
    k = np.asarray([min(top_k or size, size)], np.int32)
    whole, none = np.ones(1, np.float32), np.zeros(1, np.float32)

    def limit(*asked: Array) -> float:
        return -float(np.asarray(native.filter_cuts(jnp.asarray(logits[None]), *map(jnp.asarray, asked))[1])[0])

    away = np.sort(-logits)
    assert limit(k, whole, none, whole) == (away[k[0] - 1] if k[0] < size else np.inf)
    found, weights = (
        limit(np.full(1, size, np.int32), whole * np.float32(share), none, whole),
        np.exp(-away, dtype=float),
    )
    if share == 1:
        assert found == np.inf
        return
    assert found in away
    target = np.float32(share) * weights.sum()
    assert weights[away <= found].sum() >= target * (1 - 1e-6)
    assert weights[away < found].sum() < target * (1 + 1e-6)


@needs_library
@pytest.mark.parametrize("wrong", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [1, 3, 64, 1003])
def test_rows_without_a_number_come_to_an_end(size: int, wrong: float) -> None:
    rows = np.full((3, size), wrong, np.float32)
    rows[1, : size // 2], rows[2, size // 2 :] = 0, -1
    for asked in COMBINATIONS[::5]:
        cut(BY_KERNEL["native"], rows, [asked] * 3)


def check_whole(how: Any, size: int) -> None:
    """Where tokens are as near to a limit as sums of so many are exact, some more or fewer may be left."""
    asked = COMBINATIONS[::5]
    for name, logits in shapes_of_logits(size).items():
        rows = in_every_row(logits)[: len(asked)]
        left = np.isfinite(cut(how, rows, asked))
        expected = np.asarray([kept(row, one) for row, one in zip(rows, asked, strict=True)])
        weights = np.exp(rows[0].astype(np.float64))
        wrong = ((left != expected) * weights).sum(axis=1) / (expected * weights).sum(axis=1)
        assert wrong.max() < 1e-4, (name, asked[wrong.argmax()])


@pytest.mark.gpu
@pytest.mark.parametrize("size", [151936, 128256, 50257])
def test_a_whole_vocabulary_is_cut(size: int) -> None:
    check_whole(jax.jit(partial(filtered, cuts=partial(filter_cuts, interpret=INTERPRET))), size)


@needs_library
def test_a_whole_vocabulary_is_cut_by_the_native_kernel() -> None:
    check_whole(BY_KERNEL["native"], 50257)
