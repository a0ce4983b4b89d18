"""The products of experts with few rows on a GPU, for many blocks of each kernel, and the small kernels around them.

    python bench/few_expert_rows.py [--only qwen3-30b-a3b gpt-oss-20b mxfp4 small] [--seconds 80]
    python bench/few_expert_rows.py --check       # the variants against plain products, interpreted, on any machine

Times are those of a kernel on the device, by its profile: the middle of eight calls that visit different experts, so
that no cache holds what they read. A step has eight tokens; of those one is real, or all are. The floor is the time of
reading each expert that is visited, once, at 4.2 TB/s. `lanes` has no tensor cores, and multiplies the first row alone:
it shows what such a kernel could gain. `with sum` also weights and adds up the experts of the row.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product as pairs
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from device_time import kernels as device_kernels
from device_time import profiled
from gpu_experts import BYTES_A_SECOND, DTYPE, SHAPES, Shape, coded
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.models.parts.feed_forward import gate_of
from quire.ops.expert_choice import Shares
from quire.ops.gpu.add_norm import add_norm, add_visits_norm
from quire.ops.gpu.expert_choice import choose
from quire.ops.gpu.expert_product import ExpertBlocks, blocks_of, expert_product
from quire.ops.gpu.expert_weights import form_of
from quire.ops.gpu.tiles import array, whole
from quire.ops.weights.coded import float_scales, four_bit_floats
from quire.ops.weights.four_bit_experts import FourBitExperts
from quire.ops.weights.visit_sums import VisitSums

TOKENS, CALLS = 8, 8
ROWS = 16  # of a block of the device's products
CASES = {"qwen3-30b-a3b": "float", "gpt-oss-20b": "float", "mxfp4": "mxfp4"}

# Columns, inputs, warps, stages; with J gates and ups are one block.
GATED = """32,64,2,6 32,64,2,8 32,64,2,4 16,64,2,8 16,128,2,6 32,128,2,4 32,128,4,4 64,64,4,4 64,64,4,6 32,64,4,6,J
32,64,4,8,J 32,128,4,4,J 32,128,4,5,J 16,64,2,8,J 16,128,2,6,J 16,128,4,4,J 64,64,4,5,J 8,128,1,6,J 16,256,2,4,J"""
DOWN = """64,64,4,4 64,64,4,6 64,64,4,8 32,64,2,6 32,64,2,8 32,64,4,6 32,128,2,4 32,128,2,6 32,128,4,4 16,128,1,6
16,128,2,6 16,256,2,4 64,128,4,3 64,128,4,4 64,128,4,5 128,64,4,4 128,64,8,5 32,256,2,3"""
GATED_STEPS = """32,128,2,4 32,128,2,6 16,128,1,4 16,128,1,6 64,128,4,4 8,128,1,3,J 8,128,1,4,J 8,128,1,6,J 8,128,1,8,J
16,128,2,3,J 16,128,2,4,J 16,128,2,6,J 16,128,1,4,J 32,128,4,3,J 32,128,4,4,J 32,128,4,6,J 64,128,4,4,J 64,128,8,4,J"""
DOWN_STEPS = """64,128,4,4 64,128,4,3 64,128,4,6 64,128,4,8 32,128,2,4 32,128,2,6 32,128,2,8 16,128,1,3 16,128,1,4
16,128,1,6 16,128,1,8 32,128,1,4 128,128,4,4 128,128,8,4"""
LANES = {
    "gate_up": "2,1024,4 4,1024,4 2,2048,8 4,2048,8 1,1024,4 2,256,1",
    "down": "4,1024,4 8,1024,4 2,1024,4 4,256,1 8,256,1 16,256,1",
}
LANES_WITH_SUM = "2,1024,4 4,1024,8 2,256,1 1,256,1"


class Variant(NamedTuple):
    told: str
    call: Callable[..., jax.Array]  # of x, experts, shares and the weight
    most_real: int = TOKENS  # rows that it can multiply


class Case(NamedTuple):
    """One of the two products of a model's experts."""

    name: str
    part: str
    shape: Shape
    x: jax.Array
    weight: Any
    gate: Any

    @property
    def floor_bytes(self) -> float:
        """Of one expert."""
        return self.shape.expert_bytes * (2 if self.part == "gate_up" else 1) / 3


