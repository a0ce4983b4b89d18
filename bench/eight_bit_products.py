"""The four products of a layer of an 8B model with fp8 weights on this GPU, in each form that they can have.

    python bench/eight_bit_products.py [--rows 8,32,64,128,256,2048]

Microseconds of a layer, of six in one program, with the compiler's options of such a step. Rows are rounded by XLA.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from quire.executor.compiler import OF_THE_LIBRARY, UNTUNED
from quire.ops.coded import FEW_ROWS, Rounding

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # qkv, out, gate and up, down
LAYERS, STEPS = 6, 20
Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


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
    rows = x.astype(jnp.float8_e4m3fn)
    return jnp.einsum("ti,oi->to", rows, codes, preferred_element_type=jnp.bfloat16)


FORMS: dict[str, Product] = {
    "rows as they are, widened": widened,
    "rows rounded, widened": rounded_and_widened,
    "codes by codes, float32": partial(by_codes, jnp.float32),
    "codes by codes, bfloat16": partial(by_codes, jnp.bfloat16),
    "codes alone": bare,
}


def layers(form: Product, x: jax.Array, weights: Any) -> jax.Array:
    for (qkv, out, gate_up, down), scales in weights:
        attended = form(x, qkv, scales[0])[:, :4096] * jnp.bfloat16(0.1)
        x = x + form(attended, out, scales[1])
        both = form(x, gate_up, scales[2])
        gated = jax.nn.silu(both[:, :14336].astype(jnp.float32)).astype(x.dtype) * both[:, 14336:]
        x = (x + form(gated, down, scales[3])) * jnp.bfloat16(0.5)
    return x


def microseconds(form: Product, rows: int, weights: Any, options: dict[str, Any]) -> float:
    x = jax.random.normal(jax.random.key(1), (rows, 4096), jnp.bfloat16)
    program = jax.jit(partial(layers, form)).lower(x, weights).compile(options)
    for step in range(STEPS + 3):
        if step == 3:
            begun = time.perf_counter()
        program(x, weights).block_until_ready()
    return (time.perf_counter() - begun) * 1e6 / STEPS / LAYERS


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="8,32,64,128,256,2048")
    all_rows = [int(rows) for rows in parser.parse_args().rows.split(",")]
    key = jax.random.key(0)
    weights = []
    for layer in range(LAYERS):
        keys = jax.random.split(jax.random.fold_in(key, layer), len(SHAPES))
        codes = [
            jax.random.normal(k, s, jnp.bfloat16).astype(jnp.float8_e4m3fn) for k, s in zip(keys, SHAPES, strict=True)
        ]
        weights.append((codes, [jnp.full(shape[0], 1e-3, jnp.float32) for shape in SHAPES]))
    for rows in all_rows:
        for name, form in FORMS.items():
            is_widened = name.endswith("widened")
            if is_widened and rows > 2 * FEW_ROWS:
                continue
            options = {} if is_widened else OF_THE_LIBRARY if rows <= 256 else UNTUNED
            print(f"{rows:5d} {name:28s} {microseconds(form, rows, weights, options):8.1f}", flush=True)


if __name__ == "__main__":
    main()
