"""Products of few rows with what follows them can be translated for a GPU, also where there is none."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from quire.ops.attention_spec import AttentionSpec
from quire.ops.coded import Coded
from quire.ops.few_rows import PartedRows, PendingProduct
from quire.ops.four_bits import FourBits
from quire.ops.gpu.hopper_products import FEW_ROWS
from quire.ops.gpu.kernels import attend_on_hopper
from quire.ops.gpu.mosaic import HAS_MOSAIC
from quire.ops.pages import Tiles
from quire.ops.rounded_rows import values
from tests.ops.test_gpu_lowering import on_an_h200

if not HAS_MOSAIC:
    pytest.skip("this JAX has other kernels for it", allow_module_level=True)

from quire.ops.gpu import few_rows


@pytest.mark.parametrize("rows", [1, 3, 8, 16, 64])
@pytest.mark.parametrize("code", ["int4", "float8_e4m3fn", "int8"])
def test_a_layer_of_few_rows_has_a_launch_for_each_product(code: str, rows: int) -> None:
    """Norms, the gate and what is added are in them."""
    sizes = ((512, 1024), (1024, 512), (1536, 1024), (1024, 768))  # qkv, out, gates and ups, down
    weights = [weight_like(code, *shape) for shape in sizes]
    x, weight, squares = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((rows, 1024), "bfloat16"), ((1024,), "bfloat16"), ((64, rows), "float32"))
    )
    is_for = code == "int4" or rows <= 16
    for index, one in enumerate(weights):
        assert few_rows.fits(rows, jnp.bfloat16, one, is_gated=index == 2) == is_for
    if not is_for:
        return

    def layer(x: jax.Array, normal: jax.Array, squares: jax.Array, norm: jax.Array, weights: list[Any]) -> Any:
        qkv, out, gate_up, down = weights
        rows = few_rows.sums(normal, qkv, x.dtype, few_rows.RowFactor(squares, 1e-5))
        x, normal, squares = few_rows.added(rows, out, x, norm, 0.0)
        active = few_rows.gated(normal, gate_up, few_rows.RowFactor(squares, 1e-5))
        return few_rows.added(active, down, x, norm, 1.0)

    with on_an_h200():
        traced = jax.jit(layer).trace(x, x, squares, weight, weights)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 4
    for work in ("add", "multiply", "rsqrt", "logistic", "reduce", "convert", "pad", "transpose"):
        assert f"stablehlo.{work} " not in text
    assert [one.shape for one in traced.out_info] == [(rows, 1024), (rows, 1024), (64, rows)]


@pytest.mark.parametrize("in_parts", [True, False])
@pytest.mark.parametrize("code", ["int4", "float8_e4m3fn", "int8"])
def test_the_product_of_one_row_puts_its_context_together(code: str, in_parts: bool) -> None:
    """Attention is a launch, and the product another."""
    spec, weight = (
        AttentionSpec(kv_heads=2, group=4, head_dim=128, scale=0.1, in_parts=in_parts),
        weight_like(code, 512, 1024),
    )
    assert few_rows.fits_parts(128, 1, jnp.bfloat16, weight)
    pages = (jnp.zeros((4, 32, 2, 128), jnp.bfloat16),) * 2
    each, x = jnp.zeros(1, jnp.int32), jnp.zeros((1, 512), jnp.bfloat16)

    def block(q: jax.Array, weight: Any, x: jax.Array) -> Any:
        rows = attend_on_hopper(spec, q, pages, jnp.zeros((9, 40), jnp.int32), Tiles.single(each, each))
        assert isinstance(rows, PartedRows) == in_parts
        given = rows if isinstance(rows, PartedRows) else values(rows).reshape(1, -1)
        return PendingProduct(given, weight, FEW_ROWS).added_to(x, x[0], 1e-5, 0.0)

    with on_an_h200():
        traced = jax.jit(block).trace(jnp.zeros((1, 2, 4, 128), jnp.bfloat16), weight, x)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ('name = "combine_parts"' in text) == (not in_parts)
    if in_parts:
        assert text.count("stablehlo.custom_call") == 2


def test_contexts_in_parts_are_for_one_row_and_few_blocks() -> None:
    spec = AttentionSpec(kv_heads=2, group=4, head_dim=128, scale=0.1)
    weight, large = weight_like("int4", 512, 1024), weight_like("int4", 8192, 8192)
    assert FEW_ROWS.takes_parts(spec, 1, jnp.bfloat16, weight)
    assert not FEW_ROWS.takes_parts(spec, 2, jnp.bfloat16, weight)
    assert not FEW_ROWS.takes_parts(spec, 1, jnp.float32, weight)
    assert not FEW_ROWS.takes_parts(replace(spec, head_dim=96), 1, jnp.bfloat16, weight)
    assert not FEW_ROWS.takes_parts(spec, 1, jnp.bfloat16, large)
    assert not FEW_ROWS.takes_parts(spec, 1, jnp.bfloat16, jnp.zeros((512, 1024), jnp.bfloat16))


def test_few_rows_are_for_plain_weights() -> None:
    weight = weight_like("int8", 192, 256)
    assert few_rows.fits(8, jnp.float16, weight)
    assert not few_rows.fits(8, jnp.float32, weight)
    assert not few_rows.fits(8, jnp.float16, weight, is_gated=True)  # 96 gates
    for other in (
        replace(weight, zeros=jnp.zeros((192, 1), jnp.int8)),
        replace(weight, output_scales=jnp.ones(192)),
        replace(weight, scales=jnp.ones((192, 2)), group=128),
        weight_like("float8_e5m2", 192, 256),
    ):
        assert not few_rows.fits(8, jnp.float16, other)


def weight_like(code: str, outputs: int, inputs: int) -> Any:
    is_packed = code == "int4"
    codes, group = ((outputs, inputs // 2), 128) if is_packed else ((outputs, inputs), inputs)
    weight = Coded(
        codes=jax.ShapeDtypeStruct(codes, "uint8" if is_packed else code),
        scales=jax.ShapeDtypeStruct((outputs, inputs // group), "bfloat16" if is_packed else "float32"),
        zeros=None, index=None, input_scale=None, input_zero=None, shape=(outputs, inputs), num_contracted=1,
        is_of_experts=False, bits=4 if is_packed else 8, group=group,
    )  # fmt: skip
    return FourBits.of(weight) if is_packed else weight