def lanes(
    columns: int,
    chunk: int,
    warps: int,
    x: jax.Array,
    expert: jax.Array,
    share: jax.Array,
    weight: jax.Array,
    *,
    gate: Any = None,
    adds_up: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """The first token's products: [chosen, outputs], or their sum by shares [1, outputs]. All that a program reads of
    a weight is asked for at once."""
    parts = 1 if gate is None else 2
    matrices = weight.reshape(len(weight), parts, -1, weight.shape[-1])
    chosen, outputs = expert.shape[1], matrices.shape[2]
    visits = range(chosen) if adds_up else range(1)
    out = array((1 if adds_up else chosen, outputs), jnp.float32 if gate is None else x.dtype)

    def kernel(x_ref: Any, expert_ref: Any, share_ref: Any, weight_ref: Any, out_ref: Any) -> None:
        inputs = weight_ref.shape[3]
        column = (pl.program_id(0) * columns + jnp.arange(columns))[:, None]
        chunks = [first + jnp.arange(chunk)[None, :] for first in range(0, inputs, chunk)]
        choices = [visit if adds_up else pl.program_id(1) for visit in visits]
        experts = [expert_ref[0, choice] for choice in choices]

        def load(ref: Any, at: jax.Array, rows: int) -> jax.Array:
            if inputs % chunk == 0:
                return plgpu.load(ref)
            return plgpu.load(ref, mask=jnp.broadcast_to(at < inputs, (rows, chunk)), other=0.0)

        loaded = {
            (visit, part, number): load(weight_ref.at[experts[visit], part, column, at], at, columns)
            for visit, part, (number, at) in pairs(visits, range(parts), enumerate(chunks))
        }
        sums: list[Any] = [0.0] * parts
        for visit, choice in enumerate(choices):
            row = jnp.minimum(choice, x_ref.shape[1] - 1)
            own: list[Any] = [0.0] * parts
            for number, at in enumerate(chunks):
                some = load(x_ref.at[0, row, at], at, 1).astype(jnp.float32)
                for part in range(parts):
                    own[part] = own[part] + loaded[visit, part, number].astype(jnp.float32) * some
            by = share_ref[0, choice] if adds_up else 1.0
            sums = [total + one * by for total, one in zip(sums, own, strict=True)]
        totals = [one.sum(axis=1) for one in sums]
        if gate is not None:
            totals = [gate(*(one.astype(x_ref.dtype).astype(jnp.float32) for one in totals))]
        place = 0 if adds_up else pl.program_id(1)
        plgpu.store(out_ref.at[place, column[:, 0]], totals[0].astype(out_ref.dtype), mask=column[:, 0] < outputs)

    operands = x, expert, share, matrices
    found: jax.Array = pl.pallas_call(
        kernel,
        grid=(-(-outputs // columns), 1 if adds_up else chosen),
        in_specs=[whole(operand) for operand in operands],
        out_specs=whole(out),
        out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="expert_product",
    )(*operands)
    return found


def blocks_from(told: str, *, is_of_steps: bool) -> ExpertBlocks:
    numbers, joins = told.removesuffix(",J"), told.endswith(",J")
    return ExpertBlocks(ROWS, *map(int, numbers.split(",")), is_of_steps=is_of_steps, joins_parts=joins)


def variants(case: Case, *, interpret: bool = False) -> Iterator[Variant]:
    is_of_steps, is_gated = case.shape.kind == "mxfp4", case.gate is not None

    def by_blocks(x: jax.Array, expert: jax.Array, _: Any, weight: Any, blocks: ExpertBlocks) -> jax.Array:
        out = expert_product(x, expert, weight, None, case.gate, blocks=blocks, interpret=interpret)
        assert out is not None
        return out

    form = form_of(case.x, case.weight, interpret)
    assert form is not None
    outputs = case.shape.mlp if is_gated else case.shape.embed
    expert = jnp.zeros((TOKENS, case.shape.chosen), jnp.int32)
    now = blocks_of(expert, case.shape.num_experts, outputs, form, gated=is_gated)
    yield Variant(f"now {tuple(now)[1:]}", partial(by_blocks, blocks=now))
    texts = {(False, False): DOWN, (False, True): GATED, (True, False): DOWN_STEPS, (True, True): GATED_STEPS}
    for told in texts[is_of_steps, is_gated].split():
        blocks = blocks_from(told, is_of_steps=is_of_steps)
        if blocks != now:
            yield Variant(told, partial(by_blocks, blocks=blocks))
    if is_of_steps:
        return
    for told in LANES[case.part].split():
        made = partial(lanes, *map(int, told.split(",")), gate=case.gate, interpret=interpret)
        yield Variant(f"lanes {told}", made, 1)
    for told in () if is_gated else LANES_WITH_SUM.split():
        made = partial(lanes, *map(int, told.split(",")), adds_up=True, interpret=interpret)
        yield Variant(f"lanes with sum {told}", made, 1)


def cases(name: str, shape: Shape) -> Iterator[Case]:
    block = shape.block()
    param = {"gate_up": block.gate_up, "down": block.down}
    for part, inputs in (("gate_up", shape.embed), ("down", shape.mlp)):
        x = jax.random.normal(jax.random.key(1), (TOKENS, 1 if part == "gate_up" else shape.chosen, inputs), DTYPE)
        weight = _drawn(param[part].shape, shape.kind)
        yield Case(name, part, shape, x, weight, gate_of(block.activation) if part == "gate_up" else None)


@partial(jax.jit, static_argnums=(0, 1))
def _drawn(shape: tuple[int, ...], kind: str) -> Any:
    return coded(0.02 * jax.random.normal(jax.random.key(2), shape, DTYPE), kind)


def routes(shape: Shape, real: int) -> list[jax.Array]:
    """The experts of each call, [tokens, chosen]: no two calls of one row visit the same, as far as there are others.
    Padding visits those of the first row."""
    chance, found = np.random.default_rng(0), []
    order = np.resize(chance.permutation(shape.num_experts), (CALLS, shape.chosen))
    for call in range(CALLS):
        expert = np.argsort(chance.random((TOKENS, shape.num_experts)), axis=1)[:, : shape.chosen]
        expert[0] = order[call]
        expert[real:] = expert[0]
        found.append(jnp.asarray(expert, jnp.int32))
    return found


def device_us(runs: list[Callable[[int], Any]], kernel: str) -> list[float]:
    """The middle of the times of a kernel that each of these launches once a call, given its number."""
    for run in runs:
        jax.block_until_ready(run(0))  # type: ignore[no-untyped-call]

    def all_calls() -> float:
        for run, call in pairs(runs, range(CALLS)):
            jax.block_until_ready(run(call))  # type: ignore[no-untyped-call]
        return 0.0

    events = device_kernels(profiled(all_calls)[1])
    times = [one.ended_ns - one.begun_ns for one in events if kernel in one.name]
    if len(runs) > 1 and len(times) != CALLS * len(runs):  # the profile lost some: each by itself
        return [device_us([run], kernel)[0] for run in runs]
    each = len(times) // len(runs)
    return [float(np.median(times[at * each : (at + 1) * each])) / 1e3 for at in range(len(runs))]


def compiled(variant: Variant, *given: Any) -> Any:
    """The program, or the first line of an error."""
    try:
        return jax.jit(variant.call).lower(*given).compile()
    except Exception as error:  # a block that is too large must not end the run
        return (str(error).splitlines() or [repr(error)])[0][:90]


def measured(case: Case) -> Iterator[str]:
    share = jnp.full((TOKENS, case.shape.chosen), 1 / case.shape.chosen, jnp.float32)
    chosen = {real: routes(case.shape, real) for real in (1, TOKENS)}
    tried = list(variants(case))
    with ThreadPoolExecutor(16) as threads:
        given = case.x, chosen[1][0], share, case.weight
        programs = list(threads.map(lambda variant: compiled(variant, *given), tried))
    took: dict[tuple[str, int], float] = {}
    floors = {}
    for real, experts in chosen.items():
        floors[real] = (
            np.mean([len(np.unique(one)) for one in experts]) * case.floor_bytes / BYTES_A_SECOND * 1e6
        )  # in microseconds
        fit = [
            (variant.told, program)
            for variant, program in zip(tried, programs, strict=True)
            if not isinstance(program, str) and real <= variant.most_real
        ]
        runs = [
            partial(lambda program, experts, call: program(case.x, experts[call], share, case.weight), program, experts)
            for _, program in fit
        ]
        took |= {(told, real): us for (told, _), us in zip(fit, device_us(runs, "expert_product"), strict=True)}
    yield f"{case.name} {case.part}: floor {floors[1]:.1f} µs of 1 row, {floors[TOKENS]:.1f} of {TOKENS}"
    order = sorted(zip(tried, programs, strict=True), key=lambda one: took.get((one[0].told, 1), 1e9))
    for variant, program in order:
        if isinstance(program, str):
            yield f"  {variant.told}: {program}"
            continue
        one, many = took[variant.told, 1], took.get((variant.told, TOKENS))
        others = "" if many is None else f"  {many:7.1f} ({many / floors[TOKENS]:.2f})"
        yield f"  {variant.told:34} {one:7.1f} ({one / floors[1]:.2f}){others}"


def small() -> Iterator[str]:
    """The kernels between products."""
    for name, shape in SHAPES.items():
        scores = jax.random.normal(jax.random.key(0), (TOKENS, shape.num_experts))
        x = jax.random.normal(jax.random.key(1), (TOKENS, shape.embed), DTYPE)
        visits = jax.random.normal(jax.random.key(2), (TOKENS, shape.chosen, shape.embed))
        share = jnp.ones((TOKENS, shape.chosen))
        plain = jax.jit(lambda x, weight: add_norm(x, x, weight, 1e-6, 0.0))
        sums = jax.jit(lambda x, visits, share: add_visits_norm(x, VisitSums(visits, share, x.dtype), x[0], 1e-6, 0.0))
        choice = jax.jit(partial(choose, chosen=shape.chosen, shares=Shares.OF_CHOSEN))
        each = (
            ("choose_experts", lambda _, scores=scores, choice=choice: choice(scores)),
            ("add_norm", lambda _, x=x, plain=plain: plain(x, x[0])),
            ("add_visits_norm", lambda _, x=x, v=visits, s=share, sums=sums: sums(x, v, s)),
        )
        told = (f"{kernel} {device_us([run], kernel)[0]:.2f}" for kernel, run in each)
        yield f"{name}, {TOKENS} rows, µs: {', '.join(told)}"


def widened(weight: FourBitExperts) -> jax.Array:
    coded_weight = weight.coded()
    codes = jnp.stack([coded_weight.codes & 15, coded_weight.codes >> 4], axis=-1).reshape(weight.shape)
    return four_bit_floats(codes.astype(jnp.int32)) * jnp.repeat(float_scales(coded_weight.scales), 32, axis=-1)


def check() -> None:
    """Every variant on small shapes, interpreted."""
    for kind, shape in (
        ("float", Shape(8, 4, 96, 160)),
        ("float", Shape(64, 4, 80, 96)),
        ("mxfp4", Shape(8, 4, 96, 160)),
    ):
        for case in cases(kind, replace(shape, kind=kind)):
            expert = routes(case.shape, TOKENS)[0]
            share = jax.random.uniform(jax.random.key(3), expert.shape)
            wide = case.weight if kind == "float" else widened(case.weight)
            rows = jnp.broadcast_to(case.x, (*expert.shape, case.x.shape[-1])).astype(jnp.float32)
            with jax.default_matmul_precision("highest"):
                wanted = jnp.einsum("tci,tc...i->tc...", rows, wide[expert].astype(jnp.float32))
            if case.gate is not None:
                both = wanted.astype(DTYPE).astype(jnp.float32)
                wanted = case.gate(both[:, :, 0, 0], both[:, :, 0, 1])
            for variant in variants(case, interpret=True):
                found = jax.jit(variant.call)(case.x, expert, share, case.weight).astype(jnp.float32)
                right = wanted if variant.most_real > 1 else wanted[0]
                right = jnp.einsum("co,c->o", wanted[0], share[0])[None] if "sum" in variant.told else right
                error = float(jnp.max(jnp.abs(found - right)) / jnp.max(jnp.abs(right)))
                assert error < 0.02, f"{kind} {case.part} {variant.told}: {error}"
            print(f"{kind} {shape.num_experts} experts, {case.part}: right", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=(*CASES, "small"), default=[*CASES, "small"])
    parser.add_argument("--seconds", type=float, default=80.0, help="after which no other product is begun")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    if given.check:
        return check()
    begun = time.perf_counter()
    if "small" in given.only:
        print(*small(), sep="\n", flush=True)
    for name, kind in CASES.items():
        shape = replace(SHAPES["gpt-oss-20b" if name == "mxfp4" else name], kind=kind)
        for case in cases(name, shape) if name in given.only else ():
            if time.perf_counter() - begun > given.seconds:
                return print(f"no time for {case.name} {case.part}")
            print(*measured(case), f"  {time.perf_counter() - begun:.0f} s", sep="\n", flush=True)
    return None


if __name__ == "__main__":
    main()
