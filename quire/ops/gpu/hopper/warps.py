"""Warps of a group of threads that work by themselves, for Mosaic."""

from collections.abc import Callable
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def by_warp(count: int, body: Callable[[Any], None]) -> None:
    """`body` of the number of a warp, in the first `count` warps of a group, each by itself: they do not wait for each
    other there. A group that fetches as one does all of it four times."""

    def each() -> None:
        warp = lax.axis_index("warp")
        pl.when(warp < count)(lambda: body(warp))

    in_warps: Any = pl.kernel(each, mesh=plgpu.WarpMesh(axis_name="warp"))
    in_warps()
