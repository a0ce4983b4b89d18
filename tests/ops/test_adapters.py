"""Products with adapters: every kernel against numpy, and rows that do not depend on those beside them."""

import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.ops.gpu import adapter_product as gpu
from quire.ops.native import adapter_product as native
from quire.ops.native import library
from quire.ops.weights import adapters
from quire.ops.weights.adapters import AdapterProduct, AdapterStack, JoinedStack, runs_of

Array = np.ndarray[Any, Any]

KERNELS: dict[str, AdapterProduct] = {"plain": adapters.add_products}
KERNELS["gpu"] = partial(gpu.add_products, interpret=True)
if library.load():
    KERNELS["native"] = native.add_products

SLOTS = 3
SHAPES = {
    "one tensor": (48, ((96, 0),)),
    "heads of q, k and v": (40, ((32, 0), (16, 1), (16, 2)) * 2),
    "odd sizes": (17, ((5, 0), (9, 1))),
}


def made(name: str, dtype: Any, seed: int, rank: int) -> AdapterStack:
    """Of ranks up to `rank`; the second adapter is of other weights."""
    inputs, runs = SHAPES[name]
    rng = np.random.default_rng(seed)
    ranks = np.array([rank, 0, max(1, rank - 2)], np.int32)
    used = np.arange(rank) < ranks[:, None]
    a = rng.standard_normal((SLOTS, 1 + max(part for _, part in runs), rank, inputs)) * used[:, None, :, None]
    b = rng.standard_normal((SLOTS, rank, sum(length for length, _ in runs))) * used[:, :, None]
    return AdapterStack(jnp.asarray(a, dtype), jnp.asarray(b, dtype), jnp.asarray(ranks), runs)


def joined(weight: Array, stack: AdapterStack) -> JoinedStack:
    """The stack below a weight [outputs, inputs]."""
    both = jnp.concatenate([jnp.asarray(weight, stack.a.dtype), stack.a.reshape(-1, weight.shape[1])])
    return JoinedStack(both, stack.b, stack.ranks, stack.runs, weight.shape)


def expected(out: Array, x: Array, rows: Array, stack: AdapterStack) -> Array:
    a, b = (np.asarray(array, np.float64) for array in (stack.a, stack.b))
    total = out.astype(np.float64)
    for row, adapter in enumerate(rows):
        first = 0
        for length, part in stack.runs if adapter else ():
            small = a[adapter - 1, part] @ x[row].astype(np.float64)
            total[row, first : first + length] += small @ b[adapter - 1, :, first : first + length]
            first += length
    return total


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_products_are_those_of_numpy(kernel: str, name: str, dtype: Any) -> None:
    stack = made(name, dtype, 1, rank=5)
    rng = np.random.default_rng(2)
    rows = np.array([0, 1, 3, 3, 2, 1, 0, 3] * 3 + [1] * 20, np.int32)
    x = rng.standard_normal((len(rows), SHAPES[name][0])).astype(np.float32)
    out = rng.standard_normal((len(rows), stack.b.shape[2])).astype(np.float32)
    got = np.asarray(jax.jit(KERNELS[kernel])(out, x, rows, stack))
    np.testing.assert_allclose(got, expected(out, x, rows, stack), rtol=1e-4, atol=2e-4)
    np.testing.assert_array_equal(got[rows == 0], out[rows == 0])


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_adapters_below_a_weight_are_met_by_its_product(kernel: str, name: str, dtype: Any) -> None:
    rng = np.random.default_rng(2)
    stack = made(name, dtype, 1, rank=5)
    inputs, outputs = SHAPES[name][0], stack.b.shape[2]
    weight = rng.standard_normal((outputs, inputs)).astype(dtype)
    both = joined(weight, stack)
    rows = np.array([0, 1, 3, 3, 2, 1, 0, 3] * 3 + [1] * 20, np.int32)
    x = rng.standard_normal((len(rows), inputs)).astype(np.float32)
    wide = jnp.einsum("ti,oi->to", x, both.both.astype(np.float32), precision="highest")
    out = np.asarray(wide)[:, :outputs]
    got = np.asarray(jax.jit(KERNELS[kernel])(wide, x, rows, both))
    of_bfloat16 = dtype != np.float32 and kernel == "gpu"  # which rounds what meets `b`
    np.testing.assert_allclose(
        got, expected(out, x, rows, stack), rtol=1e-2 if of_bfloat16 else 1e-4, atol=0.4 if of_bfloat16 else 5e-4
    )
    np.testing.assert_array_equal(got[rows == 0], out[rows == 0])


