"""The GPU's products and the kernels beside them can be translated for a GPU, also where there is none."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from quire.models.context import PlatformOps
from quire.models.formats.channel_weights import channel_like, channel_weight
from quire.models.params import Param, Tensor
from quire.models.parts.feed_forward import ACTIVATIONS
from quire.models.parts.norm import RMSNorm
from quire.models.random_weights import random_weights
from quire.models.registry import build_model
from quire.ops.attention.reference import whole_sequence
from quire.ops.expert_choice import Shares
from quire.ops.gates import ClampedGate, PlainGate
from quire.ops.gpu.adapter_product import add_products
from quire.ops.gpu.capability import GpuCapability
from quire.ops.gpu.expert_product import expert_product
from quire.ops.gpu.kernels import GPU
from quire.ops.kernels import gpu_form, kernels_for
from quire.ops.weights.activation_rounding import Rounding
from quire.ops.weights.adapters import AdapterStack, JoinedStack
from quire.ops.weights.coded import Coded
from quire.ops.weights.floats import PlainWeight
from quire.ops.weights.products import project_sums
from quire.ops.weights.rounded_rows import ProductKernels, ScaledSums, scaled
from tests.gpu.hopper import ON_HOPPER
from tests.models.cases import CASES
from tests.ops.test_gpu_lowering import on_an_h200


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("tokens", "rank"), [(1, 8), (256, 16), (300, 64), (32, 512)])
def test_products_with_adapters_are_translated(dtype: str, tokens: int, rank: int) -> None:
    runs = ((128, 0), (64, 1), (64, 2)) * 2
    stack = AdapterStack(
        jnp.zeros((8, 3, rank, 96), dtype), jnp.zeros((8, rank, 512), dtype), jnp.zeros(8, jnp.int32), runs
    )
    given = jnp.zeros((tokens, 512), dtype), jnp.zeros((tokens, 96), dtype), jnp.zeros(tokens, jnp.int32), stack
    with on_an_h200():
        text = jax.jit(add_products).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count('name = "adapter_shrink"') == text.count('name = "adapter_expand"') == 1
    for work in ("sort", "while", "scatter"):  # of XLA, beside the two kernels
        assert f"stablehlo.{work}" not in text


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tokens", [1, 32, 256, 4096])
@pytest.mark.parametrize("sizes", [(128, 8, 768, 2048), (32, 4, 2880, 2880)], ids=["qwen3-30b-a3b", "gpt-oss-20b"])
def test_products_of_experts_are_translated(sizes: tuple[int, int, int, int], tokens: int, dtype: str) -> None:
    num_experts, chosen, mlp, embed = sizes
    gate = ClampedGate(1.7, 7.0) if mlp == embed else PlainGate(jax.nn.silu)
    x, expert, gate_up, down, bias = (
        jax.ShapeDtypeStruct(shape, kind)
        for shape, kind in (
            ((tokens, 1, embed), dtype),
            ((tokens, chosen), "int32"),
            ((num_experts, 1, 2, mlp, embed), dtype),
            ((num_experts, embed, mlp), dtype),
            ((num_experts, embed), dtype),
        )
    )

    def run(x: jax.Array, expert: jax.Array, gate_up: jax.Array, down: jax.Array, bias: jax.Array) -> jax.Array | None:
        active = expert_product(x, expert, PlainWeight(gate_up), None, gate)
        assert active is not None
        return expert_product(active, expert, PlainWeight(down), bias)

    with on_an_h200():
        text = jax.jit(run).trace(x, expert, gate_up, down, bias).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count('name = "expert_product"') == 2
    for work in ("while", "sort"):  # of XLA, beside the two kernels
        assert f"stablehlo.{work}" not in text
    assert ("stablehlo.scatter" in text) == (tokens > 64)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_norms_of_decodes_add_up_what_experts_give(name: str) -> None:
    """No launch of XLA is between the second product of experts and the norm after it."""
    model = build_model(CASES[name])
    block, weights = model.blocks[0].feed_forward, random_weights(model, seed=0, dtype="bfloat16")["layers"][0]
    ops = PlatformOps(whole_sequence, GPU.decode_norms, experts=GPU.experts)
    norm = RMSNorm("norm", model.hidden_size, 1e-5)

    def run(weights: Any, x: jax.Array, scale: jax.Array) -> Any:
        return norm.bind({"weight": scale}).of_sum(x, block(weights, x, ops), ops.norms)

    x = jnp.zeros((8, model.hidden_size), jnp.bfloat16)
    with on_an_h200():
        traced = jax.jit(run).trace(weights["feed_forward"], x, jnp.zeros(model.hidden_size, jnp.bfloat16))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count('name = "add_visits_norm"') == 1
    assert text.count('name = "expert_product"') == 2
    assert "stablehlo.reduce" not in text


@pytest.mark.parametrize("shares", Shares)
@pytest.mark.parametrize(("num_experts", "chosen"), [(32, 4), (128, 8), (512, 10)])
def test_the_choice_of_experts_is_translated(num_experts: int, chosen: int, shares: Shares) -> None:
    scores, is_real = jax.ShapeDtypeStruct((8, num_experts), "float32"), jax.ShapeDtypeStruct((8,), "bool")
    with on_an_h200():
        traced = jax.jit(GPU.experts.choose, static_argnums=(1, 2)).trace(scores, chosen, shares, is_real)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count('name = "choose_experts"') == 1
    assert "stablehlo.sort" not in text
    assert "top_k" not in text


@pytest.mark.parametrize("kind", ["int8", "fp8", "mxfp4"])
@pytest.mark.parametrize("tokens", [1, 256])
def test_products_of_coded_experts_are_translated(kind: str, tokens: int) -> None:
    shape, group = (32, 1, 2, 2880, 2880), 32 if kind == "mxfp4" else 2880
    codes = {"int8": "int8", "fp8": "float8_e4m3fn", "mxfp4": "uint8"}[kind]
    weight = Coded(
        codes=jax.ShapeDtypeStruct((*shape[:-1], 1440 if kind == "mxfp4" else 2880), codes),
        scales=jax.ShapeDtypeStruct((*shape[:-1], 2880 // group), "uint8" if kind == "mxfp4" else "float32"),
        zeros=None, index=None, input_scale=None, input_zero=None,
        shape=shape, num_contracted=1, is_of_experts=True, bits=4 if kind == "mxfp4" else 8, group=group,
    )  # fmt: skip
    x, expert = jax.ShapeDtypeStruct((tokens, 1, 2880), "bfloat16"), jax.ShapeDtypeStruct((tokens, 4), "int32")
    run = jax.jit(partial(expert_product, gate=PlainGate(jax.nn.silu)))
    with on_an_h200():
        for one in (weight, gpu_form(weight, is_alone=True)):
            text = run.trace(x, expert, one).lower(lowering_platforms=("cuda",)).as_text()
            assert text.count('name = "expert_product"') == 1


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_of_experts_are_translated_or_left_to_xla(activation: str) -> None:
    """The kernel declines the exact gelu, which Triton has no function for."""
    x, expert = jnp.zeros((4, 1, 64), jnp.bfloat16), jnp.zeros((4, 2), jnp.int32)
    run = jax.jit(partial(GPU.experts.product, gate=PlainGate(ACTIVATIONS[activation])))
    with on_an_h200():
        traced = run.trace(x, expert, PlainWeight(jnp.zeros((8, 1, 2, 64, 64), jnp.bfloat16)))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count('name = "expert_product"') == (activation != "gelu")


def test_an_unknown_gate_is_left_to_xla() -> None:
    x, expert = jnp.zeros((4, 1, 64), jnp.bfloat16), jnp.zeros((4, 2), jnp.int32)
    weight = PlainWeight(jnp.zeros((8, 1, 2, 64, 64), jnp.bfloat16))
    assert GPU.experts.product(x, expert, weight, None, lambda gate, up: jax.lax.erf(gate) * up) is None


@pytest.mark.parametrize(("computes", "has_e4m3"), [(8.0, False), (8.6, False), (8.9, True), (9.0, True), (None, True)])
@pytest.mark.parametrize("code_dtype", ["float8_e4m3fn", "int8"])
def test_kernels_have_e4m3_where_the_gpu_converts_it(code_dtype: str, computes: float | None, has_e4m3: bool) -> None:
    kernels, code = kernels_for("gpu", "bfloat16", gpu=GpuCapability.of(computes)), jnp.dtype(code_dtype)
    x, expert, weight = jnp.zeros((64, 96), jnp.bfloat16), jnp.zeros((64, 2), jnp.int32), jnp.zeros(96, jnp.bfloat16)
    matrices = Coded(
        codes=jnp.zeros((8, 64, 96), code), scales=jnp.ones((8, 64, 1)), zeros=None, index=None, input_scale=None,
        input_zero=None, shape=(8, 64, 96), num_contracted=1, is_of_experts=True, bits=8, group=96,
    )  # fmt: skip

    def run(x: jax.Array) -> Any:
        products = kernels.products
        made = [products.rows(x, code), products.gate(jax.nn.silu, jnp.stack([x, x], axis=1)[:, None], code)]
        made.append(products.add_rms(x, x, weight, 1e-5, 0.0, code)[1])
        return [(one.codes, one.scales) for one in made], kernels.experts.total(x[:, None], expert, None, matrices)

    with on_an_h200():
        text = jax.jit(run).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    count = int(has_e4m3 or code_dtype == "int8")
    for name in ("round_rows", "gate_round", "add_norm_round", "expert_product"):
        assert text.count(f'name = "{name}"') == count


@pytest.mark.parametrize("code_dtype", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("sums", ["bfloat16", "float32", "int32"])
@pytest.mark.parametrize("size", [576, 4096, 14336, 53248])
def test_rows_that_are_rounded_where_they_are_made_are_translated(size: int, sums: str, code_dtype: str) -> None:
    """One kernel each, and nothing beside it: values that are not read are left out."""
    rows, columns, bfloat16 = jnp.ones((64, 1)), jnp.ones(2 * size), jnp.dtype("bfloat16")
    both = ScaledSums(jnp.zeros((64, 1, 2, size), sums), rows, columns, bfloat16)
    out = ScaledSums(jnp.zeros((64, size), sums), rows, columns[:size], bfloat16)
    x, weight, code = jnp.zeros((64, size), bfloat16), jnp.zeros(size, bfloat16), jnp.dtype(code_dtype)

    def run(x: jax.Array, both: ScaledSums, out: ScaledSums) -> Any:
        gated = GPU.products.gate(jax.nn.silu, both, code)
        total, normal = GPU.products.add_rms(x, out, weight, 1e-5, 0.0, code)
        _, alone = GPU.products.add_rms(x, None, weight, 1e-5, 0.0, code)
        return total, [(made.codes, made.scales) for made in (gated, normal, alone, GPU.products.rows(total, code))]

    with on_an_h200():
        text = jax.jit(run).trace(x, both, out).lower(lowering_platforms=("cuda",)).as_text()
    names = {"gate_round": 1, "add_norm_round": 2, "round_rows": 1}
    assert {name: text.count(f'name = "{name}"') for name in names} == names


@pytest.mark.parametrize("size", [576, 40000])
def test_the_largest_number_of_a_row_is_found_among_integers(size: int) -> None:
    """Triton's maximum of floats drops NaN, which interpreting a kernel does not show."""
    x, code, ops = jnp.zeros((2, size), jnp.bfloat16), jnp.dtype("int8"), GPU.products

    def run(x: jax.Array) -> Any:
        both = jnp.stack([x, x], axis=1)[:, None]
        return ops.rows(x, code), ops.add_rms(x, None, x[0], 1e-5, 0.0, code), ops.gate(jax.nn.silu, both, code)

    text = str(jax.make_jaxpr(run)(x))
    assert re.findall(r":(\w+)\[\] = reduce_max", text) == ["i32"] * 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("tokens", "rank", "slots"), [(1, 8, 8), (32, 16, 8), (300, 64, 4), (32, 16, 20)])
