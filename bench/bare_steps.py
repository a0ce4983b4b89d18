"""Single programs without an engine around them: how long each takes to compile, and how long a step of it is.

    python bench/bare_steps.py random:qwen3-0.6b --rows 8,64,192 --tokens 8192 [--few-rows 256]

Decodes, sampling included, of as many rows at position 300, and prompts alone of as many tokens. The pages are all one
and the same, so attention reads less than it would; products are what they are. On a GPU XLA chooses between its own
products and the library's for decodes of up to `--few-rows`.
"""

import argparse
import time
from collections.abc import Callable

import jax
import numpy as np

from quire.config import Config
from quire.core.plan import Chunk, Kind
from quire.engine import build
from quire.executor import programs
from quire.executor.batch import Ints, Launch, Packer, num_groups
from quire.executor.buckets import Bucket
from quire.executor.programs import Key, Programs
from quire.executor.step import State
from quire.files import silent

POSITION, NUM_PAGES = 300, 2048


def step_ms(step: Callable[[State], State], state: State, count: int) -> tuple[State, float]:
    """Milliseconds of one of so many steps, after two that are not counted."""
    for number in range(count + 2):
        if number == 2:
            jax.block_until_ready(state)  # type: ignore[no-untyped-call]
            begun = time.perf_counter()
        state = step(state)
    jax.block_until_ready(state)  # type: ignore[no-untyped-call]
    return state, (time.perf_counter() - begun) * 1000 / count


def measured(made: Programs, key: Key, packed: Ints, state: State, count: int) -> tuple[State, str]:
    begun_s, used_s = time.perf_counter(), time.process_time()
    program = made._compile(key)
    took_s, used_s = time.perf_counter() - begun_s, time.process_time() - used_s

    def step(state: State) -> State:
        after: State = program(made.weights, state, packed)[0]
        return after

    state, ms = step_ms(step, state, count)
    return state, f"{ms:.3f} ms; compiled in {took_s:.2f} s, {used_s:.2f} s of processors"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", default="8,64,256", help="of decodes")
    parser.add_argument("--tokens", default="", help="of prompts alone, several with commas")
    parser.add_argument("--few-rows", type=int, default=programs.FEW_ROWS)
    given = parser.parse_args()
    programs.FEW_ROWS = given.few_rows
    plan = build.plan_deployment(Config(model=given.model))
    shapes = plan.shapes.with_pages(NUM_PAGES)
    made = Programs(plan.model, build._weights(plan, silent), shapes, threads=2, mesh=plan.mesh)
    state = made.empty_state()
    for rows in map(int, given.rows.split(",")):
        packed = np.zeros((4, rows), np.int32)
        packed[0], packed[1], packed[3] = np.arange(rows) % shapes.num_slots, POSITION, 1
        state, told = measured(made, ("decode", rows), packed, state, count=40)
        print(f"decode of {rows} rows: {told}", flush=True)
    for tokens in map(int, filter(None, given.tokens.split(","))):
        chunk = Chunk(0, 0, 0, 0, Kind.PREFILL, 0, tokens, (), True)
        launch = Launch(fills=[0], num_groups=num_groups(chunk))
        bucket = shapes.buckets.covering(Bucket(0, launch.num_groups, alone=1), shapes.buckets.all())
        if bucket is None:
            parser.error(f"no step has {tokens} tokens; the largest has {shapes.max_prefill_tokens}")
        packed = Packer(shapes.num_slots, shapes.page_size).pack(launch, (chunk,), set(), bucket)
        state, told = measured(made, bucket, packed, state, count=4)
        print(f"{bucket}: {told}", flush=True)
    made.close()


if __name__ == "__main__":
    main()
