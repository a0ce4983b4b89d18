"""The four products of a layer of an 8B model with e4m3 weights on this GPU: the kernel by its blocks, and XLA.

    python bench/eight_bit_kernel.py [--rows 1,8,16,32] [--forms kernel,plain,codes,XLA] [--sweep 8] [--seconds 140]

`kernel`: quire/ops/gpu/eight_bit_product.py with rows in bfloat16. `plain`: the
same, codes widened as Triton does it. `codes`: the kernel with rows that are e4m3 too, which
does not count what rounding them takes. `XLA`: codes widened inside its product up to 32 rows, codes by codes of the
library above. `--sweep`: rows for which every kind of blocks is timed, the fastest of each product in the line `best`.
Times are of the device, in microseconds: all launches of a product, with the sum of its parts. Every weight has several
copies, more than the caches hold. Once the seconds are over, what is left is not timed, and the table says so.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from device_time import kernels as device_kernels
from eight_bit_products import CODE, SHAPES, options_of, rows_of

from quire.ops.coded import FEW_ROWS
from quire.ops.gpu.eight_bit_product import EightBitBlocks, eight_bit_product
from quire.ops.gpu.tiles import power_of_two

LEAST_BYTES = 200_000_000  # of the copies of a weight
LEAST_COPIES = 4
CALLS = 5
SCALE = 1e-3
SOME = 61  # one output of so many is compared
FASTEST = 5  # kinds of blocks that are printed
MOST_OFF = 5e-3
GAP_US = 1.0  # between two launches of a graph: what the order of blocks in the report counts for each
# Columns, inputs, warps and stages, for up to 16 rows and for more.
NARROW = (
    (64, 256, 2, 3), (64, 256, 2, 4), (64, 128, 2, 4), (64, 128, 2, 6), (64, 512, 2, 3), (32, 256, 2, 4),
    (32, 512, 2, 3), (32, 512, 2, 4), (32, 256, 1, 3), (16, 512, 1, 3), (16, 512, 1, 4), (128, 128, 2, 4),
)  # fmt: skip
MIDDLE = ((64, 128, 2, 3), (64, 128, 2, 4), (64, 256, 2, 3), (128, 128, 2, 3))


Shape = tuple[int, int]


class Timed(NamedTuple):
    us: float
    launches: float
    off: float

    @property
    def cost(self) -> float:
        return self.us + GAP_US * self.launches


class Case(NamedTuple):
    """A program of all copies of a weight. `blocks`: None for those that the kernel chooses, and for XLA."""

    form: str
    rows: int
    shape: Shape
    blocks: EightBitBlocks | None


def marked(x: jax.Array) -> jax.Array:
    """A launch with a name that no product has, between the programs of a profile."""
    return jnp.sin(x)


@cache
def weights_of(shape: Shape) -> list[jax.Array]:
    copies = max(LEAST_COPIES, -(-LEAST_BYTES // (shape[0] * shape[1])))
    made = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16).astype(CODE))
    return [made(jax.random.key(copy)) for copy in range(copies)]


@cache
def some_weights(shape: Shape) -> Any:
    return np.asarray(weights_of(shape)[0]).astype(np.float32)[::SOME]


def given_of(case: Case) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    x = rows_of(case.rows, case.shape[1])
    rows = x.astype(CODE) if case.form == "codes" else x
    return rows, jnp.full(case.shape[0], SCALE, jnp.float32), weights_of(case.shape)


def form_of(case: Case) -> Any:
    if case.form == "XLA":
        return by_xla
    # Translated for one copy.
    once = jax.jit(partial(eight_bit_product, dtype=jnp.bfloat16, blocks=case.blocks, is_plain=case.form == "plain"))

    def by_kernel(x: jax.Array, scales: jax.Array, weights: list[jax.Array]) -> list[jax.Array]:
        return [once(x, codes, scales) for codes in weights]

    return by_kernel


def by_xla(x: jax.Array, scales: jax.Array, weights: list[jax.Array]) -> list[jax.Array]:
    is_few = len(x) <= FEW_ROWS
    rows, sums = (x, jnp.float32) if is_few else (x.astype(CODE), jnp.bfloat16)
    found = []
    for codes in weights:
        out = jnp.einsum("ti,oi->to", rows, codes.astype(rows.dtype), preferred_element_type=sums)
        found.append((out.astype(jnp.float32) * scales).astype(jnp.bfloat16))
    return found


def candidates(rows: int, shape: Shape) -> Iterator[EightBitBlocks]:
    """As many programs as keep a device busy, with four steps each or more."""
    outputs, inputs = shape
    for (columns, block, warps, stages), splits in product(NARROW if rows <= 16 else MIDDLE, (1, 2, 3, 4, 6, 8)):
        programs = -(-outputs // columns) * splits
        is_even = inputs % (block * splits) == 0 and inputs // (block * splits) >= 4
        least = 110 if columns >= 32 else 220
        if is_even and least <= programs <= (1800 if splits == 1 else 560):
            yield EightBitBlocks(max(8, power_of_two(rows)), columns, block, splits, warps, stages)


def off_by(case: Case, given: tuple[Any, ...], out: jax.Array) -> float:
    """The relative error of some outputs."""
    rows = rows_of(case.rows, case.shape[1]) if case.form == "XLA" else given[0]
    right = np.asarray(rows).astype(np.float32) @ some_weights(case.shape).T * SCALE
    return float(np.linalg.norm(np.asarray(out).astype(np.float32)[:, ::SOME] - right) / np.linalg.norm(right))


def compiled(cases: Sequence[Case]) -> dict[Case, Any]:
    """Programs, or what is wrong with them. XLA times its products, so its programs come one by one."""

    def compile_one(case: Case) -> Any:
        options = options_of(case.rows) if case.form == "XLA" else {}
        try:
            return jax.jit(form_of(case)).lower(*given_of(case)).compile(options)
        except Exception as error:  # what a compiler refuses is a line of the report
            return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"

    with ThreadPoolExecutor(1 if cases[0].form == "XLA" else 12) as pool:
        return dict(zip(cases, pool.map(compile_one, cases), strict=True))


def profiled(runs: Sequence[Callable[[], Any]]) -> list[list[float]]:
    """The microseconds of each launch of each run."""
    mark, one = jax.jit(marked), jnp.ones(8)
    jax.block_until_ready(mark(one))  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for run in runs:
                for _ in range(CALLS):
                    jax.block_until_ready(run())  # type: ignore[no-untyped-call]
                jax.block_until_ready(mark(one))  # type: ignore[no-untyped-call]
        (path,) = Path(folder).rglob("*.xplane.pb")
        kernels = device_kernels(jax.profiler.ProfileData.from_file(str(path)))
    parts: list[list[float]] = [[]]
    for kernel in kernels:
        if "sine" in kernel.name:
            parts.append([])
        else:
            parts[-1].append((kernel.ended_ns - kernel.begun_ns) / 1e3)
    if len(parts) == len(runs) + 1:
        return parts[:-1]
    if len(runs) == 1:  # the mark has another name here: it is one short launch of many
        return [[us for part in parts for us in part]]
    return [profiled([run])[0] for run in runs]


def measured(cases: Sequence[Case]) -> tuple[dict[Case, Timed], list[str]]:
    """What is right is timed, all in one profile; and lines about what is not."""
    programs, wrong, offs = compiled(cases), [], {}
    for case, program in programs.items():
        try:
            if isinstance(program, str):
                raise RuntimeError(program)
            given = given_of(case)
            offs[case] = off_by(case, given, program(*given)[0])
        except Exception as error:  # as above
            wrong.append(f"  {case}: {str(error)[:200]}")
    most = {case: 0.05 if case.form == "XLA" else MOST_OFF for case in offs}  # XLA's rounds rows
    wrong += [f"  {case} is WRONG, off by {off:.1e}" for case, off in offs.items() if not off <= most[case]]
    right = [case for case in offs if offs[case] <= most[case]]
    times = profiled([partial(programs[case], *given_of(case)) for case in right]) if right else []
    found = {}
    for case, launches in zip(right, times, strict=True):
        count = CALLS * len(weights_of(case.shape))
        found[case] = Timed(sum(launches) / count, len(launches) / count, offs[case])
    return found, wrong


def line(name: str, rows: int, found: Sequence[Timed | None]) -> str:
    cells = " ".join("       -" if one is None else f"{one.us:8.1f}" for one in found)
    there = [one for one in found if one is not None]
    if len(there) < len(SHAPES):
        return f"{rows:5d} {name:13s} {cells}"
    total = sum(one.us for one in there)
    rate = sum(outputs * inputs for outputs, inputs in SHAPES) / total / 1e6
    return f"{rows:5d} {name:13s} {cells} {total:8.1f} {rate:6.2f} {sum(one.launches for one in there):8.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,16,32")
    parser.add_argument("--forms", default="kernel,plain,codes,XLA")
    parser.add_argument("--sweep", default="")
    parser.add_argument("--seconds", type=float, default=140)
    arguments = parser.parse_args()
    forms, all_rows = arguments.forms.split(","), [int(one) for one in arguments.rows.split(",")]
    sweeps = {int(one) for one in arguments.sweep.split(",") if one}
    begun, found = time.monotonic(), dict[Case, Timed]()
    for form, rows in product(forms, all_rows):
        if time.monotonic() - begun > arguments.seconds:
            print(f"not timed: {form}, {rows} rows", flush=True)
            continue
        has_sweep = rows in sweeps and form != "XLA"
        kinds = [(shape, one) for shape in SHAPES for one in (None, *(candidates(rows, shape) if has_sweep else ()))]
        new, wrong = measured([Case(form, rows, *one) for one in kinds])
        found.update(new)
        print(f"{form}, {rows} rows: {len(new)} programs after {time.monotonic() - begun:.0f} s", flush=True)
        print(*wrong[:6], *([f"  {len(wrong)} such in all"] if len(wrong) > 6 else []), sep="\n", flush=True)
        for shape in SHAPES if has_sweep else ():
            ordered = sorted((one for one in new.items() if one[0].shape == shape), key=lambda one: one[1].cost)
            for case, one in ordered[:FASTEST]:
                blocks = tuple(case.blocks) if case.blocks else "default"
                print(f"  {shape[0]}x{shape[1]} {one.us:6.1f} {one.launches:3.1f} {blocks}")
    print(f" rows form          {' '.join(f'{o}x{i}'.rjust(8)[-8:] for o, i in SHAPES)}    layer   TB/s launches")
    for rows, form in product(all_rows, forms):
        chosen = [found.get(Case(form, rows, shape, None)) for shape in SHAPES]
        print(line(form, rows, chosen))
        if rows in sweeps and form != "XLA":
            of_shapes = [[one for case, one in found.items() if case[:3] == (form, rows, shape)] for shape in SHAPES]
            print(
                line(f"{form}, best", rows, [min(one, key=lambda it: it.cost, default=None) for one in of_shapes]),
                flush=True,
            )


if __name__ == "__main__":
    main()