def test_adapters_below_a_weight_are_one_launch(dtype: str, gated: bool, tokens: int, rank: int, slots: int) -> None:
    b = jnp.zeros((slots, rank, 512), dtype)
    runs = ((256, 0), (256, 1)) if gated else ((128, 0), (64, 1), (64, 2)) * 2
    stack = JoinedStack(None, b, jnp.zeros(slots, jnp.int32), runs, (512, 96))
    wide = jnp.zeros((tokens, 512 + slots * stack.parts * rank), dtype)
    with on_an_h200():
        run = jax.jit(partial(add_products, gated=gated))
        text = run.trace(wide, wide, jnp.zeros(tokens, jnp.int32), stack).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call") == text.count('name = "adapter_expand_joined"') == 1
    for work in ("slice", "add ", "while"):  # of XLA
        assert f"stablehlo.{work}" not in text


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(64, 128), (4, 1, 2, 16, 128)], ids=["matrix", "experts"])
def test_products_with_the_codes_of_checkpoints_are_translated(bits: int, shape: tuple[int, ...]) -> None:
    """There is no kernel for them: XLA widens and multiplies."""
    weight = Coded(
        codes=jnp.zeros((*shape[:-1], 64), jnp.uint8) if bits == 4 else jnp.zeros(shape, jnp.float8_e4m3fn),
        scales=jnp.ones((*shape[:-1], 4), jnp.float16), zeros=None, index=None, input_scale=None, input_zero=None,
        shape=shape, num_contracted=1, is_of_experts=len(shape) > 2, bits=bits, group=32,
        rounding=Rounding(is_float=True, group=32) if bits == 8 else None,
    )  # fmt: skip

    def product(x: jax.Array, weight: Coded) -> jax.Array:
        if len(shape) == 2:
            return weight.product(x)
        return weight.grouped_product(x, jnp.asarray([3, 0, 2, 3]))

    traced = jax.jit(product).trace(jnp.zeros((8, 128), jnp.bfloat16), weight)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "bf16" in text
    assert "quire_coded_product" not in text


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("rows", [8, 64])
def test_codes_reach_the_compiler_as_they_are(kind: Any, rows: int) -> None:
    """Of few rows the codes are widened, with nothing else between them and the product; else both sides are codes."""
    param = Param((96, 128), ("mlp", "embed"), (), join=lambda tensors: tensors[0], num_contracted=1)
    weight = channel_weight(jnp.ones((96, 128), jnp.bfloat16), param, kind).direct()
    traced = jax.jit(lambda x, weight: weight.product(x)).trace(jnp.zeros((rows, 128), jnp.bfloat16), weight)
    lines = traced.lower(lowering_platforms=("cuda",)).as_text().splitlines()
    (product,) = [line for line in lines if "dot_general" in line]
    code, sums = ("f8E4M3FN", "f32") if kind == "fp8" else ("i8", "i32")
    pair = (code, code, sums) if rows > 32 else ("bf16", "bf16", "f32")
    assert f"(tensor<{rows}x128x{pair[0]}>, tensor<96x128x{pair[1]}>) -> tensor<{rows}x96x{pair[2]}>" in product
    assert sum("96x128x" in line and "convert" in line for line in lines) == (rows <= 32)


