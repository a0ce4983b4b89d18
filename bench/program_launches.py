"""What it takes to launch programs on a GPU, with and without CUDA graphs.

    python bench/program_launches.py --model random:llama-3.1-8b --tokens 4000 --resident 4 --host-cache-gib 20 \\
        --max-batch-prefill-tokens 4096 --few-programs
"""

import argparse
import statistics
import time
from typing import Any

import jax
from host_cache import add_options, build

from quire.engine.built import Built
from quire.executor.ladder import StepShape
from quire.executor.padding import run_on_padding
from quire.executor.program_order import place_sizes
from quire.executor.program_table import Key

LAUNCHES = 20
NO_GRAPHS = {"xla_gpu_graph_min_graph_size": 1_000_000}


def time_launches(built: Built, tokens: int) -> None:
    """Milliseconds of the host for each call, then until the device has ended, with memory as it was left and with
    other arrays allocated between the calls."""
    executor, programs = built.executor, built.executor.programs
    order, page_bytes = programs.order, executor.host_pages.page_bytes
    prompt = programs.table.forward(StepShape(3), 1)
    keys: list[Key] = [
        ("decode", 1), prompt, ("place", place_sizes(page_bytes)[-1]), ("place", 64), ("split", 64), ("start", 1),
        *[key for key in order.for_one(tokens) if isinstance(key, tuple) and key[0] == "plain"],
    ]  # fmt: skip
    compiler = programs.compiler
    traced = compiler._compile_traced

    def without_graphs(*given: Any, options: Any = None) -> Any:
        return traced(*given, options={**(options or {}), **NO_GRAPHS})

    for key in dict.fromkeys(keys):
        for name in ("as it is", "no graphs"):
            try:
                compiler._compile_traced = traced if name == "as it is" else without_graphs
                program = programs.get(key) if name == "as it is" else compiler.compile(key)
                for moves in (False, True):
                    called, ended = launches(built, program, key, moves)
                    print(f"{key!s:50s} {name:10s} {'other memory' if moves else 'same memory':12s} "
                          f"launched in {called:.2f} ms, ended after {ended:.2f}", flush=True)  # fmt: skip
            except Exception as error:  # of any kind: the other programs are timed all the same
                print(f"{key} {name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}", flush=True)
            finally:
                compiler._compile_traced = traced


def launches(built: Built, program: Any, key: Key, moves: bool) -> tuple[float, float]:
    executor, kept = built.executor, []
    called_s, ended_s, begun_s = [], [], 0.0

    def timed(*given: Any) -> Any:
        nonlocal begun_s
        jax.block_until_ready(given)
        begun_s = time.perf_counter()
        result = program(*given)
        called_s.append(time.perf_counter() - begun_s)
        jax.block_until_ready(result)
        ended_s.append(time.perf_counter() - begun_s)
        return result

    for number in range(LAUNCHES):
        if moves:
            kept = [jax.numpy.zeros((1 + number, 100_000 + 37_000 * at)) for at in range(8)]
        jax.block_until_ready((executor._state, kept))
        executor._state = run_on_padding(executor.programs, timed, key, executor._state)
    return 1000 * statistics.median(called_s[3:]), 1000 * statistics.median(ended_s[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    asked = parser.parse_args()
    time_launches(build(asked), asked.tokens + 3)


if __name__ == "__main__":
    main()
