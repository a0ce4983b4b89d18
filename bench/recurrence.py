"""Single tokens of recurrent layers on this GPU, one layer of Qwen3-Next, by plain XLA and by the kernels.

    python bench/recurrence.py [--rows 1,8,32,128] [--ways all] [--only recur convolve layer mixed]

Times are those of the device, by its profile: of plain XLA all kernels of a call, of a kernel its own. The state is
given away and returned, as in a step, and each call has other slots than those before, so that no cache has theirs. The
floor is the time to read and write the matrices of all rows once at 4.2 TB/s. `layer` lists all that runs in a layer of
decodes, and `mixed` all of the recurrence of decodes beside a prompt of 512 tokens: nothing there should move states.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_time import Kernel, kind, profiled
from device_time import kernels as device_kernels

from quire.models.context import PlatformOps
from quire.models.params import Param
from quire.models.parts.gated_delta import gated_delta
from quire.ops.gpu.kernels import GPU
from quire.ops.gpu.recurrence import TILING, Tiling, convolve_single, recur_single
from quire.ops.pages import TILE, Tiles
from quire.ops.recurrence import PLAIN, Recurrence, RecurrentKernels, RecurrentOps, RecurrentState
from quire.ops.recurrent_spec import RecurrentSpec
from quire.ops.slot_access import SlotAccess, slot_access

SPEC, EMBED, SLOTS = RecurrentSpec(16, 2, 128, 128, 512, 4, corrects=True), 2048, 128
BYTES_PER_S, CALLS, LIMIT_S = 4.2e12, 6, 50
STATE = (SLOTS + 1, SPEC.key_heads, SPEC.group, SPEC.key_dim, SPEC.value_dim)
INPUTS = (SLOTS + 1, SPEC.taps - 1, SPEC.key_heads, SPEC.channels)
TILINGS = [
    *(Tiling(8, warps) for warps in (1, 2)),
    *(Tiling(16, warps) for warps in (1, 2, 4)),
    *(Tiling(32, warps) for warps in (2, 4, 8)),
    *(Tiling(64, warps) for warps in (4, 8)),
    *(Tiling(128, warps) for warps in (8, 16)),
]


def numbers(*shape: int, dtype: str = "float32") -> jax.Array:
    """Made on the device."""
    return jax.jit(lambda: jax.random.normal(jax.random.key(sum(shape)), shape, dtype) * 0.1)()


def tokens_of(count: int) -> Recurrence:
    heads = count, SPEC.key_heads
    of_heads = -jnp.abs(numbers(*heads, SPEC.group))
    keys = numbers(2, *heads, SPEC.key_dim)
    return Recurrence(keys[0], keys[1], numbers(*heads, SPEC.group, SPEC.value_dim), of_heads, jnp.exp(of_heads))


def accesses(rows: int, prompt: int = 0) -> Iterator[SlotAccess]:
    """Of one step after the other, forever. The prompt's slot is the last one."""
    first = 0
    make = jax.jit(partial(slot_access, num_slots=SLOTS))
    while True:
        single = (np.arange(rows) + first) % (SLOTS - (prompt > 0))
        first += rows
        slots = np.concatenate([single, np.full(prompt, SLOTS - 1)]).astype(np.int32)
        positions = np.concatenate([np.full(rows, 500), np.arange(prompt)]).astype(np.int32)
        at = np.arange(0, prompt, TILE)
        columns = (
            (single, np.full(len(at), SLOTS - 1)),
            (np.full(rows, 500), at),
            (np.ones(rows), np.full(len(at), TILE)),
            (np.arange(rows), rows + at),
        )
        tiles: Any = Tiles(*(jnp.asarray(np.concatenate(one), jnp.int32) for one in columns), num_single=rows)
        yield jax.block_until_ready(make(jnp.asarray(slots), jnp.asarray(positions), tiles))


