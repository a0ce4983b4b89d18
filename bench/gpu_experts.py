"""The experts of one layer on a GPU: the kernel beside XLA's ragged product, and beside the bytes that must be read.

    python bench/gpu_experts.py [--model qwen3-30b-a3b gpt-oss-20b] [--rows 1,32,256,4096] [--only kernel plain]
    python bench/gpu_experts.py --weights mxfp4 --only kernel                      # or fp8, int8

Every token visits random experts, given in place of a router, which is not part of the time. Several layers with
weights of their own run after each other in one program, so that no cache holds what the next one reads. The floor is
the time of reading each expert that some token visits, once, at 4.2 TB/s.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product as pairs
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quire.models.context import PlatformOps
from quire.models.params import Param, ParamTree, Tensor
from quire.models.parts.feed_forward import Experts
from quire.ops.attention.reference import whole_sequence
from quire.ops.gates import SILU, ClampedGate
from quire.ops.gpu.expert_product import expert_product
from quire.ops.weights.activation_rounding import Rounding
from quire.ops.weights.coded import Coded
from quire.ops.weights.experts import NONE, kernels_of
from quire.ops.weights.floats import PlainWeight
from quire.ops.weights.four_bit_experts import FourBitExperts

BYTES_A_SECOND, LAYERS, ROUNDS = 4.2e12, 4, 8
DTYPE = "bfloat16"
BYTES = {"float": 2.0, "fp8": 1.0, "int8": 1.0, "mxfp4": 17 / 32}  # of a number of a weight


@dataclass(frozen=True)
class Given:
    """A router whose choices are among the weights."""

    chosen: int

    def params(self) -> ParamTree:
        return {}

    def __call__(self, weights: ParamTree, *_: object) -> tuple[jax.Array, jax.Array]:
        return weights["share"], weights["expert"]


@dataclass(frozen=True)
class Shape:
    num_experts: int
    chosen: int
    mlp: int
    embed: int
    is_biased: bool = False

    kind: str = "float"  # of weights

    @property
    def expert_bytes(self) -> float:
        return 3 * self.mlp * self.embed * BYTES[self.kind]

    def block(self) -> Experts:
        def param(*shape: int) -> Param:
            return Param(shape, (None,) * len(shape), (Tensor("drawn", shape),))

        gate_up, down = (self.num_experts, 1, 2, self.mlp, self.embed), (self.num_experts, self.embed, self.mlp)
        biases = (param(*gate_up[:-1]), param(*down[:-1])) if self.is_biased else (None, None)
        gate = ClampedGate(1.702, 7.0) if self.is_biased else SILU
        return Experts(gate, Given(self.chosen), param(*gate_up), param(*down), *biases)

    def weights(self) -> list[ParamTree]:
        block = self.block()
        given = {"gate_up": block.gate_up, "down": block.down}
        if self.is_biased:
            given |= {"gate_up_bias": block.gate_up_bias, "down_bias": block.down_bias}

        @jax.jit
        def draw(key: jax.Array) -> ParamTree:
            drawn = {
                name: 0.02 * jax.random.normal(jax.random.fold_in(key, at), param.shape, DTYPE)
                for at, (name, param) in enumerate(given.items())
            }
            return {name: one if name.endswith("bias") else coded(one, self.kind) for name, one in drawn.items()}

        return [draw(jax.random.key(layer)) for layer in range(LAYERS)]

    def routes(self, tokens: int) -> list[ParamTree]:
        """The choices of so many tokens, by layer."""
        chance = np.random.default_rng(0)
        found = []
        for _ in range(LAYERS):
            expert = np.argsort(chance.random((tokens, self.num_experts)), axis=1)[:, : self.chosen]
            share = jnp.full((tokens, self.chosen), 1 / self.chosen, jnp.float32)
            found.append({"share": share, "expert": jnp.asarray(expert, jnp.int32)})
        return found


def coded(weight: jax.Array, kind: str) -> Any:
    """Codes of any numbers: of eight bits with a scale for each output, or of four with one for each 32 inputs."""
    if kind == "float":
        return PlainWeight(weight)
    lead, inputs = weight.shape[:-1], weight.shape[-1]
    if kind == "mxfp4":
        codes = (weight.reshape(*lead, inputs // 2, 2)[..., 0] * 5000).astype(jnp.int32).astype(jnp.uint8)
        scales = jnp.full((*lead, inputs // 32), 120, jnp.uint8)
    else:
        numbers = weight * (127 / 0.1)
        codes = jnp.round(numbers).astype(jnp.int8) if kind == "int8" else numbers.astype(jnp.float8_e4m3fn)
        scales = jnp.full((*lead, 1), 0.1 / 127, jnp.float32)
    made = Coded(
        codes=codes,
        scales=scales,
        zeros=None,
        index=None,
        input_scale=None,
        input_zero=None,
        shape=weight.shape,
        num_contracted=1,
        is_of_experts=True,
        bits=4 if kind == "mxfp4" else 8,
        group=32 if kind == "mxfp4" else inputs,
        rounding=None if kind == "mxfp4" else Rounding(is_float=kind == "fp8"),
        is_direct=True,
    )
    return FourBitExperts.of(made) or made


SHAPES = {
    "qwen3-30b-a3b": Shape(128, 8, 768, 2048),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, is_biased=True),
}


def layer_s(layer: Callable[[jax.Array, ParamTree], jax.Array], x: jax.Array, weights: list[ParamTree]) -> float:
    """Seconds of one layer, of many that each take what the last one gave."""

    @jax.jit
    def many(x: jax.Array, weights: list[ParamTree]) -> jax.Array:
        def each(_: Any, x: jax.Array) -> jax.Array:
            for one in weights:
                x = layer(x, one)
            return x

        return jax.lax.fori_loop(0, ROUNDS, each, x)

    many(x, weights).block_until_ready()
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        many(x, weights).block_until_ready()
        times.append(time.perf_counter() - begun)
    return min(times) / ROUNDS / len(weights)


def floor_s(shape: Shape, routes: list[ParamTree]) -> float:
    used = np.mean([len(np.unique(np.asarray(route["expert"]))) for route in routes])
    return float(used) * shape.expert_bytes / BYTES_A_SECOND


def blocks_timed(name: str, shape: Shape, rows: list[int], ways: list[str]) -> Iterator[str]:
    """Whole feed-forward blocks by each way."""
    block, weights = shape.block(), shape.weights()
    kernels = {"kernel": kernels_of(expert_product), "plain": NONE}
    for way, tokens in pairs(ways, rows):
        routes = shape.routes(tokens)
        all_weights = [{**one, "router": route} for one, route in zip(weights, routes, strict=True)]

        def layer(x: jax.Array, given: ParamTree, way: str = way) -> jax.Array:
            return (x + block(given, x, PlatformOps(whole_sequence, experts=kernels[way]))) * jnp.asarray(0.7, x.dtype)

        x = jax.random.normal(jax.random.key(0), (tokens, shape.embed), DTYPE)
        floor = floor_s(shape, routes)
        try:
            took = layer_s(layer, x, all_weights)
        except jax.errors.JaxRuntimeError as error:
            yield f"{name}, {tokens} rows, {way}: {str(error).splitlines()[0][:100]}"
            continue
        flop = 2 * tokens * shape.chosen * 3 * shape.mlp * shape.embed
        yield (
            f"{name}, {tokens} rows, {way}: {took * 1e6:.1f} µs; floor {floor * 1e6:.1f} µs, {took / floor:.2f} of it; "
            f"{flop / took / 1e12:.0f} TFLOP/s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--rows", default="1,32,256,4096")
    parser.add_argument("--only", nargs="+", choices=("kernel", "plain"), default=["kernel", "plain"])
    parser.add_argument("--weights", choices=BYTES, default="float")
    given = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error(f"these kernels are for a GPU; JAX has a {jax.default_backend()}")
    rows = [int(count) for count in given.rows.split(",")]
    for name in given.model:
        shape = replace(SHAPES[name], kind=given.weights)
        for line in blocks_timed(name, shape, rows, given.only):
            print(line, flush=True)


if __name__ == "__main__":
    main()