@pytest.mark.parametrize("kernel", ["plain", "gpu"])
@pytest.mark.parametrize("slots", [3, 20])
@pytest.mark.parametrize("tokens", [5, 70])
def test_products_with_adapters_below_a_weight_can_be_gated(kernel: str, slots: int, tokens: int) -> None:
    rng = np.random.default_rng(3)
    runs = ((64, 0), (64, 1))
    a, b = rng.standard_normal((slots, 2, 6, 48)), rng.standard_normal((slots, 6, 128))
    stack = AdapterStack(*(jnp.asarray(one, np.float32) for one in (a, b)), jnp.full(slots, 6), runs)
    both = joined(rng.standard_normal((128, 48)).astype(np.float32), stack)
    rows = np.arange(tokens).astype(np.int32) % (slots + 1)
    rows[64:] = 0  # a tile without adapters
    x = rng.standard_normal((tokens, 48)).astype(np.float32) / 7
    wide = jnp.einsum("ti,oi->to", x, both.both, precision="highest")
    pair = expected(np.asarray(wide)[:, :128], x, rows, stack)
    gates, ups = pair[:, :64], pair[:, 64:]
    got = jax.jit(partial(KERNELS[kernel], gated=True))(wide, x, rows, both)
    np.testing.assert_allclose(np.asarray(got), gates / (1 + np.exp(-gates)) * ups, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", KERNELS)
def test_gated_rows_are_activated_first(kernel: str) -> None:
    stack = made("one tensor", np.float32, 1, rank=4)
    rng = np.random.default_rng(2)
    rows = np.array([1, 0, 3], np.int32)
    both = rng.standard_normal((3, 2, 48)).astype(np.float32)
    out = np.zeros((3, 96), np.float32)
    active = both[:, 0] / (1 + np.exp(-both[:, 0])) * both[:, 1]
    got = jax.jit(partial(KERNELS[kernel], gated=True))(out, both, rows, stack)
    np.testing.assert_allclose(np.asarray(got), expected(out, active, rows, stack), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif("native" not in KERNELS, reason="there is no C++ compiler")
@given(
    data=st.data(), name=st.sampled_from(sorted(SHAPES)), rows=st.lists(st.integers(0, SLOTS), min_size=1, max_size=24)
)
@settings(max_examples=40, deadline=None)
def test_a_row_does_not_depend_on_those_beside_it(data: st.DataObject, name: str, rows: list[int]) -> None:
    stack = made(name, np.float32, 1, rank=6)
    rng = np.random.default_rng(len(rows))
    x = rng.standard_normal((len(rows), SHAPES[name][0])).astype(np.float32)
    out = rng.standard_normal((len(rows), stack.b.shape[2])).astype(np.float32)
    among = np.asarray(native.add_products(jnp.asarray(out), jnp.asarray(x), jnp.asarray(rows, jnp.int32), stack))
    row = data.draw(st.integers(0, len(rows) - 1))
    one = slice(row, row + 1)
    alone = native.add_products(jnp.asarray(out[one]), jnp.asarray(x[one]), jnp.asarray(rows[one], jnp.int32), stack)
    np.testing.assert_array_equal(np.asarray(alone), among[one])


@pytest.mark.skipif("native" not in KERNELS, reason="there is no C++ compiler")
@pytest.mark.parametrize("gated", [False, True])
def test_rows_of_many_adapters_are_what_they_are_alone(gated: bool) -> None:
    """A core takes an adapter at a time where there are several for each, and a part of one where not."""
    rng = np.random.default_rng(5)
    slots, runs = 2 * (os.cpu_count() or 1) + 1, ((600, 0), (56, 1))
    a, b = rng.standard_normal((slots, 2, 6, 40)), rng.standard_normal((slots, 6, 656))
    stack = AdapterStack(*(jnp.asarray(one, ml_dtypes.bfloat16) for one in (a, b)), jnp.full(slots, 6), runs)
    rows = np.arange(2 * slots, dtype=np.int32) % slots + 1
    x = rng.standard_normal((len(rows), 2, 40) if gated else (len(rows), 40)).astype(np.float32)
    out = rng.standard_normal((len(rows), 656)).astype(np.float32)
    run = jax.jit(partial(native.add_products, gated=gated))
    among = np.asarray(run(out, x, rows, stack))
    for row in (0, slots + 1):
        one = slice(row, row + 1)
        np.testing.assert_array_equal(np.asarray(run(out[one], x[one], rows[one], stack))[0], among[row])
    active = x[:, 0] / (1 + np.exp(-x[:, 0])) * x[:, 1] if gated else x
    np.testing.assert_allclose(among, expected(out, active, rows, stack), rtol=1e-4, atol=2e-4)


@pytest.mark.skipif("native" not in KERNELS, reason="there is no C++ compiler")
def test_no_adapter_is_copied_in_a_step() -> None:
    """As of an output projection: one tensor, whose inputs have several axes."""
    stack = AdapterStack(jnp.zeros((2, 1, 4, 3, 3, 8)), jnp.zeros((2, 4, 24)), jnp.full(2, 4), ((24, 0),))
    given = jnp.zeros((5, 24)), jnp.zeros((5, 72)), jnp.zeros(5, jnp.int32), stack
    text = jax.jit(native.add_products, donate_argnums=0).lower(*given).compile().as_text()
    assert "custom-call" in text
    assert "copy(" not in text


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [5, 32])  # six slots are a group; four are
def test_on_gpus_neither_other_rows_nor_the_slot_of_its_adapter_change_a_row(rank: int, dtype: Any) -> None:
    """The other slots have numbers that would spoil a sum that they were part of."""
    slots, inputs, runs = 6, 512, ((64, 0), (32, 1))
    run = jax.jit(KERNELS["gpu"])
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((2, rank, inputs)), rng.standard_normal((rank, 96))
    x = rng.standard_normal((40, inputs)).astype(dtype)
    out = rng.standard_normal((40, 96)).astype(dtype)

    def row_7(slot: int, others: int) -> Array:
        all_a, all_b = np.full((slots, 2, rank, inputs), 1e30), np.full((slots, rank, 96), 1e30)
        all_a[slot], all_b[slot] = a, b
        stack = AdapterStack(jnp.asarray(all_a, dtype), jnp.asarray(all_b, dtype), jnp.full(slots, rank), runs)
        rows = np.full(40, others, np.int32)
        rows[7] = slot + 1
        return np.asarray(run(out, x, rows, stack), np.float32)[7]

    first = row_7(0, others=0)
    assert np.isfinite(first).all()
    assert not np.array_equal(first, out[7].astype(np.float32))
    for slot, others in ((0, 1), (0, 3), (2, 1), (5, 4), (5, 6)):
        np.testing.assert_array_equal(row_7(slot, others), first)


def test_below_a_weight_too_other_slots_do_not_change_a_row() -> None:
    slots, runs, outputs = 6, ((64, 0), (32, 1)), 96
    run = jax.jit(KERNELS["gpu"])
    rng = np.random.default_rng(3)
    b, small = rng.standard_normal((16, outputs)), rng.standard_normal((40, 2 * 16))
    out = rng.standard_normal((40, outputs))

    def row_7(slot: int, others: int) -> Array:
        wide, all_b = np.full((40, outputs + slots * 32), np.inf), np.full((slots, 16, outputs), 1e30)
        wide[:, :outputs], all_b[slot] = out, b
        wide[:, outputs + slot * 32 : outputs + (slot + 1) * 32] = small
        stack = JoinedStack(None, jnp.asarray(all_b, np.float32), jnp.full(slots, 16), runs, (outputs, 512))
        rows = np.full(40, others, np.int32)
        rows[7] = slot + 1
        return np.asarray(run(jnp.asarray(wide, np.float32), jnp.zeros((40, 512)), rows, stack))[7]

    first = row_7(0, others=0)
    assert np.isfinite(first).all()
    for slot, others in ((0, 1), (2, 3), (5, 6)):
        np.testing.assert_array_equal(row_7(slot, others), first)


@pytest.mark.parametrize(("tokens", "slots", "rank"), [(1, 20, 16), (70, 1, 1), (33, 3, 256), (40, 9, 100)])
def test_gpus_take_every_rank_and_number_of_slots(tokens: int, slots: int, rank: int) -> None:
    rng = np.random.default_rng(4)
    runs = ((64, 0), (32, 1), (32, 2))
    a, b = rng.standard_normal((slots, 3, rank, 768)) / 28, rng.standard_normal((slots, rank, 128)) / rank
    stack = AdapterStack(*(jnp.asarray(one, np.float32) for one in (a, b)), jnp.full(slots, rank), runs)
    rows = (np.arange(tokens) * 7 + 1).astype(np.int32) % (slots + 1)
    x, out = (rng.standard_normal((tokens, size)).astype(np.float32) for size in (768, 128))
    got = np.asarray(jax.jit(KERNELS["gpu"])(out, x, rows, stack))
    np.testing.assert_allclose(got, expected(out, x, rows, stack), rtol=1e-4, atol=2e-4)


def test_runs_are_as_long_as_they_can_be() -> None:
    assert runs_of([0, 0, 1, 2, 2, 0]) == ((2, 0), (1, 1), (2, 2), (1, 0))
