"""Products with int8 weights by the C++ kernel."""

import ctypes
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quire.ops.native.library import library
from quire.ops.native.rows import counted

Array = np.ndarray[Any, Any]

GROUP = 32  # numbers that share a scale
TILE = 8  # output channels that lie together
TILE_GROUP_BYTES = TILE * GROUP + TILE * 4  # their codes, and their scales


def is_fast() -> bool:
    """True if there is a kernel, and it uses instructions made for products of int8."""
    built = library()
    return built is not None and bool(built.quire_int8_is_fast())


def tiles_shape(shape: tuple[int, ...], num_contracted: int) -> tuple[int, int, int]:
    """The shape of the tiles of a weight of this shape, whose last `num_contracted` axes are inputs."""
    outer, inner = shape[:-num_contracted], shape[-num_contracted:]
    return -(-math.prod(outer) // TILE), math.prod(inner[:-1]) * -(-inner[-1] // GROUP), TILE_GROUP_BYTES


def pack(weights: Array, num_contracted: int, to: Array | None = None) -> Array:
    """Weights, whose last `num_contracted` axes are inputs, quantised: int8 [tiles, groups, TILE_GROUP_BYTES]. They are
    written to an array where one is given."""
    built = library()
    assert built is not None
    runs, run = math.prod(weights.shape[-num_contracted:-1]), weights.shape[-1]
    width = math.prod(weights.shape[:-num_contracted])
    weights = np.ascontiguousarray(weights, np.float32)
    tiles = np.empty(tiles_shape(weights.shape, num_contracted), np.int8) if to is None else to
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (weights, tiles)]
    built.quire_int8_pack(pointers[0], *map(ctypes.c_int64, (width, runs, run)), pointers[1])
    return tiles


def pack_matrices(weights: Array) -> Array:
    """Matrices [e, ..., inputs], each quantised on its own: int8 [e, tiles, groups, TILE_GROUP_BYTES]."""
    tiles = np.empty((len(weights), *tiles_shape(weights.shape[1:], 1)), np.int8)
    for one, to in zip(weights, tiles, strict=True):
        pack(one, 1, to)
    return tiles


def pack_codes(codes: Array, scales: Array, num_contracted: int) -> Array:
    """The tiles of what is quantised already, codes [..., groups, GROUP] within ±127 and scales [..., groups]."""
    groups = math.prod(scales.shape[-num_contracted:])
    codes = codes.reshape(-1, groups, GROUP).view("=u4")  # four of them stay together
    scales = scales.reshape(-1, groups)
    missing = -len(scales) % TILE
    if missing:
        codes = np.pad(codes, ((0, missing), (0, 0), (0, 0)))
        scales = np.pad(scales, ((0, missing), (0, 0)))
    tiles = np.empty((len(scales) // TILE, groups), [("codes", "=u4", (GROUP // 4, TILE)), ("scales", "=f4", TILE)])
    tiles["codes"] = codes.reshape(-1, TILE, groups, GROUP // 4).transpose(0, 2, 3, 1)
    tiles["scales"] = scales.reshape(-1, TILE, groups).transpose(0, 2, 1)
    return tiles.view(np.int8).reshape(*tiles.shape, TILE_GROUP_BYTES)


def product(
    x: jax.Array, tiles: jax.Array, width: int, num_rows: jax.Array | None = None, *, gated: bool = False
) -> jax.Array:
    """float32 [t, width] of x [t, runs, run], or of silu(x[:, 0]) * x[:, 1] where x [t, 2, run] is gated; of the first
    `num_rows`, the others being zeros."""
    target = "quire_int8_gated_product" if gated else "quire_int8_product"
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((x.shape[0], width), jnp.float32))  # type: ignore[no-untyped-call]
    out: jax.Array = call(x.astype(jnp.float32), tiles, counted(x, num_rows))
    return out


def grouped_product(x: jax.Array, tiles: jax.Array, sizes: jax.Array, width: int, *, gated: bool = False) -> jax.Array:
    """float32 [n, width] of x [n, run] with the tiles [e, ...] of several matrices, each for the next of the `sizes`
    rows; or of silu(x[:, 0]) * x[:, 1] where x [n, 2, run] is gated. One call for all of them."""
    call = jax.ffi.ffi_call("quire_int8_grouped_product", jax.ShapeDtypeStruct((x.shape[0], width), jnp.float32))  # type: ignore[no-untyped-call]
    rows = x if gated else x[:, None]
    out: jax.Array = call(rows.astype(jnp.float32), tiles, sizes.astype(jnp.int32), gated=gated)
    return out


def rows(tiles: jax.Array, indices: jax.Array) -> jax.Array:
    """float32 [n, groups, GROUP]: the weights of some output channels [n]."""
    found = tiles[indices // TILE]  # [n, groups, bytes]
    n, groups, _ = found.shape
    lane = (indices % TILE)[:, None]
    codes = found[:, :, : TILE * GROUP].reshape(n, groups, GROUP // 4, TILE, 4)
    codes = jnp.take_along_axis(codes, lane[:, :, None, None, None], axis=3).reshape(n, groups, GROUP)
    scales = jax.lax.bitcast_convert_type(found[:, :, TILE * GROUP :].reshape(n, groups, TILE, 4), jnp.float32)
    scale = jnp.take_along_axis(scales, lane[:, :, None], axis=2)
    return codes.astype(jnp.float32) * scale