@pytest.mark.parametrize(("rows", "num_kernels"), [(8, 1), (12, 0), (16, 1), (64, 1), (128, 0)])
def test_few_rows_meet_e4m3_in_a_kernel_on_hopper(rows: int, num_kernels: int) -> None:
    """As they are, or as codes. Nowhere else; nor where answers are reproducible, as more rows have other products."""
    param = Param((4096, 4096), ("mlp", "embed"), (Tensor("matrix", (4096, 4096)),), num_contracted=1)
    weight = channel_like(param, "fp8").direct()

    def sums(products: ProductKernels, x: jax.Array, weight: Coded) -> jax.Array:
        return scaled(project_sums("td,md->tm", x, weight, None, products))

    x = jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16)
    for computes, fixed_order in ((9.0, False), (9.0, True), (8.9, False), (10.0, False), (None, False)):
        kernels = kernels_for("gpu", "bfloat16", gpu=GpuCapability.of(computes), fixed_order=fixed_order)
        with on_an_h200():
            text = (
                jax.jit(partial(sums, kernels.products)).trace(x, weight).lower(lowering_platforms=("cuda",)).as_text()
            )
        has_kernel = (ON_HOPPER.mosaic if rows < 16 else ON_HOPPER.code_product) and computes == 9.0 and not fixed_order
        assert text.count("stablehlo.custom_call @mosaic_gpu") == num_kernels * has_kernel


