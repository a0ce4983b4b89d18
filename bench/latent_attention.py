"""Latent attention of decodes on this GPU, one layer of it, for several ways to cut it.

    python bench/latent_attention.py [--heads 16 128] [--rows 1,32,256] [--lengths 1000,8000,64000] [--ways chosen]
    python bench/latent_attention.py --prompts     # chunks of prompts, too

Times are those of the kernels on the device, by their profile: of attention, and of what puts its parts together. The
floor is the time to read each vector of 576 numbers once at 4.2 TB/s. Plain is the reference in jnp, by the clock. The
pages of all contexts are those of one pool, several times over where it is too small, and far more than a cache holds.
"""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_time import kernels as device_kernels
from device_time import profiled

from quire.ops.attention.spec import AttentionSpec
from quire.ops.attention.tiled_attention import tiled_attention
from quire.ops.gpu.context_list import Cut
from quire.ops.gpu.latent_attention import CUT, Tiling, latent_attention
from quire.ops.pages import TILE, Tiles

RANK, ROTATED, PAGE_SIZE, NUM_PAGES = 512, 64, 32, 65536
BYTES_PER_S, CALLS = 4.2e12, 6
KERNELS = ["latent_attention", "combine_latent_parts"]
Way = tuple[Tiling | None, Cut]
OF_16 = [
    *(Tiling(16, 32, 4, stages) for stages in (2, 3, 4)),
    Tiling(16, 32, 8, 3),
    Tiling(16, 64, 8, 2),
    Tiling(16, 16, 4, 4),
]
OF_MANY = [
    *(Tiling(64, 32, 8, stages, slab=128) for stages in (2, 3)),
    Tiling(64, 32, 8, 2),
    Tiling(64, 64, 8, 2, slab=128),
    *(Tiling(32, 32, 8, stages) for stages in (2, 3)),
]
CUTS = [CUT, Cut(64, 528), Cut(128, 1056), Cut(256, 132)]


def ways_of(rows: int, kind: str) -> dict[str, Way]:
    """By name. `rows`: tokens times heads of a program, if it may have as many as it likes."""
    ways: dict[str, Way] = {"chosen": (None, CUT)}
    if kind == "chosen":
        return ways
    ways |= {",".join(map(str, map(int, tiling))): (tiling, CUT) for tiling in (OF_16 if rows <= 16 else OF_MANY)}
    return ways | {f"chosen, parts of {cut.least} for {cut.programs}": (None, cut) for cut in CUTS[1:]}


def pool() -> jax.Array:
    """Made on the device, as random bits of which none is NaN."""
    shape = (NUM_PAGES, PAGE_SIZE, 1, RANK + ROTATED)
    return jax.jit(lambda: jax.random.uniform(jax.random.key(1), shape, jnp.bfloat16, -1.7, 1.7))()


