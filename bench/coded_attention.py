"""Attention of decodes over a cache of eight bits on this GPU, beside that over bfloat16, for several ways to cut it.

    python bench/coded_attention.py

Bytes are those of the keys and values that must be read.
"""

from functools import partial

import jax.numpy as jnp
import numpy as np
from gpu_kernels import SPEC, paged, queries, repeated_s

from quire.ops.gpu.decode_attention import TILING, Tiling, decode_attention
from quire.ops.pages import CodedPages, Pages, Tiles, coded

TILINGS = ((64, 2, 3), (64, 2, 4), (64, 4, 3), (64, 4, 4), (128, 4, 2), (32, 1, 4), (32, 2, 6))


def main() -> None:
    for rows, length in ((256, 256), (64, 256), (16, 8000)):
        plain, table = paged(np.full(rows, length))
        (k, k_scales), (v, v_scales) = (coded(array, jnp.dtype("float8_e4m3fn")) for array in plain)
        codes = CodedPages(k, v, *(jnp.swapaxes(scales, 1, 2) for scales in (k_scales, v_scales)))
        tiles = Tiles.single(jnp.arange(rows), jnp.full(rows, length - 1, jnp.int32))
        read = rows * length * SPEC.kv_heads * SPEC.head_dim * 2
        cases: list[tuple[str, Pages, Tiling, int]] = [("bfloat16", plain, TILING, 2 * read)]
        cases += [("e4m3", codes, tiling, read) for tiling in (TILING, *(Tiling(*one) for one in TILINGS))]
        for name, pages, tiling, num_bytes in cases:
            attend = partial(decode_attention, SPEC, tiling=tiling)
            seconds = repeated_s(attend, queries(rows), pages, table, tiles)
            speed = f"{seconds * 1e6:.0f} µs, {num_bytes / seconds / 1e12:.2f} TB/s"
            print(f"{rows} rows x {length}, {name}, {tuple(tiling)}: {speed}", flush=True)


if __name__ == "__main__":
    main()