@pytest.mark.skipif(not ON_HOPPER.mosaic, reason="this JAX has other kernels for it")
@pytest.mark.parametrize("rows", [16, 24, 64])
@pytest.mark.parametrize(("embed", "mlp"), [(4096, 14336), (2048, 8192)])
def test_gates_of_few_rows_are_rounded_where_they_are_multiplied(embed: int, mlp: int, rows: int) -> None:
    """And the product that takes them scales what it adds: two launches, and nothing of XLA."""
    from quire.ops.gpu.hopper.code_product import code_product
    from quire.ops.gpu.hopper.gated_codes import gated_codes

    x, gate_up, down = (
        jax.ShapeDtypeStruct(shape, "float8_e4m3fn") for shape in ((rows, embed), (2 * mlp, embed), (embed, mlp))
    )
    of_rows, of_columns = jax.ShapeDtypeStruct((rows, 1), "float32"), jax.ShapeDtypeStruct((2 * mlp,), "float32")

    def run(x: jax.Array, of_rows: jax.Array, gate_up: jax.Array, of_columns: jax.Array, down: jax.Array) -> jax.Array:
        codes, scales = gated_codes(x, of_rows, gate_up, of_columns, jnp.bfloat16)
        return code_product(codes, down, jnp.bfloat16, scales)

    with on_an_h200():
        traced = jax.jit(run).trace(x, of_rows, gate_up, of_columns, down)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2
    for work in ("convert", "transpose", "multiply"):  # of XLA
        assert f"stablehlo.{work}" not in text


