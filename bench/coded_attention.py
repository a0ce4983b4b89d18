"""Attention of decodes over a cache of eight bits on this GPU, beside that over bfloat16, for several ways to cut it.

    python bench/coded_attention.py [--tilings 32,2,3 64,4,3] [--parts 64 256] [--only e4m3] [--cases 8x300 64x100-900]

Times are those of the kernels on the device, by their profile: of attention, and of what puts its parts together. Bytes
are those of the keys and values that must be read. Without tilings and parts, they are those of a step. On Hopper GPUs
codes are read by `coded_decodes`, too.
"""

import argparse
import itertools
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_time import kernels as device_kernels
from gpu_kernels import SPEC, paged, queries

from quire.executor.compute_capability import compute_capability
from quire.ops.gpu.decode_attention import Tiling, decode_attention
from quire.ops.gpu.decode_list import MAX_PARTS
from quire.ops.gpu.hopper.decode_items import PARTS, part_of
from quire.ops.gpu.kernels import HOPPER
from quire.ops.gpu.parts import combine_parts
from quire.ops.pages import CodedPages, Pages, Tiles, coded

CASES = ["8x300", "64x300", "256x300", "16x8000"]  # rows and positions


def kernel_us(call: Callable[..., Any], *given: Any, kernel: str) -> float:
    """Of the kernels of this name alone, the middle of eight calls."""
    (found,) = kernels_us(call, *given, kernels=[kernel])
    return found


def kernels_us(call: Callable[..., Any], *given: Any, kernels: list[str]) -> list[float]:
    run = jax.jit(call)
    jax.block_until_ready(run(*given))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(8):
                jax.block_until_ready(run(*given))
        (path,) = Path(folder).rglob("*.xplane.pb")
        found = device_kernels(jax.profiler.ProfileData.from_file(str(path)))
    times = [[one.ended_ns - one.begun_ns for one in found if name in one.name] for name in kernels]
    return [float(np.median(its_times)) / 1e3 for its_times in times]


def pages_of(plain: Pages, name: str) -> Pages:
    if name == "bfloat16":
        return plain
    dtype = jnp.dtype({"e4m3": "float8_e4m3fn"}.get(name, name))
    (k, k_scales), (v, v_scales) = (coded(array, dtype) for array in plain[:2])
    return CodedPages(k, v, *(jnp.swapaxes(scales, 1, 2) for scales in (k_scales, v_scales)))


def contexts_of(case: str) -> tuple[int, np.ndarray[Any, Any]]:
    """Rows, and how many positions each has; of a range, by chance."""
    rows, length = case.split("x")
    least, _, most = length.partition("-")
    return int(rows), np.random.default_rng(0).integers(int(least), int(most or least) + 1, int(rows))


def on_hopper(part: int, q: jax.Array, pages: CodedPages, table: jax.Array, tiles: Tiles) -> jax.Array:
    from quire.ops.gpu.hopper.coded_decodes import coded_decodes

    part = part or part_of(SPEC, q, pages, len(tiles)) or PARTS[-1][1]
    out, counts, parts = coded_decodes(SPEC, q, pages, table, tiles, part, MAX_PARTS)
    return combine_parts(out, counts, parts)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", default=["bfloat16", "e4m3"])
    parser.add_argument("--tilings", nargs="+", default=[""])
    parser.add_argument("--parts", nargs="+", type=int, default=[0])
    parser.add_argument("--cases", nargs="+", default=CASES)
    options = parser.parse_args()
    for case in options.cases:
        rows, lengths = contexts_of(case)
        plain, table = paged(lengths)
        tiles = Tiles.single(jnp.arange(rows), jnp.asarray(lengths - 1, jnp.int32))
        for name, tiling, part in itertools.product(options.only, options.tilings, options.parts):
            pages = pages_of(plain, name)
            num_bytes = int(lengths.sum()) * SPEC.kv_heads * SPEC.head_dim * 2 * pages[0].dtype.itemsize
            chosen = Tiling(*map(int, tiling.split(","))) if tiling else None
            ways = {"decode_attention": partial(decode_attention, SPEC, tiling=chosen, part=part or None)}
            if name != "bfloat16" and compute_capability(jax.devices()[0]) == HOPPER:
                ways["coded_decodes"] = partial(on_hopper, part)
            for kernel, attend in ways.items():
                given = queries(rows), pages, table, tiles
                alone, combining = kernels_us(attend, *given, kernels=[kernel, "combine_parts"])
                speed = f"{alone:.1f} µs, {num_bytes / alone / 1e6:.2f} TB/s; parts together {combining:.1f} µs"
                print(f"{case}, {name}, {kernel}, {tiling or 'chosen'}, {part or 'chosen'}: {speed}", flush=True)


if __name__ == "__main__":
    main()
