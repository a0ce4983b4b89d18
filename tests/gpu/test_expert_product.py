"""The products of experts on GPUs against plain ones, on a GPU where there is one and interpreted elsewhere."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.models.context import PlatformOps
from quire.models.random_weights import random_weights
from quire.models.registry import build_model
from quire.ops.attention.reference import whole_sequence
from quire.ops.gates import ClampedGate, PlainGate
from quire.ops.gpu.add_norm import add_visits_norm
from quire.ops.gpu.expert_product import ExpertBlocks, expert_product, tiles_of
from quire.ops.norms import Norms, add_rms_norm
from quire.ops.weights.activation_rounding import Rounding
from quire.ops.weights.coded import Coded
from quire.ops.weights.deferred import VisitSums
from quire.ops.weights.experts import NONE, Gate, kernels_of
from quire.ops.weights.floats import PlainWeight
from quire.ops.weights.four_bit_experts import FourBitExperts
from quire.ops.weights.rounded_rows import scaled
from tests.gpu.test_kernels import INTERPRET, check, each_dtype
from tests.models.cases import CASES

pytestmark = pytest.mark.gpu
# Tokens, experts, chosen, outputs, inputs.
SIZES = {
    "one token": (1, 16, 4, 96, 128),
    "few tokens, fewer visits than experts": (5, 64, 3, 80, 96),
    "few tokens, more visits than experts": (33, 8, 2, 64, 160),
    "many tokens": (150, 16, 3, 100, 64),
    "many tokens of few experts": (300, 4, 2, 144, 72),
}
GATES: dict[str, Gate | None] = {"none": None, "silu": PlainGate(jax.nn.silu), "clamped": ClampedGate(1.702, 7.0)}
product = jax.jit(partial(expert_product, interpret=INTERPRET), static_argnames=("gate", "blocks"))


def choices(tokens: int, num_experts: int, chosen: int) -> np.ndarray[Any, Any]:
    chance = np.random.default_rng(0)
    return np.stack([chance.permutation(num_experts)[:chosen] for _ in range(tokens)]).astype(np.int32)


def numbers(shape: tuple[int, ...], dtype: str, seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) / shape[-1] ** 0.5, dtype)


def plain(x: jax.Array, expert: Any, weight: jax.Array, bias: jax.Array | None, gate: Gate | None) -> jax.Array:
    """Each visit by itself, in float32."""
    rows = jnp.broadcast_to(x, (*expert.shape, x.shape[-1])).astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        sums = jnp.einsum("tci,tc...i->tc...", rows, weight[expert].astype(jnp.float32))
    sums = sums if bias is None else sums + bias[expert].astype(jnp.float32)
    if gate is None:
        return sums
    halves = (sums[:, :, 0, part].astype(x.dtype).astype(jnp.float32) for part in range(2))
    return gate(*halves).astype(x.dtype)


@each_dtype
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("name", SIZES)
def test_visits_are_multiplied_by_their_experts(name: str, gate: str, dtype: str) -> None:
    tokens, num_experts, chosen, outputs, inputs = SIZES[name]
    expert = choices(tokens, num_experts, chosen)
    is_gated = gate != "none"
    x = numbers((tokens, 1 if is_gated else chosen, inputs), dtype, 1) * 8
    weight = numbers((num_experts, *((1, 2) if is_gated else ()), outputs, inputs), dtype, 2)
    for bias in (None, numbers(weight.shape[:-1], dtype, 3)):
        found = product(x, jnp.asarray(expert), PlainWeight(weight), bias, gate=GATES[gate])
        assert found.dtype == (dtype if is_gated else jnp.float32)
        check(found, plain(x, expert, weight, bias, GATES[gate]), dtype)


@pytest.mark.parametrize("kind", ["float", "fp8", "mxfp4"])
@pytest.mark.parametrize("name", ["one token", "few tokens, fewer visits than experts"])
def test_gates_and_ups_may_be_one_block(name: str, kind: str) -> None:
    """The sums are the same: bits do not depend on it."""
    tokens, num_experts, chosen, outputs, inputs = SIZES[name]
    expert, x = jnp.asarray(choices(tokens, num_experts, chosen)), numbers((tokens, 1, inputs), "bfloat16", 1) * 8
    shape = num_experts, 1, 2, outputs, inputs
    weight = numbers(shape, "bfloat16", 2) if kind == "float" else for_one(coded_weight(kind, shape))
    bias = numbers(shape[:-1], "bfloat16", 3)
    blocks = ExpertBlocks(16, 32, 128 if kind == "mxfp4" else 32, 2, 3, is_of_steps=kind == "mxfp4")
    run = partial(product, x, expert, weight, bias, gate=GATES["clamped"])
    one, two = (run(blocks=blocks._replace(joins_parts=joins)) for joins in (False, True))
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(("tokens", "num_experts", "chosen"), [(8, 32, 4), (8, 128, 8)])
def test_a_lone_row_among_padding_visits_its_experts(tokens: int, num_experts: int, chosen: int) -> None:
    """Tiles are visits here, of which only those of the first token are the first of their expert."""
    expert = np.broadcast_to(choices(1, num_experts, chosen)[::-1], (tokens, chosen))
    x, weight = numbers((tokens, chosen, 64), "float32", 1), numbers((num_experts, 32, 64), "float32", 2)
    check(product(x, jnp.asarray(expert), PlainWeight(weight)), plain(x, expert, weight, None, None), "float32")


@each_dtype
@pytest.mark.parametrize(("tokens", "chosen", "size"), [(3, 8, 2048), (2, 4, 288), (1, 1, 96)])
def test_a_norm_adds_up_what_experts_give(tokens: int, chosen: int, size: int, dtype: str) -> None:
    x, weight = numbers((tokens, size), dtype, 1) * 8, numbers((size,), dtype, 2)
    share = jnp.abs(numbers((tokens, chosen), "float32", 4))
    out = VisitSums(numbers((tokens, chosen, size), "float32", 3) * 8, share, jnp.dtype(dtype))
    found = jax.jit(partial(add_visits_norm, eps=1e-5, offset=0.0, interpret=INTERPRET))(x, out, weight)
    for one, other in zip(found, add_rms_norm(x, scaled(out), weight, 1e-5, 0.0), strict=True):
        check(one, other, dtype)


def coded_weight(kind: str, shape: tuple[int, ...]) -> Coded:
    """Experts [e, ..., inputs] in codes: per output, in groups of inputs, or in four bits."""
    chance, inputs = np.random.default_rng(5), shape[-1]
    group = {"fp8": inputs, "int8": inputs, "fp8 groups": 64, "mxfp4": 32}[kind]
    scales: Any = chance.uniform(0.5, 2.0, (*shape[:-1], -(-inputs // group)))
    if kind == "mxfp4":
        codes: Any = chance.integers(0, 256, (*shape[:-1], inputs // 2), np.uint8)
        scales = chance.integers(118, 126, scales.shape).astype(np.uint8)
    elif kind == "int8":
        codes, scales = chance.integers(-128, 128, shape).astype(np.int8), (scales / 1000).astype(np.float32)
    else:
        codes, scales = jnp.asarray(chance.normal(size=shape), jnp.float8_e4m3fn), (scales / 9).astype(np.float32)
    return Coded(
        codes=jnp.asarray(codes), scales=jnp.asarray(scales), zeros=None, index=None, input_scale=None, input_zero=None,
        shape=shape, num_contracted=1, is_of_experts=True, bits=4 if kind == "mxfp4" else 8, group=group,
        rounding=None if kind == "mxfp4" else Rounding(is_float=kind != "int8"),
    )  # fmt: skip


def for_one(weight: Coded) -> Any:
    """As one GPU has it."""
    return FourBitExperts.of(weight) or weight


def plain_codes(x: jax.Array, expert: Any, weight: Coded) -> Any:
    """The products of all visits, sorted and put back, as on other platforms."""
    flat = expert.reshape(-1)
    order = np.argsort(flat, stable=True)
    rows = jnp.broadcast_to(x, (*expert.shape, x.shape[-1])).reshape(-1, x.shape[-1])
    sizes = jnp.asarray(np.bincount(flat, minlength=weight.shape[0]))
    sums = jax.jit(lambda x, weight: weight.grouped_product(x, sizes))(rows[order], weight)
    return np.asarray(sums)[np.argsort(order)].reshape(*expert.shape, -1)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("kind", ["fp8", "int8", "fp8 groups", "mxfp4"])
def test_codes_are_multiplied_as_on_other_platforms(kind: str, name: str) -> None:
    tokens, num_experts, chosen, outputs, inputs = SIZES[name]
    inputs = -(-inputs // 64) * 64 if kind == "fp8 groups" else -(-inputs // 32) * 32
    expert = choices(tokens, num_experts, chosen)
    x = numbers((tokens, 1, inputs), "bfloat16", 1) * 8
    weight = coded_weight(kind, (num_experts, outputs, inputs))
    check(product(x, jnp.asarray(expert), weight), plain_codes(x, expert, weight), "bfloat16")
    check(product(x, jnp.asarray(expert), for_one(weight)), plain_codes(x, expert, weight), "bfloat16")
    both = coded_weight(kind, (num_experts, 1, 2, outputs, inputs))
    halves = jnp.asarray(plain_codes(x, expert, both)).reshape(tokens, chosen, 2, outputs).astype("bfloat16")
    right = jax.nn.silu(halves[:, :, 0].astype("float32")) * halves[:, :, 1].astype("float32")
    check(product(x, jnp.asarray(expert), both, gate=GATES["silu"]), right, "bfloat16")
    check(product(x, jnp.asarray(expert), for_one(both), gate=GATES["silu"]), right, "bfloat16")


def test_few_rows_meet_codes_as_they_are_and_scales_of_experts_are_kept() -> None:
    expert, x = choices(6, 8, 2), numbers((6, 1, 64), "bfloat16", 1) * 8
    weight = replace(coded_weight("fp8", (8, 32, 64)), is_direct=True)
    check(product(x, jnp.asarray(expert), weight), plain_codes(x, expert, replace(weight, rounding=None)), "bfloat16")
    weight = replace(weight, input_scale=jnp.linspace(0.01, 0.5, 8))
    check(product(x, jnp.asarray(expert), weight), plain_codes(x, expert, weight), "bfloat16")


@pytest.mark.parametrize("tokens", [40, 130])
@pytest.mark.parametrize("expert", [0, 3, 7])
def test_all_rows_may_visit_one_expert_and_the_others_are_not_read(tokens: int, expert: int) -> None:
    weight = jnp.full((8, 64, 96), jnp.nan, jnp.float32).at[expert].set(numbers((64, 96), "float32", 2))
    x, chosen = numbers((tokens, 1, 96), "float32", 1), np.full((tokens, 1), expert)
    check(product(x, jnp.asarray(chosen), PlainWeight(weight)), plain(x, chosen, weight, None, None), "float32")


@pytest.mark.parametrize("tokens", [7, 100])
def test_a_row_does_not_depend_on_its_neighbours(tokens: int) -> None:
    """Neither on where it is, nor on what is beside it, nor on where that goes."""
    expert, weight = choices(tokens, 8, 2), PlainWeight(numbers((8, 64, 96), "float32", 2))
    x = numbers((tokens, 1, 96), "float32", 1)
    turned = np.roll(expert, 1, axis=0)
    turned[1:4] = (turned[1:4] + 1) % 8
    other = jnp.roll(x, 1, axis=0).at[1:4].multiply(jnp.nan)
    one, two = (
        np.asarray(product(*given, weight)) for given in ((x, jnp.asarray(expert)), (other, jnp.asarray(turned)))
    )
    kept = np.r_[0, 4:tokens]
    np.testing.assert_array_equal(two[kept], np.roll(one, 1, axis=0)[kept])


@pytest.mark.parametrize("tokens", [3, 90])
@pytest.mark.parametrize(("name", "at"), [("qwen3_moe", 0), ("gpt_oss", 0), ("llama4", 1)])
def test_a_block_of_experts_gives_what_it_gives_without_the_kernel(name: str, at: int, tokens: int) -> None:
    model = build_model(CASES[name])
    block, weights = model.blocks[at].feed_forward, random_weights(model, seed=0, dtype="bfloat16")["layers"][at]
    x = numbers((tokens, model.hidden_size), "bfloat16", 1) * 8
    run = jax.jit(block, static_argnums=2)
    kernels = kernels_of(partial(expert_product, interpret=INTERPRET))
    later = Norms(add_visits_rms=partial(add_visits_norm, interpret=INTERPRET))
    ways = (kernels, Norms()), (kernels, later), (NONE, Norms())
    one, two, other = (
        run(weights["feed_forward"], x, PlatformOps(whole_sequence, norms, experts=way)) for way, norms in ways
    )
    check(one, other, "bfloat16")
    check(scaled(two), other, "bfloat16")
    assert isinstance(two, VisitSums) == (name != "llama4")  # its shares are factors of inputs


@pytest.mark.parametrize("rows", [16, 128])
@pytest.mark.parametrize(("tokens", "num_experts", "chosen"), [(70, 32, 4), (2500, 128, 8), (300, 4, 4), (65, 128, 1)])
def test_tiles_have_every_visit_once_with_its_expert(rows: int, tokens: int, num_experts: int, chosen: int) -> None:
    expert = choices(tokens, num_experts, chosen)
    expert[:, 0] = np.where(np.isin(expert[:, 1:], 0).any(axis=1), expert[:, 0], 0)  # one expert has many
    order, its_expert, first, end = map(np.asarray, tiles_of(jnp.asarray(expert), num_experts, rows))
    found = []
    for tile, begin in enumerate(first):
        visits = order[begin : min(begin + rows, end[tile])] if begin < end[tile] else []
        assert (expert.reshape(-1)[visits] == its_expert[tile]).all()
        found.extend(visits)
    assert sorted(found) == list(range(tokens * chosen))


def test_weights_of_another_type_are_declined() -> None:
    x, expert = jnp.zeros((1, 1, 64), jnp.bfloat16), jnp.zeros((1, 1), jnp.int32)
    weight = PlainWeight(jnp.zeros((4, 32, 64), jnp.float32))
    assert expert_product(x, expert, weight, interpret=True) is None