def table_of(rows: int, length: int) -> jax.Array:
    chance, count = np.random.default_rng(0), -(-length // PAGE_SIZE)
    needed = -(-rows * count // (NUM_PAGES - 1))
    found = np.concatenate([chance.permutation(NUM_PAGES - 1) + 1 for _ in range(needed)])[: rows * count]
    return jnp.asarray(found.reshape(rows, count), jnp.int32)


def kernels_us(calls: list[Callable[[], Any]]) -> list[tuple[float, float]]:
    """Of each call the middle time of attention, and of what puts its parts together: all in one profile."""
    for call in calls:
        jax.block_until_ready(call())

    def run() -> float:
        for call in calls:
            for _ in range(CALLS):
                jax.block_until_ready(call())
        return 0.0

    found = device_kernels(profiled(run)[1])
    columns = []
    for name in KERNELS:
        its = sorted((one.begun_ns, one.ended_ns) for one in found if name in one.name)
        times = np.asarray([(ended - begun) / 1e3 for begun, ended in its])
        each = len(times) // len(calls)
        middles = [float(np.median(times[at * each : (at + 1) * each])) for at in range(len(calls))] if each else []
        columns.append(middles or [0.0] * len(calls))
    return list(zip(*columns, strict=True))


def plain_us(call: Callable[[], Any]) -> float:
    jax.block_until_ready(call())
    begun = time.perf_counter()
    jax.block_until_ready([call() for _ in range(2)])
    return (time.perf_counter() - begun) / 2 * 1e6


def compiled(spec: AttentionSpec, way: Way, given: tuple[Any, ...]) -> Any:
    tiling, cut = way
    return jax.jit(partial(latent_attention, spec, tiling=tiling, cut=cut)).lower(*given).compile()


class Decodes:
    """Decodes of so many rows of a layer with so many heads. Programs are compiled once for all lengths."""

    def __init__(self, heads: int, rows: int, longest: int, keys: jax.Array) -> None:
        self.spec = AttentionSpec(1, heads, RANK + ROTATED, 0.07, value_dim=RANK)
        self.rows, self.keys, self.table = rows, keys, table_of(rows, longest)
        self.q = jax.random.normal(jax.random.key(0), (rows, 1, heads, RANK + ROTATED), jnp.bfloat16)

    def given(self, length: int) -> tuple[Any, ...]:
        positions = jnp.full(self.rows, length - 1, jnp.int32)
        return self.q, self.keys, self.table, Tiles.single(jnp.arange(self.rows, dtype=jnp.int32), positions)

    def compiled(self, way: Way) -> Any:
        return compiled(self.spec, way, self.given(1))

    def plain(self) -> Any:
        def run(q: jax.Array, keys: jax.Array, table: jax.Array, tiles: Tiles) -> jax.Array:
            return tiled_attention(self.spec, q, (keys, keys), table, tiles)[..., :RANK]

        return jax.jit(run).lower(*self.given(1)).compile()


def error(got: jax.Array, right: jax.Array) -> float:
    a, b = (np.asarray(one, np.float32) for one in (got, right))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def compile_all(made: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Side by side. One that fails is told, and left out."""
    found = {}
    with ThreadPoolExecutor(12) as threads:
        for name, future in {name: threads.submit(make) for name, make in made.items()}.items():
            try:
                found[name] = future.result()
            except Exception as reason:  # whatever a compiler has to say
                print(f"  {name}: {type(reason).__name__}: {str(reason)[:160]}", flush=True)
    return found


def decodes(heads: int, all_rows: list[int], lengths: list[int], kind: str, keys: jax.Array) -> None:
    cases = {rows: Decodes(heads, rows, max(lengths), keys) for rows in all_rows}
    ways = ways_of(heads, kind)
    made = {f"{rows} {name}": partial(cases[rows].compiled, way) for rows in all_rows for name, way in ways.items()}
    made |= {f"{rows} plain": cases[rows].plain for rows in all_rows}
    begun = time.perf_counter()
    programs = compile_all(made)
    took_s = time.perf_counter() - begun
    print(f"{heads} heads; {len(made)} programs compiled in {took_s:.0f} s. Columns: µs of attention + its parts put")
    print("together, and the part of 4.2 TB/s. Ways: rows, block, warps, stages, slab", flush=True)
    columns = [(rows, length) for rows in all_rows for length in lengths]
    print(f"{'':34}" + "".join(f"{f'{rows}x{length}':>19}" for rows, length in columns) + "   error")
    floors = [rows * length * (RANK + ROTATED) * 2 / BYTES_PER_S * 1e6 for rows, length in columns]
    print(f"{'floor':34}" + "".join(f"{floor:>19.1f}" for floor in floors))
    plain = [plain_us(partial(programs[f"{rows} plain"], *cases[rows].given(length))) for rows, length in columns]
    print(
        f"{'plain':34}" + "".join(f"{us:>13.0f} {floor / us:>4.0%} " for us, floor in zip(plain, floors, strict=True))
    )
    compared = cases[all_rows[-1]].given(min(lengths))
    right = programs[f"{all_rows[-1]} plain"](*compared)
    for name in ways:
        if not all(f"{rows} {name}" in programs for rows in all_rows):
            continue
        calls = [partial(programs[f"{rows} {name}"], *cases[rows].given(length)) for rows, length in columns]
        try:
            times = kernels_us(calls)
            wrong = error(programs[f"{all_rows[-1]} {name}"](*compared), right)
        except Exception as reason:  # of the device: too much shared memory, for one
            print(f"{name:34} {type(reason).__name__}: {str(reason)[:160]}", flush=True)
            continue
        pairs = zip(times, floors, strict=True)
        text = "".join(
            f"{f'{own:.1f} + {parts:.1f}':>14} {floor / (own + parts):>4.0%}" for (own, parts), floor in pairs
        )
        print(f"{name:34}{text}   {wrong:.4f}", flush=True)


def prompts(heads: int, kind: str, keys: jax.Array) -> None:
    """Chunks of one prompt behind a context; FLOP are those of the form that is computed, below the diagonal."""
    spec = AttentionSpec(1, heads, RANK + ROTATED, 0.07, value_dim=RANK)
    for tokens, start in ((256, 8000), (2048, 0), (2048, 8000)):
        count = tokens // TILE
        at = jnp.arange(count, dtype=jnp.int32) * TILE
        tiles = Tiles(jnp.zeros(count, jnp.int32), start + at, jnp.full(count, TILE, jnp.int32), at, 0)
        q = jax.random.normal(jax.random.key(0), (tokens, 1, heads, RANK + ROTATED), jnp.bfloat16)
        given = q, keys, table_of(1, start + tokens), tiles
        flop = 2 * heads * (2 * RANK + ROTATED) * tokens * (start + tokens / 2)
        ways = ways_of(heads * TILE, kind)
        programs = compile_all({name: partial(compiled, spec, way, given) for name, way in ways.items()})
        right = jax.jit(lambda q, k, *others: tiled_attention(spec, q, (k, k), *others)[..., :RANK])
        print(f"{heads} heads, {tokens} tokens of a prompt at {start}: plain {plain_us(partial(right, *given)):.0f} µs")
        for name, program in programs.items():
            try:
                ((own, parts),) = kernels_us([partial(program, *given)])
                wrong = error(program(*given), right(*given))
            except Exception as reason:
                print(f"  {name}: {type(reason).__name__}: {str(reason)[:160]}", flush=True)
                continue
            speed = flop / (own + parts) / 1e6
            print(f"  {name:34}{own:.0f} + {parts:.0f} µs, {speed:.0f} TFLOP/s; error {wrong:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", type=int, default=[16, 128])
    parser.add_argument("--rows", default="1,32,256")
    parser.add_argument("--lengths", default="1000,8000,64000")
    parser.add_argument("--ways", choices=["all", "chosen"], default="all")
    parser.add_argument("--prompts", action="store_true")
    given = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error(f"this kernel is for a GPU; JAX has a {jax.default_backend()}")
    all_rows, lengths = ([int(one) for one in text.split(",")] for text in (given.rows, given.lengths))
    keys = pool()
    for heads in given.heads:
        decodes(heads, all_rows, lengths, given.ways, keys)
        if given.prompts:
            prompts(heads, given.ways, keys)


if __name__ == "__main__":
    main()