class Runner:
    """Compiled programs (arguments, state, access) -> (out, state), and the one state that they change."""

    def __init__(self, state: Callable[[], Any]) -> None:
        self._make, self._state = state, state()
        self._accesses: dict[tuple[int, int], Iterator[SlotAccess]] = {}

    def compile_all(self, made: dict[str, tuple[Callable[..., Any], Any, tuple[int, int]]]) -> dict[str, Any]:
        """Side by side, and each runs once. One that fails is told, and left out."""
        found: dict[str, Any] = {}

        def compiled(call: Callable[..., Any], given: Any, access: SlotAccess) -> Any:
            return jax.jit(call, donate_argnums=1).lower(given, self._state, access).compile()

        for of in {of for _, _, of in made.values()}:
            self._accesses.setdefault(of, accesses(*of))
        with ThreadPoolExecutor(12) as threads:
            futures = {
                name: threads.submit(compiled, call, given, next(self._accesses[of]))
                for name, (call, given, of) in made.items()
            }
        for name, future in futures.items():
            try:
                found[name] = future.result(), *made[name][1:]
                self._run(found[name], next(self._accesses[made[name][-1]]))
            except Exception as reason:  # whatever a compiler or a device has to say
                found.pop(name, None)
                self._state = self._make()
                print(f"{name}: {type(reason).__name__}: {str(reason)[:160]}", flush=True)
        return found

    def _run(self, program: Any, access: SlotAccess) -> None:
        compiled, given, _ = program
        out, self._state = compiled(given, self._state, access)
        jax.block_until_ready(out)

    def profile(self, programs: list[Any]) -> list[Kernel]:
        """The device's kernels of CALLS runs of each."""
        planned = [(program, next(self._accesses[program[-1]])) for program in programs for _ in range(CALLS)]

        def run() -> float:
            for program, access in planned:
                self._run(program, access)
            return 0.0

        return device_kernels(profiled(run)[1])

    def all_us(self, program: Any) -> float:
        """Of one call, all kernels together."""
        return sum(one.ended_ns - one.begun_ns for one in self.profile([program])) / 1e3 / CALLS

    def own_us(self, programs: list[Any], name: str) -> list[float]:
        """The middle time of the kernel of this name in each."""
        found = [one for one in self.profile(programs) if name in one.name]
        assert len(found) == len(programs) * CALLS, f"{len(found)} kernels {name}"
        times = np.asarray([one.ended_ns - one.begun_ns for one in found]).reshape(-1, CALLS)
        return [float(us) for us in np.median(times, axis=1) / 1e3]


def print_row(name: str, times: list[float], floors: list[float] | None = None) -> None:
    shares = [f"{'':6}"] * len(times)
    if floors is not None:
        shares = [f"{floor / us:6.0%}" for us, floor in zip(times, floors, strict=True)]
    print(f"{name:16}" + "".join(f"{us:>9.1f}{share}" for us, share in zip(times, shares, strict=True)), flush=True)


def recur(all_rows: list[int], tilings: list[Tiling]) -> None:
    """The recurrence alone."""
    runner = Runner(lambda: numbers(*STATE))

    def by(tiling: Tiling) -> Callable[..., Any]:
        return lambda tokens, matrices, access: recur_single(True, tokens, matrices, access.tiles, tiling=tiling)

    ways: dict[str, Callable[..., Any]] = {"plain": partial(PLAIN.recur, True)}
    ways |= {f"{one.block} x {one.num_warps}": by(one) for one in tilings}
    begun, tokens = time.perf_counter(), {rows: tokens_of(rows) for rows in all_rows}
    made = {f"{rows} {way}": (call, tokens[rows], (rows, 0)) for rows in all_rows for way, call in ways.items()}
    programs = runner.compile_all(made)
    print(f"{len(made)} programs compiled in {time.perf_counter() - begun:.0f} s; µs, and the part of 4.2 TB/s")
    print(f"{'rows':16}" + "".join(f"{rows:>9}      " for rows in all_rows))
    floors = [rows * 2 * 4 * float(np.prod(STATE[1:])) / BYTES_PER_S * 1e6 for rows in all_rows]
    print_row("floor", floors)
    print_row("plain", [runner.all_us(programs[f"{rows} plain"]) for rows in all_rows], floors)
    left = [way for way in ways if way != "plain" and all(f"{rows} {way}" in programs for rows in all_rows)]
    columns = [runner.own_us([programs[f"{rows} {way}"] for way in left], "recur_single") for rows in all_rows]
    for way, times in zip(left, zip(*columns, strict=True), strict=True):
        chosen = " *" if way == f"{TILING.block} x {TILING.num_warps}" else ""
        print_row(way + chosen, list(times), floors)


