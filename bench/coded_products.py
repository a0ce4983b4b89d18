"""Products of a few rows with a matrix on a CPU: the codes of quantised checkpoints beside int8 and float32.

    python bench/coded_products.py [--shape 4096x4096] [--rows 1,4,8,16,64] [--rounds 30]

All are operations of the native library, on one thread for each core. The kinds take turns, and each time is the best
of the rounds, as other work on the machine makes them longer. Microseconds, and for the first number of rows the
gigabytes of codes and scales that are read in a second.
"""

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from quire.ops.native import float_product, library
from quire.ops.native.int8_product import pack, product
from quire.ops.weights.coded import Coded

Product = Callable[[jax.Array], jax.Array]
# Kind: bits of a code, its type, the type of scales, and inputs that share one; None: all.
KINDS = {
    "int4, groups of 128": (4, np.uint8, ml_dtypes.bfloat16, 128),
    "int4, groups of 32": (4, np.uint8, ml_dtypes.bfloat16, 32),
    "nvfp4": (4, np.uint8, ml_dtypes.float8_e4m3fn, 16),
    "int8, a scale for each output": (8, np.int8, np.float32, None),
    "e4m3, a scale for each output": (8, ml_dtypes.float8_e4m3fn, np.float32, None),
}


def coded(outputs: int, inputs: int, kind: str, random: np.random.Generator) -> tuple[Product, int]:
    """The product, and the bytes of its codes and scales."""
    bits, code_type, scale_type, group = KINDS[kind]
    group = group or inputs
    codes = random.integers(0, 112, (outputs, inputs * bits // 8), np.uint8).view(code_type)
    scales = random.uniform(0.01, 0.1, (outputs, inputs // group)).astype(scale_type)
    weight = Coded(
        codes=jnp.asarray(codes), scales=jnp.asarray(scales), zeros=None, index=None, input_scale=None, input_zero=None,
        shape=(outputs, inputs), num_contracted=1, is_of_experts=False, bits=bits, group=group, is_native=True,
    )  # fmt: skip
    return jax.jit(weight.product), codes.nbytes + scales.nbytes


def products(outputs: int, inputs: int) -> dict[str, tuple[Product, int]]:
    random = np.random.default_rng(0)
    found = {kind: coded(outputs, inputs, kind, random) for kind in KINDS}
    weights = random.standard_normal((outputs, inputs), np.float32)
    tiles, floats = jnp.asarray(pack(weights, 1)), jnp.asarray(weights)
    found["--quantize int8"] = jax.jit(lambda x: product(x[:, None], tiles, outputs)), tiles.nbytes
    found["float32"] = jax.jit(lambda x: float_product.product(x, floats)), floats.nbytes
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4096x4096", help="outputs x inputs")
    parser.add_argument("--rows", default="1,4,8,16,64")
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    outputs, inputs = map(int, given.shape.split("x"))
    if not library.load():
        parser.exit(1, f"{library.description()}\n")
    rows = [int(number) for number in given.rows.split(",")]
    xs = [jax.random.normal(jax.random.key(number), (number, inputs), jnp.float32) for number in rows]
    kinds = products(outputs, inputs)
    best = {kind: [float("inf")] * len(rows) for kind in kinds}
    for _ in range(given.rounds):
        for kind, (run, _) in kinds.items():
            for place, x in enumerate(xs):
                run(x).block_until_ready()
                begun = time.perf_counter()
                run(x).block_until_ready()
                best[kind][place] = min(best[kind][place], time.perf_counter() - begun)
    print(f"{'rows':32}" + "".join(f"{number:>9}" for number in rows) + "     GB/s")
    for kind, (_, num_bytes) in kinds.items():
        times = "".join(f"{1e6 * seconds:9.0f}" for seconds in best[kind])
        print(f"{kind:32}{times}{num_bytes / best[kind][0] / 1e9:9.1f}")


if __name__ == "__main__":
    main()
