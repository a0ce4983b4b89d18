"""Four-bit weights of an 8B model on this GPU: microseconds and GB/s of each product, by rows and by form.

    python bench/four_bit_products.py [--rows 1,8,16,32,64] [--group 128] [--forms hopper,kernel,XLA]
    python bench/four_bit_products.py --sweep 28672x4096 --rows 1 [--seconds 40]

`hopper`: quire/ops/gpu/hopper/few_rows.py, on GPUs that it is for. `kernel`: quire/ops/gpu/four_bit_product.py, for
other GPUs. `XLA`: codes are widened inside its product. Bytes are those of codes, scales and zero points, each read
once.
`--sweep`: `kernel` of one shape with every kind of blocks, the fastest last.
"""

import argparse
import time
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from eight_bit_products import SHAPES, rows_of, timed_us

from quire.executor.compute_capability import compute_capability
from quire.ops.gpu.four_bit_product import FourBitBlocks, four_bit_product
from quire.ops.gpu.hopper.products import few_row_sums, meets_few_rows
from quire.ops.gpu.kernels import HOPPER
from quire.ops.gpu.tiles import least_dot
from quire.ops.weights.coded import Coded
from quire.ops.weights.four_bits import FourBits

COPIES = 4  # of each weight, so that it does not stay in the device's caches
TILES = ((64, 2), (128, 2), (32, 1), (128, 4))  # columns and warps
DEPTHS = ((4, 1), (3, 1), (3, 2), (6, 1))  # stages, and steps together


def weight_of(shape: tuple[int, int], group: int, seed: int) -> FourBits:
    outputs, inputs = shape
    scales = jnp.full((outputs, inputs // group), 0.01, jnp.bfloat16)
    weight = FourBits.of(
        Coded(
            codes=jax.random.bits(jax.random.key(seed), (outputs, inputs // 2), jnp.uint8),
            scales=scales, zeros=jnp.full(scales.shape, 7, jnp.int8), index=None, input_scale=None, input_zero=None,
            shape=shape, num_contracted=1, is_of_experts=False, bits=4, group=group,
        )
    )  # fmt: skip
    assert weight is not None
    return weight


def all_products(form: Any, x: jax.Array, weights: list[FourBits]) -> list[jax.Array]:
    return [form(x, weight) for weight in weights]


def on_hopper(x: jax.Array, weight: FourBits) -> jax.Array:
    assert meets_few_rows(len(x), x.dtype, weight), f"the kernel is not for {len(x)} rows"
    return few_row_sums(x, weight, x.dtype)


def by_xla(x: jax.Array, weight: FourBits) -> jax.Array:
    return weight.widened_product(x)


def sweep(shape: tuple[int, int], group: int, rows: int, seconds: float) -> None:
    """Prints what each kind of blocks takes, and how far it is from XLA's product."""
    weights = [weight_of(shape, group, seed) for seed in range(COPIES)]
    num_bytes = sum(array.nbytes for array in jax.tree.leaves(weights[0]))
    x = rows_of(rows, shape[1])
    right = np.asarray(jax.jit(by_xla)(x, weights[0]))
    found, begun = [], time.monotonic()
    for (stages, together), (columns, warps), splits in product(DEPTHS, TILES, (1, 2, 4, 8, 16)):
        programs = shape[0] // columns * splits
        if time.monotonic() - begun > seconds or not 400 <= programs * warps / 2 <= 2200:
            continue
        blocks = FourBitBlocks(least_dot(rows), columns, splits, warps, stages, together)
        try:
            form = partial(four_bit_product, blocks=blocks)
            us = timed_us(partial(all_products, form), (x, weights), {}) / COPIES
            off = np.linalg.norm(np.asarray(jax.jit(form)(x, weights[0])) - right) / np.linalg.norm(right)
        except Exception as error:
            print(blocks, str(error)[:100], flush=True)
            continue
        found.append((us, blocks))
        print(f"{us:8.1f} us {num_bytes / us / 1e3:6.0f} GB/s off by {off:.1e} {blocks}", flush=True)
    print("the fastest:", *sorted(found)[:8], sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,16,32,64")
    parser.add_argument("--group", type=int, default=128)
    is_hopper = compute_capability(jax.devices()[0]) == HOPPER
    parser.add_argument("--forms", default="hopper,kernel,XLA" if is_hopper else "kernel,XLA")
    parser.add_argument("--sweep")
    parser.add_argument("--seconds", type=float, default=40)
    options = parser.parse_args()
    all_rows = list(map(int, options.rows.split(",")))
    if options.sweep:
        outputs, inputs = map(int, options.sweep.split("x"))
        for rows in all_rows:
            sweep((outputs, inputs), options.group, rows, options.seconds)
        return
    forms = {"hopper": on_hopper, "kernel": four_bit_product, "XLA": by_xla}
    for rows, name in product(all_rows, options.forms.split(",")):
        layer = 0.0
        for shape in SHAPES:
            weights = [weight_of(shape, options.group, seed) for seed in range(COPIES)]
            num_bytes = sum(array.nbytes for array in jax.tree.leaves(weights[0]))
            us = timed_us(partial(all_products, forms[name]), (rows_of(rows, shape[1]), weights), {}) / COPIES
            layer += us
            print(f"{rows:3d} {name:7s} {shape[0]:6d} x {shape[1]:6d} {us:8.1f} us {num_bytes / us / 1e3:7.0f} GB/s")
        print(f"{rows:3d} {name:7s} layer {layer:21.1f} us, 32 of them {32 * layer / 1e3:.2f} ms", flush=True)


if __name__ == "__main__":
    main()
