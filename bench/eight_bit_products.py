"""A layer of an 8B model with fp8 weights on this GPU, without its attention, in each form that it can have.

    python bench/eight_bit_products.py [--rows 8,32,64,128,256,2048] [--parts layers,kernels] [--blocks 2048,4096]

`layers`: microseconds of a layer, of four in one program, with the compiler's options of such a step: norms, the four
products, the gate and the rounding of rows between them. Rows are rounded and sums are scaled by XLA, or by the kernels
of quire/ops/gpu/rounded_rows.py; beside them products of codes with nothing to round or scale, which is the least that
it can take. Of few rows there are products with codes that are widened, too.

`kernels`: microseconds of each of these kernels alone, by the width of its blocks and how many of a gate are loaded
ahead, and of XLA in its place.

`products`: the four products and the gate alone, each in every form.

`kernel`: each of the four products by the kernel for few rows (quire/ops/gpu/hopper/code_product.py).
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from device_time import kernels as device_kernels

from quire.executor.programs.compiler_options import OF_THE_LIBRARY, UNTUNED
from quire.executor.programs.ladder import TIMED_ROWS
from quire.ops.gpu import kernels as gpu_kernels
from quire.ops.gpu import rounded_rows as gpu_rows
from quire.ops.gpu.hopper import code_product
from quire.ops.gpu.hopper import products as hopper_products
from quire.ops.weights.activation_rounding import Rounding
from quire.ops.weights.coded import FEW_ROWS, Coded
from quire.ops.weights.rounded_rows import PLAIN, RoundingOps, ScaledSums, plain_sum, scaled

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # qkv, out, gate and up, down
LAYERS, STEPS, CALLS = 4, 8, 12
CODE = jnp.dtype("float8_e4m3fn")
Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Weights(NamedTuple):
    norms: tuple[jax.Array, jax.Array]
    matrices: tuple[Coded, Coded, Coded, Coded]


def timed_us(function: Callable[..., Any], given: tuple[Any, ...], options: dict[str, Any]) -> float:
    """Time that the device computes, by its profile: launches and the host are not part of it."""
    program = jax.jit(function).lower(*given).compile(options)
    for _ in range(3):
        jax.block_until_ready(program(*given))  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(STEPS):
                jax.block_until_ready(program(*given))  # type: ignore[no-untyped-call]
        (path,) = Path(folder).rglob("*.xplane.pb")
        found = device_kernels(jax.profiler.ProfileData.from_file(str(path)))
    return sum(kernel.ended_ns - kernel.begun_ns for kernel in found) / 1e3 / STEPS


def options_of(rows: int) -> dict[str, Any]:
    return {} if rows <= FEW_ROWS else OF_THE_LIBRARY if rows <= TIMED_ROWS else UNTUNED


def rounded_layers(rounding: RoundingOps, x: jax.Array, weights: list[Weights]) -> jax.Array:
    out: Any = None
    for (first, second), (qkv, attention_out, gate_up, down) in weights:
        x, rows = rounding.add_rms(x, out, first, 1e-5, 0.0, CODE)
        attended = scaled(qkv.sums(rows, x.dtype))[:, :4096] * jnp.bfloat16(0.1)
        out = attention_out.sums(rounding.rows(attended, CODE), x.dtype)
        x, rows = rounding.add_rms(x, out, second, 1e-5, 0.0, CODE)
        both = gate_up.sums(rows, x.dtype).reshape(1, 2, 14336)
        out = down.sums(rounding.gate(jax.nn.silu, both, CODE), x.dtype)
    return plain_sum(x, out)


def product_layers(form: Product, norm: Any, x: jax.Array, weights: list[Weights]) -> jax.Array:
    """With products that take and give numbers. `norm` gives x + out, and its norm."""
    out = jnp.zeros_like(x)
    for norms, matrices in weights:
        qkv, attention_out, gate_up, down = (partial(_applied, form, matrix) for matrix in matrices)
        x, normal = norm(x, out, norms[0])
        out = attention_out(qkv(normal)[:, :4096] * jnp.bfloat16(0.1))
        x, normal = norm(x, out, norms[1])
        both = gate_up(normal)
        out = down(jax.nn.silu(both[:, :14336].astype(jnp.float32)).astype(x.dtype) * both[:, 14336:])
    return x + out


def _applied(form: Product, matrix: Coded, x: jax.Array) -> jax.Array:
    return form(x, matrix.codes, matrix.scales[:, 0])


def widened(x: jax.Array, codes: jax.Array, scales: jax.Array) -> jax.Array:
    out = jnp.einsum("ti,oi->to", x, codes.astype(x.dtype), preferred_element_type=jnp.float32)
    return (out * scales).astype(x.dtype)


def rounded_and_widened(x: jax.Array, codes: jax.Array, scales: jax.Array) -> jax.Array:
    rows, row_scales = Rounding(is_float=True).codes(x, None)
    return (widened(rows.astype(x.dtype), codes, scales) * row_scales).astype(x.dtype)


def by_codes(sums: Any, x: jax.Array, codes: jax.Array, scales: jax.Array) -> jax.Array:
    rows, row_scales = Rounding(is_float=True).codes(x, None)
    out = jnp.einsum("ti,oi->to", rows, codes, preferred_element_type=sums).astype(jnp.float32)
    return (out * row_scales * scales).astype(x.dtype)


def bare(x: jax.Array, codes: jax.Array, scales: jax.Array) -> jax.Array:
    return jnp.einsum("ti,oi->to", x.astype(CODE), codes, preferred_element_type=jnp.bfloat16)


def plain_norm(x: jax.Array, out: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    found: tuple[jax.Array, jax.Array] = gpu_kernels.add_rms_norm(x, out, weight, 1e-5, 0.0)
    return found


def no_norm(x: jax.Array, out: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    total = (x + out) * jnp.bfloat16(0.5)
    return total, total


PRODUCTS: dict[str, Product] = {
    "rows as they are, widened": widened,
    "rows rounded, widened": rounded_and_widened,
    "codes by codes, float32": partial(by_codes, jnp.float32),
    "codes by codes, bfloat16": partial(by_codes, jnp.bfloat16),
    "codes alone": bare,
}
LAYER_FORMS: dict[str, Any] = {
    "codes widened": partial(product_layers, widened, plain_norm),
    "rounded by XLA": partial(rounded_layers, PLAIN),
    "rounded by kernels": partial(rounded_layers, gpu_kernels.GPU.rounding),
    "nothing rounded": partial(product_layers, bare, no_norm),
}


def made_weights() -> list[Weights]:
    key = jax.random.key(0)
    weights = []
    for layer in range(LAYERS):
        keys = jax.random.split(jax.random.fold_in(key, layer), len(SHAPES))
        matrices = [
            Coded(
                codes=jax.random.normal(k, shape, jnp.bfloat16).astype(CODE),
                scales=jnp.full((shape[0], 1), 1e-3, jnp.float32),
                zeros=None, index=None, input_scale=None, input_zero=None, shape=shape, num_contracted=1,
                is_of_experts=False, bits=8, group=shape[1], rounding=Rounding(is_float=True), is_direct=True,
            )
            for k, shape in zip(keys, SHAPES, strict=True)
        ]  # fmt: skip
        ones = jnp.ones(4096, jnp.bfloat16)
        weights.append(Weights((ones, ones), (matrices[0], matrices[1], matrices[2], matrices[3])))
    return weights


def rows_of(rows: int, size: int = 4096, seed: int = 1) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (rows, size), jnp.bfloat16)


def layers(all_rows: list[int]) -> Iterator[str]:
    weights = made_weights()
    for rows in all_rows:
        for name, form in LAYER_FORMS.items():
            if name == "codes widened" and rows > 2 * FEW_ROWS:
                continue
            options = {} if name == "codes widened" else options_of(max(rows, FEW_ROWS + 1))
            yield f"{rows:5d} {name:28s} {timed_us(form, (rows_of(rows), weights), options) / LAYERS:8.1f}"


def products(all_rows: list[int]) -> Iterator[str]:
    weights = made_weights()
    for rows in all_rows:
        for name, form in PRODUCTS.items():
            is_widened = name.endswith("widened")
            if is_widened and rows > 2 * FEW_ROWS:
                continue
            options = {} if is_widened else options_of(max(rows, FEW_ROWS + 1))
            us = timed_us(partial(product_layers, form, no_norm), (rows_of(rows), weights), options)
            yield f"{rows:5d} {name:28s} {us / LAYERS:8.1f}"


def kernel(all_rows: list[int]) -> Iterator[str]:
    weights = made_weights()
    for rows in all_rows:
        for number, (outputs, inputs) in enumerate(SHAPES):
            if code_product.blocks_of(rows, outputs, inputs) is None:
                continue

            def every_layer(x: jax.Array, weights: list[Weights], number: int = number) -> list[jax.Array]:
                return [hopper_products.multiply_codes(x, one.matrices[number].codes, jnp.bfloat16) for one in weights]

            us = timed_us(every_layer, (rows_of(rows, inputs).astype(CODE), weights), {}) / LAYERS
            yield f"{rows:5d} {outputs:6d} x {inputs:5d} {us:8.1f} {outputs * inputs / us / 1e6:6.2f} TB/s"


def kernels(all_rows: list[int], blocks: list[int]) -> Iterator[str]:
    """Each of several calls has numbers of its own, so that large ones come from memory."""

    def sums(rows: int, size: int, seed: int) -> ScaledSums:
        values = rows_of(rows, size, seed) * jnp.bfloat16(300)
        return ScaledSums(values, jnp.full((rows, 1), 1e-2), jnp.full(size, 1e-3), jnp.dtype("bfloat16"))

    weight = jnp.ones(4096, jnp.bfloat16)
    cases: dict[str, Any] = {
        "gate": lambda ops, x, out, both: ops.gate(jax.nn.silu, both.reshape(1, 2, 14336), CODE),
        "norm of sum": lambda ops, x, out, both: ops.add_rms(x, out, weight, 1e-5, 0.0, CODE),
        "rows": lambda ops, x, out, both: ops.rows(x, CODE),
    }
    own = {
        f"{block}, {ahead} ahead": RoundingOps(
            partial(gpu_rows.round_rows, block=block),
            partial(gpu_rows.add_norm, block=block),
            partial(gpu_rows.gate, block=block, ahead=ahead),
        )
        for block in blocks
        for ahead in (gpu_rows.AHEAD, 1, 2)
    }
    for rows in all_rows:
        given = [(rows_of(rows, seed=s), sums(rows, 4096, s), sums(rows, 28672, s)) for s in range(CALLS)]
        for case, call in cases.items():
            for name, ops in {"XLA": PLAIN, **own}.items():

                def all_calls(given: Any, call: Any = call, ops: Any = ops) -> list[Any]:
                    made = [call(ops, *one) for one in given]
                    rounded = [one[1] if isinstance(one, tuple) else one for one in made]
                    totals = [one[0] for one in made if isinstance(one, tuple)]
                    return [*totals, *((one.codes, one.scales) for one in rounded)]

                if case != "gate" and name.endswith((" 1 ahead", " 2 ahead")):
                    continue
                us = timed_us(all_calls, (given,), UNTUNED) / CALLS
                yield f"{rows:5d} {case:12s} {name:15s} {us:8.1f}"


PARTS = {"layers": layers, "products": products, "kernel": kernel}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="8,32,64,128,256,2048")
    parser.add_argument("--parts", default="layers,kernels")
    parser.add_argument("--blocks", default="2048,4096")
    arguments = parser.parse_args()
    rows = [int(one) for one in arguments.rows.split(",")]
    blocks = [int(one) for one in arguments.blocks.split(",")]
    for part in arguments.parts.split(","):
        print(part, flush=True)
        for line in kernels(rows, blocks) if part == "kernels" else PARTS[part](rows):
            print(line, flush=True)


if __name__ == "__main__":
    main()
