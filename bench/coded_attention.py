"""Attention of decodes over a cache of eight bits on this GPU, beside that over bfloat16, for several ways to cut it.

    python bench/coded_attention.py [--tilings 32,2,3 64,4,3] [--only e4m3]

Times are those of the kernel on the device, by its profile, and those of a whole call, one of many after each other.
Bytes are those of the keys and values that must be read.
"""

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_time import kernels
from gpu_kernels import SPEC, paged, queries, repeated_s

from quire.ops.gpu.decode_attention import TILING, Tiling, decode_attention
from quire.ops.pages import CodedPages, Pages, Tiles, coded

CASES = (256, 256), (64, 256), (16, 8000)


def kernel_us(attend: Callable[..., jax.Array], *given: Any) -> float:
    """Of the kernel alone, the middle of eight calls."""
    call = jax.jit(attend)
    call(*given).block_until_ready()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(8):
                call(*given).block_until_ready()
        (path,) = Path(folder).rglob("*.xplane.pb")
        found = kernels(jax.profiler.ProfileData.from_file(str(path)))
    times = [one.ended_ns - one.begun_ns for one in found if "decode_attention" in one.name]
    return float(np.median(times)) / 1e3


def pages_of(plain: Pages, name: str) -> Pages:
    if name == "bfloat16":
        return plain
    dtype = jnp.dtype({"e4m3": "float8_e4m3fn"}.get(name, name))
    (k, k_scales), (v, v_scales) = (coded(array, dtype) for array in plain[:2])
    return CodedPages(k, v, *(jnp.swapaxes(scales, 1, 2) for scales in (k_scales, v_scales)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", default=["bfloat16", "e4m3"])
    parser.add_argument("--tilings", nargs="+", default=[",".join(map(str, TILING))])
    options = parser.parse_args()
    for rows, length in CASES:
        plain, table = paged(np.full(rows, length))
        tiles = Tiles.single(jnp.arange(rows), jnp.full(rows, length - 1, jnp.int32))
        for name in options.only:
            pages = pages_of(plain, name)
            num_bytes = rows * length * SPEC.kv_heads * SPEC.head_dim * 2 * pages[0].dtype.itemsize
            for tiling in options.tilings:
                attend = partial(decode_attention, SPEC, tiling=Tiling(*map(int, tiling.split(","))))
                given = queries(rows), pages, table, tiles
                whole, alone = repeated_s(attend, *given) * 1e6, kernel_us(attend, *given)
                speed = f"{alone:.0f} µs, {num_bytes / alone / 1e6:.2f} TB/s; a call {whole:.0f} µs"
                print(f"{rows} rows x {length}, {name}, {tiling}: {speed}", flush=True)


if __name__ == "__main__":
    main()
