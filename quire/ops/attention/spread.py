"""Keys that lose less when they are rounded.

A few features of keys are much larger than the others, and the scale of a head is that of its largest number. So runs
of features are turned by Hadamard's matrix, which spreads each over its run. It is orthogonal: queries that are turned
alike have the same products with the keys as before.
"""

import math

import jax
import jax.numpy as jnp

MOST = 64  # features of a run: a kernel has the matrix in its registers


def run_of(size: int) -> int:
    """Features of a run in heads of this size: a power of two, of which heads have a whole number."""
    return min(size & -size, MOST)


def spread(x: jax.Array) -> jax.Array:
    """Heads [..., h] with their runs turned, in float32.

    Sums are taken in pairs: a product of matrices may take them in another order where there are more rows.
    """
    size, turned, step = x.shape[-1], x.astype(jnp.float32), 1
    run = run_of(size)
    while step < run:
        pairs = turned.reshape(*x.shape[:-1], size // (2 * step), 2, step)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        turned = jnp.stack((first + second, first - second), axis=-2).reshape(x.shape)
        step *= 2
    return turned * (1.0 / math.sqrt(run))


def signs(run: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The matrix [size, size] of runs in a row, before it is divided by the root of `run`; within kernels, too.

    Its size is 16 at least, which products of blocks need.
    """
    size = max(run, 16)
    row, column = jnp.arange(size)[:, None], jnp.arange(size)[None, :]
    both = row & column & (run - 1)
    for shift in (4, 2, 1):  # the parity of its six bits
        both = both ^ (both >> shift)
    turned = jnp.where((both & 1) == 0, 1.0, -1.0)
    return jnp.where(row // run == column // run, turned, 0.0).astype(dtype)
