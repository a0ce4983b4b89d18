"""Four-bit weights of an 8B model on this GPU: microseconds and GB/s of each product, by rows and by form.

    python bench/four_bit_products.py [--rows 1,8,16,32,64] [--group 128]

`kernel`: quire/ops/gpu/four_bit_product.py. `XLA`: codes are widened inside its product. Bytes are those of codes,
scales and zero points, each read once.
"""

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from eight_bit_products import SHAPES, rows_of, timed_us

from quire.ops.coded import Coded
from quire.ops.gpu.four_bit_product import four_bit_product

COPIES = 4  # of each weight, so that it does not stay in the device's caches


def weight_of(shape: tuple[int, int], group: int, seed: int) -> Coded:
    outputs, inputs = shape
    scales = jnp.full((outputs, inputs // group), 0.01, jnp.bfloat16)
    return Coded(
        codes=jax.random.bits(jax.random.key(seed), (outputs, inputs // 2), jnp.uint8),
        scales=scales, zeros=jnp.full(scales.shape, 7, jnp.int8), index=None, input_scale=None, input_zero=None,
        shape=shape, num_contracted=1, is_of_experts=False, bits=4, group=group,
    )  # fmt: skip


def all_products(form: Any, x: jax.Array, weights: list[Coded]) -> list[jax.Array]:
    return [form(x, weight) for weight in weights]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,16,32,64")
    parser.add_argument("--group", type=int, default=128)
    options = parser.parse_args()
    forms = {"kernel": four_bit_product, "XLA": lambda x, weight: weight.product(x)}
    for rows in map(int, options.rows.split(",")):
        for name, form in forms.items():
            layer = 0.0
            for shape in SHAPES:
                weights = [weight_of(shape, options.group, seed) for seed in range(COPIES)]
                num_bytes = sum(array.nbytes for array in jax.tree.leaves(weights[0]))
                us = timed_us(partial(all_products, form), (rows_of(rows, shape[1]), weights), {}) / COPIES
                layer += us
                print(
                    f"{rows:3d} {name:7s} {shape[0]:6d} x {shape[1]:6d} {us:8.1f} us {num_bytes / us / 1e3:7.0f} GB/s"
                )
            print(f"{rows:3d} {name:7s} layer {layer:21.1f} us, 32 of them {32 * layer / 1e3:.2f} ms", flush=True)


if __name__ == "__main__":
    main()
