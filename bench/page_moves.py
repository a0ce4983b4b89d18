"""Pages between their arrays and blocks on this GPU, at the shapes of an 8B model, by plain XLA and by the kernels.

    python bench/page_moves.py [--pages 16,64] [--dtype bfloat16]
    python bench/page_moves.py --tiny     # on a CPU, to see that it runs: small arrays, kernels interpreted, no times

Times are those of the device, by its profile, medians of twelve calls: of all kernels of a call together, and from the
beginning of the first to the end of the last. The page arrays are given away and returned where they are written, and
each call has other pages than the one before. The floor is the time to read and write these pages once at 4.2 TB/s.
Temporary memory is what the compiled program says. Before a program is timed, what it moves is compared.
"""

import argparse
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from device_time import kernels as device_kernels
from device_time import profiled

from quire.executor.host.pinned_blocks import block_pages
from quire.ops.gpu.move_pages import gather, scatter
from quire.ops.page_moves import PLAIN_MOVES, PageMoves

BYTES_PER_S, CALLS = 4.2e12, 12


class Sizes(NamedTuple):
    """Page arrays of a model."""

    num_arrays: int
    num_pages: int
    page: tuple[int, ...]  # [page_size, kv_heads, head_dim]


LLAMA_8B = Sizes(64, 2048, (32, 8, 128))
TINY = Sizes(9, 200, (4, 1, 8))


class Bench:
    """Page arrays, which programs change, and the programs for `count` pages."""

    def __init__(self, sizes: Sizes, dtype: Any, arrays: list[jax.Array], count: int) -> None:
        self.arrays = arrays
        self._rows, self._numbers = block_pages(count), self._page_numbers(sizes.num_pages, count)
        block = (self._rows, sizes.num_arrays, *sizes.page)
        self._blocks = [numbers(at, block, dtype) for at in range(count // self._rows)]

    @staticmethod
    def _page_numbers(num_pages: int, count: int) -> Iterator[jax.Array]:
        """Of one call after the other, forever."""
        chance = np.random.default_rng(count)
        while True:
            shuffled = 1 + chance.permutation(num_pages - 1).astype(np.int32)
            for begin in range(0, num_pages - count, count):
                yield jax.block_until_ready(jnp.asarray(shuffled[begin : begin + count]))

    def compile(self, direction: str, moves: PageMoves) -> Any:
        """A program (arrays, page numbers) -> blocks, or (arrays, page numbers, blocks) -> arrays."""
        given = self.arrays, next(self._numbers)
        if direction == "gather":
            return jax.jit(lambda arrays, numbers: moves.gather(arrays, numbers, self._rows)).lower(*given).compile()
        return jax.jit(moves.scatter, donate_argnums=0).lower(*given, self._blocks).compile()

    def check(self, direction: str, program: Any) -> None:
        """Pages are where they belong, bit by bit. The first one goes nowhere."""
        numbers, left = next(self._numbers), slice(0, None)
        if direction == "scatter":
            self._blocks = [one[::-1] for one in self._blocks]  # others than those that are there
            self.arrays = program(self.arrays, numbers.at[0].set(0), self._blocks)
            blocks, left = self._blocks, slice(1, None)
        else:
            blocks = program(self.arrays, numbers)
        for at, array in enumerate(self.arrays):
            found = np.concatenate([np.asarray(one[:, at]) for one in blocks])[left]
            assert found.tobytes() == np.asarray(array[numbers])[left].tobytes(), f"{direction}: array {at}"

    def times(self, direction: str, program: Any) -> tuple[float, float, float]:
        """Kernels of a call, µs that they take together, and µs from the first to the last."""
        planned = [next(self._numbers) for _ in range(CALLS)]

        def run() -> float:
            for numbers in planned:
                if direction == "gather":
                    jax.block_until_ready(program(self.arrays, numbers))
                else:
                    self.arrays = jax.block_until_ready(program(self.arrays, numbers, self._blocks))
            return 0.0

        run()
        found = device_kernels(profiled(run)[1])
        each, rest = divmod(len(found), CALLS)
        assert rest == 0 < each, f"{len(found)} kernels in {CALLS} calls"
        calls = [found[begin : begin + each] for begin in range(0, len(found), each)]
        busy = [sum(one.ended_ns - one.begun_ns for one in call) for call in calls]
        whole = [max(one.ended_ns for one in call) - call[0].begun_ns for call in calls]
        return each, float(np.median(busy)) / 1e3, float(np.median(whole)) / 1e3


@partial(jax.jit, static_argnums=(1, 2))
def numbers(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Some that every type has, made on the device."""
    return jax.random.randint(jax.random.key(seed), shape, -7, 8, jnp.int8).astype(dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", default="16,64", help="that a program moves; several with commas")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    if not given.tiny and jax.default_backend() != "gpu":
        parser.error(f"these kernels are for a GPU; JAX has a {jax.default_backend()}. --tiny interprets them")
    sizes, dtype = TINY if given.tiny else LLAMA_8B, jnp.dtype(given.dtype)
    interpret = jax.default_backend() != "gpu"
    ways = {
        "plain": PLAIN_MOVES,
        "kernels": PageMoves(partial(gather, interpret=interpret), partial(scatter, interpret=interpret)),
    }
    arrays = [numbers(100 + at, (sizes.num_pages, *sizes.page), dtype) for at in range(sizes.num_arrays)]
    print(f"{sizes.num_arrays} arrays {[sizes.num_pages, *sizes.page]} of {dtype}; {jax.devices()[0].device_kind}")
    print(f"{'':16}{'way':10}{'compiled s':>11}{'temp MiB':>10}{'kernels':>9}{'µs':>9}{'in all':>9}{'floor':>9}")
    for count in map(int, given.pages.split(",")):
        floor = 2 * count * sizes.num_arrays * int(np.prod(sizes.page)) * dtype.itemsize / BYTES_PER_S * 1e6
        bench = Bench(sizes, dtype, arrays, count)
        for direction in ("gather", "scatter"):
            for way, moves in ways.items():
                begun = time.perf_counter()
                program = bench.compile(direction, moves)
                compiled_s = time.perf_counter() - begun
                bench.check(direction, program)
                temporary = program.memory_analysis().temp_size_in_bytes / 2**20
                line = f"{direction + ' ' + str(count):16}{way:10}{compiled_s:>11.2f}{temporary:>10.1f}"
                if not interpret:
                    each, busy, whole = bench.times(direction, program)
                    line += f"{each:>9}{busy:>9.1f}{whole:>9.1f}{floor:>9.1f}"
                print(line, flush=True)
        arrays = bench.arrays


if __name__ == "__main__":
    main()
