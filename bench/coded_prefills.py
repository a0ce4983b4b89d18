"""Attention of prefills over a cache of eight bits on a Hopper GPU: the kernel for it, beside the one of other GPUs.

    python bench/coded_prefills.py [--cases 1x8192 1x2048@30000] [--cache e4m3] [--queries 4] [--page-size 16]

A case has so many sequences, and so many new tokens of each, from one number to another by chance, behind so many that
are in the cache. Times are those of the kernels on the device, by their profile. TFLOP/s are those of what is seen.
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from coded_attention import kernels_us

from quire.ops.attention.spec import AttentionSpec
from quire.ops.gpu.hopper.coded_prefills import coded_prefills
from quire.ops.gpu.prefill_attention import prefill_attention
from quire.ops.pages import TILE, CodedPages, Tiles

CASES = ["16x100-924", "1x8192", "4x2048", "2x512", "1x1024", "1x2048@30000"]
CODES = {"e4m3": "float8_e4m3fn", "int8": "int8"}
HEADS = 8


def lengths_of(case: str) -> tuple[np.ndarray, int]:
    new, _, before = case.partition("@")
    count, _, length = new.partition("x")
    least, _, most = length.partition("-")
    return np.random.default_rng(0).integers(int(least), int(most or least) + 1, int(count)), int(before or 0)


def tiles_of(lengths: np.ndarray, before: int) -> Tiles:
    """With as much padding as a step has."""
    counts = -(-lengths // TILE)
    slots = np.repeat(np.arange(len(lengths)), counts)
    within = np.concatenate([np.arange(count) for count in counts]) * TILE
    own = np.minimum(lengths[slots] - within, TILE)
    offsets = (np.cumsum(lengths) - lengths)[slots] + within
    fields = np.stack([slots, before + within, own, offsets])
    return Tiles(*map(jnp.asarray, np.pad(fields, ((0, 0), (0, 64))).astype(np.int32)), num_single=0)


def measure(case: str, cache: str, queries: int, page_size: int) -> str:
    lengths, before = lengths_of(case)
    spec = AttentionSpec(HEADS, queries, 128, 0.088)
    width = -(-int(before + lengths.max()) // page_size)
    table = jnp.arange(1, len(lengths) * width + 1, dtype=jnp.int32).reshape(len(lengths), width)
    shape = (len(lengths) * width + 1, page_size, HEADS, 128)
    keys = jax.random.split(jax.random.key(0), 3)
    codes = [(jax.random.normal(key, shape) * 50).astype(CODES[cache]) for key in keys[:2]]
    scales = jnp.full((shape[0], HEADS, page_size), 0.02, jnp.bfloat16)
    pages = CodedPages(*codes, scales, scales)
    q = jax.random.normal(keys[2], (int(lengths.sum()), HEADS, queries, 128), jnp.bfloat16)
    given = q, pages, table, tiles_of(lengths, before)
    flop = 4 * 128 * HEADS * queries * float((lengths * before + lengths * (lengths + 1) / 2).sum())
    told = []
    for name, attend in (("prefill_attention", prefill_attention), ("coded_prefills", coded_prefills)):
        (us,) = kernels_us(partial(attend, spec), *given, kernels=[name])
        told.append(f"{name} {us:.0f} µs, {flop / us / 1e6:.0f} TFLOP/s")
    return "; ".join(told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--cache", choices=CODES, default="e4m3")
    parser.add_argument("--queries", type=int, default=4, help="of a head of keys")
    parser.add_argument("--page-size", type=int, default=16)
    given = parser.parse_args()
    for case in given.cases:
        print(f"{case}: {measure(case, given.cache, given.queries, given.page_size)}", flush=True)


if __name__ == "__main__":
    main()