@pytest.mark.skipif(not ON_HOPPER.mosaic, reason="this JAX has other kernels for it")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("rows", "num_kernels"), [(1, 1), (8, 1), (16, 1), (64, 1), (65, 0), (12, 0)])
def test_few_rows_meet_four_bits_in_a_kernel_on_hopper(rows: int, num_kernels: int, group: int, has_bias: bool) -> None:
    """And nowhere else; nor where answers are reproducible, as more rows have other products."""
    groups = jax.ShapeDtypeStruct((4096, 4096 // group), jnp.float16)
    coded = Coded(
        codes=jax.ShapeDtypeStruct((4096, 2048), jnp.uint8), scales=groups, zeros=None, index=None, input_scale=None,
        input_zero=None, shape=(4096, 4096), num_contracted=1, is_of_experts=False, bits=4, group=group,
    )  # fmt: skip
    weight, x = gpu_form(coded, is_alone=True), jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((4096,), jnp.bfloat16) if has_bias else None

    def sums(products: ProductKernels, x: jax.Array, weight: Any, bias: jax.Array | None) -> jax.Array:
        return scaled(project_sums("td,md->tm", x, weight, bias, products))

    for computes, fixed_order in ((9.0, False), (9.0, True), (8.9, False), (10.0, False), (None, False)):
        kernels = kernels_for("gpu", "bfloat16", gpu=GpuCapability.of(computes), fixed_order=fixed_order)
        with on_an_h200():
            traced = jax.jit(partial(sums, kernels.products)).trace(x, weight, bias)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        # Of more than 16 rows all threads share the scales of a step.
        has_kernel = computes == 9.0 and not fixed_order and (rows <= 16 or group > 32)
        assert text.count("stablehlo.custom_call @mosaic_gpu") == num_kernels * has_kernel
        assert text.count('name = "four_bit_product"') == (rows <= 64 and not num_kernels * has_kernel)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(("rows", "group"), [(1, 128), (32, 32), (64, 64)])
def test_four_bit_products_of_few_rows_are_translated(rows: int, group: int, has_zeros: bool, dtype: str) -> None:
    outputs, inputs = 4096, 4096
    scales = jnp.zeros((outputs, inputs // group), dtype)
    weight = Coded(
        codes=jnp.zeros((outputs, inputs // 2), jnp.uint8),
        scales=scales, zeros=scales.astype(jnp.int8) if has_zeros else None,
        index=None, input_scale=None, input_zero=None, shape=(outputs, inputs), num_contracted=1,
        is_of_experts=False, bits=4, group=group,
    )  # fmt: skip
    run = jax.jit(lambda x, weight: weight.product(x))
    for is_alone in (True, False):
        with on_an_h200():
            traced = run.trace(jnp.zeros((rows, inputs), dtype), gpu_form(weight, is_alone=is_alone))
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("stablehlo.custom_call") == is_alone
