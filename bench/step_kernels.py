"""Kernels of a step of decodes beside its products and its attention, on this GPU: heads and their places, the gate of
a model's 8B shapes, and norms.

    python bench/step_kernels.py [--rows 8 64 256] [--gates 2048,8,16 2048,16,16]

Times are those of the kernel on the device, by its profile. A gate has its block, its warps, and the blocks on their
way while one is computed.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from coded_attention import kernel_us, pages_of

from quire.ops.attention.heads import Heads
from quire.ops.attention.rotation import Rotation
from quire.ops.gpu import rounded_rows
from quire.ops.gpu.add_norm import add_norm
from quire.ops.gpu.place_heads import place_heads
from quire.ops.pages import KVWriteTargets
from quire.ops.weights.rounded_rows import ScaledSums

KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE, EMBED, GATED = 8, 4, 128, 64, 4096, 14336
E4M3 = jnp.dtype("float8_e4m3fn")


def numbers(*shape: int, dtype: str = "bfloat16") -> jax.Array:
    return jax.random.normal(jax.random.key(sum(shape)), shape, dtype)


def sums(rows: int, *shape: int) -> ScaledSums:
    size = 1
    for one in shape:
        size *= one
    return ScaledSums(numbers(rows, *shape), jnp.ones((rows, 1)), jnp.ones(size), jnp.dtype("bfloat16"))


def placing(rows: int) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    shape = KV_HEADS, GROUP + 2, HEAD_DIM
    angles = numbers(rows, HEAD_DIM // 2, dtype="float32")
    rotation = Rotation(jnp.cos(angles), jnp.sin(angles))
    plain = numbers(rows + 1, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    targets = KVWriteTargets(jnp.arange(1, rows + 1), jnp.arange(rows) % PAGE_SIZE)
    for name, qkv in (("bfloat16", numbers(rows, *shape)), ("e4m3", sums(rows, *shape))):
        pages = pages_of((plain, plain), name)
        yield f"place_heads, {name}", place_heads, (Heads(qkv, rotation), pages, targets)


def gates(rows: int, chosen: list[str]) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    for one in chosen:
        block, warps, ahead = map(int, one.split(","))

        def gate(both: Any, block: int = block, warps: int = warps, ahead: int = ahead) -> Any:
            made = rounded_rows.gate(jax.nn.silu, both, E4M3, block=block, num_warps=warps, ahead=ahead)
            return made.codes, made.scales

        yield f"gate_round, {one}", gate, (sums(rows, 1, 2, GATED),)


def norms(rows: int) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    x, weight = numbers(rows, EMBED), numbers(EMBED)

    def rounding(x: jax.Array, out: ScaledSums, weight: jax.Array) -> Any:
        total, made = rounded_rows.add_norm(x, out, weight, 1e-5, 0.0, E4M3)
        return total, made.codes, made.scales

    yield "add_norm", lambda x, out, weight: add_norm(x, out, weight, 1e-5, 0.0), (x, x, weight)
    yield "add_norm_round", rounding, (x, sums(rows, EMBED), weight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 64, 256])
    parser.add_argument("--gates", nargs="+", default=["2048,8,16", "2048,16,16"])
    options = parser.parse_args()
    for rows in options.rows:
        for name, call, given in (*placing(rows), *gates(rows, options.gates), *norms(rows)):
            print(f"{rows} rows, {name}: {kernel_us(call, *given, kernel=name.split(',')[0]):.1f} µs", flush=True)


if __name__ == "__main__":
    main()
