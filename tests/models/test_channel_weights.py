"""Weights that are quantised while they are loaded, with a scale for each output: fp8 anywhere, int8 on GPUs."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from quire.executor.memory import weight_bytes, weight_sizes
from quire.models.checkpoint import leaves, load_weights, weights_like
from quire.models.formats.channel_weights import channel_weight, is_quantized
from quire.models.params import Param, ParamTree
from quire.models.random_weights import random_weights
from quire.models.registry import build_model
from quire.ops.gpu import rounded_rows as gpu_rows
from quire.ops.weights import coded
from quire.ops.weights.adapters import AdaptedWeight, AdapterStack, add_products
from quire.ops.weights.coded import Coded
from quire.ops.weights.floats import PlainWeight
from quire.ops.weights.products import project_sums
from quire.ops.weights.rounded_rows import CodeProduct, ProductKernels, round_rows
from quire.ops.weights.weight import code_dtype, map_weights
from tests.models.cases import CASES
from tests.models.test_quantized import on_first_device, spread
from tests.models.tiny import NamedTensors, prompt, relative_error, whole_logits

Array = np.ndarray[Any, Any]
MANY = coded.FEW_ROWS + 8  # rows


def is_coded(node: object) -> bool:
    return isinstance(node, Coded)


def dequantized(node: Any) -> Any:
    """Floats in place of codes."""
    if not is_coded(node):
        return node
    scales = np.asarray(node.scales).reshape(*node.scales.shape[:-1], *[1] * node.num_contracted)
    return PlainWeight(jnp.asarray(np.asarray(node.codes).astype(np.float32) * scales), node.num_contracted)


def without_rounding(node: Any) -> Any:
    return replace(node, rounding=None) if is_coded(node) else node


def matrix(outputs: int = 24, inputs: int = 80) -> tuple[Param, Array]:
    param = Param((outputs, inputs), ("mlp", "embed"), (), join=lambda tensors: tensors[0], num_contracted=1)
    return param, np.random.default_rng(0).standard_normal((outputs, inputs), dtype=np.float32)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_outputs_with_numbers_next_to_zero_are_zero_and_never_nan(kind: Any, dtype: str) -> None:
    param, _ = matrix(4, 32)
    weight = np.zeros((4, 32), np.float32)
    weight[:, ::2] = np.array([[1.0], [3e-38], [2e-36], [0.0]], np.float32)
    made = channel_weight(jnp.asarray(weight, dtype), param, kind)
    found = np.asarray(dequantized(made).values)
    assert np.allclose(found, weight, rtol=1e-2, atol=1e-35)


@pytest.mark.parametrize("code", ["float8_e4m3fn", "int8"])
def test_rows_next_to_zero_are_rounded_to_zero_and_never_to_nan(code: str) -> None:
    rows = np.zeros((4, 32), np.float32)
    rows[:, ::2] = np.array([[1.0], [3e-38], [2e-36], [0.0]], np.float32)
    made = round_rows(jnp.asarray(rows), jnp.dtype(code))
    found = np.asarray(made.codes).astype(np.float32) * np.asarray(made.scales)
    assert np.allclose(found, rows, rtol=1e-2, atol=1e-27)


def rows(count: int) -> Array:
    numbers = np.random.default_rng(1).standard_normal((count, 80), dtype=np.float32)
    return numbers * np.exp(np.linspace(-6, 6, count, dtype=np.float32))[:, None]


def plain_codes(numbers: Array, kind: str) -> tuple[Array, Array]:
    """Codes and scales of the rows of a matrix, by numpy."""
    reach = np.abs(numbers).max(1, keepdims=True)
    if kind == "int8":
        scales = reach / np.float32(127)
        return np.rint(numbers / scales), scales
    scales = reach / np.float32(448)
    return (numbers / scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float32), scales


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_a_weight_is_the_nearest_codes_and_the_scale_of_each_output(kind: Any) -> None:
    param, numbers = matrix()
    weight = channel_weight(jnp.asarray(numbers), param, kind)
    codes, scales = plain_codes(numbers, kind)
    np.testing.assert_array_equal(np.asarray(weight.codes).astype(np.float32), codes)
    np.testing.assert_allclose(weight.scales, scales, rtol=1e-6)
    assert weight.codes.dtype == (ml_dtypes.float8_e4m3fn if kind == "fp8" else np.int8)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_codes_are_multiplied_by_codes_where_there_are_many_rows(kind: Any, dtype: str) -> None:
    """As a GPU does it. The sums are those of the dequantised numbers, rows of any size included."""
    param, numbers = matrix()
    weight = channel_weight(jnp.asarray(numbers), param, kind).direct()
    x = jnp.asarray(rows(MANY), dtype)
    wide = np.asarray(weight.codes).astype(np.float32) * np.asarray(weight.scales)
    x_codes, x_scales = weight.rounding.codes(x, None)
    assert x_codes.dtype == weight.codes.dtype
    near = np.asarray(x_codes).astype(np.float32) * np.asarray(x_scales)
    np.testing.assert_allclose(jax.jit(weight.product)(x), near @ wide.T, rtol=1e-4, atol=1e-5 * np.abs(near).max())
    each = np.abs(np.asarray(x, np.float32)).max(1)
    assert (np.abs(near - np.asarray(x, np.float32)).max(1) <= each * (0.036 if kind == "fp8" else 0.004)).all()


def test_few_rows_are_multiplied_as_they_are() -> None:
    param, numbers = matrix()
    weight = channel_weight(jnp.asarray(numbers), param, "fp8").direct()
    x = rows(coded.FEW_ROWS)
    wide = np.asarray(weight.codes).astype(np.float32) * np.asarray(weight.scales)
    exact = x @ wide.T
    np.testing.assert_allclose(weight.product(jnp.asarray(x)), exact, rtol=1e-4, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize("count", [coded.FEW_ROWS, MANY])
def test_a_row_does_not_depend_on_its_neighbours(count: int) -> None:
    param, numbers = matrix()
    product = jax.jit(channel_weight(jnp.asarray(numbers), param, "fp8").direct().product)
    x = rows(count)
    among = np.asarray(product(x))
    others = 1e4 * np.random.default_rng(3).standard_normal(x.shape, dtype=np.float32)
    others[5] = x[5]
    np.testing.assert_array_equal(np.asarray(product(others))[5], among[5])


def test_the_direct_product_is_for_scales_of_outputs_alone() -> None:
    param, numbers = matrix()
    weight = channel_weight(jnp.asarray(numbers), param, "fp8").direct()
    assert weight.widened_bytes == 0
    x = jnp.asarray(rows(MANY))
    cut = replace(weight, scales=jnp.repeat(weight.scales, 5, axis=1), group=16)
    assert cut.widened_bytes > 0
    widened = replace(weight, is_direct=False).product(x)
    for other in (cut, replace(weight, rounding=None)):
        assert spread(np.asarray(other.product(x)), np.asarray(widened)) < 0.05


@pytest.mark.parametrize("name", ["llama-biases", "gpt2", "gemma2", "mixtral", "qwen3_moe"])
def test_every_kind_of_block_computes_with_the_numbers_that_its_codes_stand_for(name: str) -> None:
    model = build_model(CASES[name])
    tokens = prompt(12, model.vocab_size)
    source = NamedTensors(model)
    exact = whole_logits(model, load_weights(model, source, dtype="float32"), tokens)
    weights = load_weights(model, source, dtype="float32", quantize="fp8")
    found = [node for node in jax.tree.leaves(weights, is_leaf=is_coded) if is_coded(node)]
    assert len(found) == sum(map(is_quantized, leaves(model.params())))
    wide = jax.tree.map(dequantized, weights, is_leaf=is_coded)
    unrounded = jax.tree.map(without_rounding, weights, is_leaf=is_coded)
    expected = whole_logits(model, wide, tokens)
    assert relative_error(whole_logits(model, unrounded, tokens), expected) < 1e-4
    assert 0 < spread(expected, exact) < 0.5
    assert 0 < spread(whole_logits(model, weights, tokens), expected) < 0.5
    if any(node.is_of_experts for node in found):  # whose rows are always rounded
        return
    as_on_a_gpu = map_weights(lambda weight: weight.direct(), weights)
    assert relative_error(whole_logits(model, as_on_a_gpu, tokens), expected) < 1e-4


INTERPRETED = ProductKernels(
    partial(gpu_rows.round_rows, interpret=True),
    partial(gpu_rows.add_norm, interpret=True),
    partial(gpu_rows.gate, interpret=True),
)


@pytest.mark.parametrize("name", ["llama", "llama-biases", "gpt2", "gemma2", "cohere2", "olmo2", "granite", "mixtral"])
def test_rows_are_rounded_where_they_are_made(name: str) -> None:
    """By plain functions and by the kernels of a GPU: to the codes that products would make of them."""
    model = build_model(CASES[name])
    tokens = prompt(MANY, model.vocab_size)
    weights = load_weights(model, NamedTensors(model), dtype="float32", quantize="fp8")
    expected = whole_logits(model, jax.tree.map(dequantized, weights, is_leaf=is_coded), tokens)
    as_on_a_gpu = map_weights(lambda weight: weight.direct(), weights)
    plain = whole_logits(model, as_on_a_gpu, tokens)
    assert 0 < spread(plain, expected) < 0.5
    # One number that lies between two codes moves the logits of such small models by much.
    assert spread(whole_logits(model, weights, tokens), plain) < 0.05
    assert spread(whole_logits(model, as_on_a_gpu, tokens, INTERPRETED), plain) < 0.05


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_a_bias_is_added_before_sums_are_rounded(kind: Any) -> None:
    param, numbers = matrix()
    weight = channel_weight(jnp.asarray(numbers, jnp.bfloat16), param, kind).direct()
    x = jnp.asarray(np.random.default_rng(2).standard_normal((MANY, 80)), jnp.bfloat16)
    whole = weight.product(x)
    bias = (-whole[0] * (1 + 2.0**-9)).astype(jnp.float32)  # little of the first row is left
    sums = project_sums("td,md->tm", x, weight, bias, ProductKernels())
    np.testing.assert_array_equal(sums, (whole + bias).astype(jnp.bfloat16))


def test_rows_that_meet_adapters_are_not_rounded_for_a_kernel() -> None:
    param, numbers = matrix()
    weight = channel_weight(jnp.asarray(numbers), param, "fp8").direct()
    kernel = CodeProduct(lambda num_rows, codes, num_contracted: True, lambda *given: given[0])
    stack = AdapterStack(jnp.zeros((1, 1, 4, 80)), jnp.zeros((1, 4, 24)), jnp.zeros(1, jnp.int32), ((24, 0),))
    adapted = AdaptedWeight(weight, stack, jnp.zeros(16, jnp.int32), add_products)
    assert code_dtype({"qkv": weight}, 16, kernel) == weight.codes.dtype
    assert code_dtype({"qkv": adapted}, 16, kernel) is None
    assert code_dtype(adapted, 16, kernel) is None
    assert code_dtype(adapted, MANY, kernel) == weight.codes.dtype


def test_routers_norms_embeddings_and_the_head_stay() -> None:
    model = build_model(CASES["qwen3_moe"])
    left = [param for param in leaves(model.params()) if not is_quantized(param)]
    assert {len(param.shape) for param in left if "router" not in param.sources[0].name} <= {1, 2}
    names = [param.sources[0].name for param in left]
    assert any("gate.weight" in name for name in names)
    assert not any("proj" in name for name in names)
    assert sum("embed" in name or "lm_head" in name for name in names) == 1 + (model.head is not None)


def test_random_weights_are_quantised_as_loaded_ones_are() -> None:
    model = build_model(CASES["llama"])
    exact, rounded = (random_weights(model, seed=1, dtype="float32", quantize=kind) for kind in ("none", "fp8"))
    one = rounded["layers"][0]["feed_forward"]["down"]
    other = jax.tree.leaves(exact["layers"][0]["feed_forward"]["down"])[0]
    np.testing.assert_allclose(one.rows(jnp.arange(4)), other[:4], atol=0.04 * float(jnp.abs(other[:4]).max()))


@pytest.mark.parametrize("case", ["llama", "mixtral"])
def test_sizes_are_known_before_weights_are_read(case: str) -> None:
    model = build_model(CASES[case])
    how: dict[str, Any] = {"dtype": "bfloat16", "quantize": "fp8"}
    weights: ParamTree = load_weights(model, NamedTensors(model), **how, placement=on_first_device)
    like = weights_like(model, None, **how)
    same = jax.tree.map(lambda one, array: (one.shape, one.dtype) == (array.shape, array.dtype), like, weights)
    assert jax.tree.all(same)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    assert held == weight_sizes(model, None, "bfloat16", "fp8", None).num_bytes
    assert held < 0.8 * weight_bytes(model, "bfloat16", "none", None)
