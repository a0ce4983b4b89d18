"""Products of few rows with what follows them can be translated for a GPU, also where there is none."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from quire.ops.weights.coded import Coded
from quire.ops.weights.four_bits import FourBits
from tests.gpu.hopper import ON_HOPPER
from tests.ops.test_gpu_lowering import on_an_h200

if not ON_HOPPER.mosaic:
    pytest.skip("this JAX has other kernels for it", allow_module_level=True)

from quire.ops.gpu.hopper import few_rows


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