def convolve(all_rows: list[int]) -> None:
    """The convolution alone."""
    runner = Runner(lambda: numbers(*INPUTS, dtype="bfloat16"))
    weight = numbers(SPEC.key_heads, SPEC.channels, SPEC.taps, dtype="bfloat16")
    ways = {"plain": PLAIN.convolve, "kernel": convolve_single}

    def run(call: Callable[..., Any], given: tuple[jax.Array, jax.Array], inputs: jax.Array, access: SlotAccess) -> Any:
        return call(*given, None, inputs, access)

    x = {rows: numbers(rows, SPEC.key_heads, SPEC.channels, dtype="bfloat16") for rows in all_rows}
    made = {
        f"{rows} {way}": (partial(run, call), (x[rows], weight), (rows, 0))
        for rows in all_rows
        for way, call in ways.items()
    }
    programs = runner.compile_all(made)
    for way in ways:
        print_row(f"convolve {way}", [runner.all_us(programs[f"{rows} {way}"]) for rows in all_rows])


def listed(runner: Runner, made: dict[str, Any]) -> None:
    """All kernels of each program, those that take most first."""
    for name, program in runner.compile_all(made).items():
        spent: dict[str, list[float]] = defaultdict(list)
        for one in runner.profile([program]):
            spent[kind(one.name)[:48]].append((one.ended_ns - one.begun_ns) / 1e3)
        total, count = (sum(map(of, spent.values())) / CALLS for of in (sum, len))
        print(f"{name}: {total:.1f} µs in {count:.0f} kernels", flush=True)
        for kernel, times in sorted(spent.items(), key=lambda item: -sum(item[1]))[:10]:
            print(f"  {kernel:50}{len(times) / CALLS:>6.0f} x {np.mean(times):8.2f} µs", flush=True)


def layer(rows: int) -> None:
    """A whole layer of decodes, with its products."""
    mixer = gated_delta("layer", SPEC, EMBED, 1e-6)
    weights: Any = jax.tree.map(
        lambda param: numbers(*param.shape, dtype="float32" if param.is_float32 else "bfloat16"),
        mixer.params(),
        is_leaf=lambda one: isinstance(one, Param),
    )

    def run(recurrent: RecurrentKernels, given: Any, state: Any, access: SlotAccess) -> Any:
        ops = PlatformOps(attend=lambda *_: None, norms=GPU.decode_norms, recurrent=RecurrentOps(recurrent))
        out, after = mixer(*given, None, RecurrentState(*state, access), ops)
        return out, (after.inputs, after.matrices)

    given = weights, numbers(rows, EMBED, dtype="bfloat16")
    ways = {"plain": PLAIN, "recurrence": PLAIN._replace(recur=GPU.recurrent.recur), "both kernels": GPU.recurrent}
    runner = Runner(lambda: (numbers(*INPUTS, dtype="bfloat16"), numbers(*STATE)))
    listed(runner, {f"layer, {rows} rows, {way}": (partial(run, of), given, (rows, 0)) for way, of in ways.items()})


def mixed(rows: int, prompt: int) -> None:
    """The recurrence of decodes beside a prompt."""
    runner, tokens = Runner(lambda: numbers(*STATE)), tokens_of(rows + prompt)
    ways = {"plain": PLAIN, "kernel": GPU.recurrent}
    name = f"{rows} rows beside {prompt} tokens"
    listed(runner, {f"{name}, {way}": (partial(of.recur, True), tokens, (rows, prompt)) for way, of in ways.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,32,128")
    parser.add_argument("--ways", choices=["all", "chosen"], default="all")
    parser.add_argument("--only", nargs="+", default=["recur", "convolve", "layer", "mixed"])
    given = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error(f"these kernels are for a GPU; JAX has a {jax.default_backend()}")
    begun, all_rows = time.perf_counter(), [int(one) for one in given.rows.split(",")]
    parts: dict[str, Callable[[], None]] = {
        "recur": partial(recur, all_rows, TILINGS if given.ways == "all" else [TILING]),
        "convolve": partial(convolve, all_rows),
        "layer": partial(layer, 32),
        "mixed": partial(mixed, 32, 512),
    }
    for name in given.only:
        if time.perf_counter() - begun > LIMIT_S:
            print(f"{name} is left out: {LIMIT_S} s are over")
            continue
        try:
            parts[name]()
        except Exception as reason:  # the others can still be measured
            print(f"{name}: {type(reason).__name__}: {str(reason)[:400]}", flush=True)
        print(f"-- {name}: after {time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
