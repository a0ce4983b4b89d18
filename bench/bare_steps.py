"""Single programs without an engine around them: how long they take to compile, and how long a step of each is.

    python bench/bare_steps.py random:llama-3.1-8b --rows 8,64,256 --tokens 0,64,500,2000 [--quantize fp8]

Every number of decodes, at position 300, beside every number of prompt tokens of one new sequence, sampling included,
as the executor runs them: with the shape that it would choose. A step with both is compared with the sum of its parts.
The pages are all one and the same, so attention reads less memory than it would; products are what they are. On a GPU
XLA chooses between its own products and the library's for decodes of up to `--few-rows`.

With `--reproducible` steps are those of a reproducible engine, whose programs are held to the bits of a row first. Its
price is the difference to a run without it.

With `--context N` every decode has N positions before it, in pages of its own: those of a pool of up to 16 GiB, several
times over where it is too small. Attention then reads as much memory as it would.

With `--least N` steps run in the smallest programs for N tokens or more, so that padding is most of what they have.

With `--kernels N` each step is also shown by its kernels, the N that take most, under JAX's profiler.

With `--adapters N` there is room for so many of rank 16, and each step runs without rows that have one, and with all
rows over all of them. Their numbers are zeros, which take a GPU as long as others.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable

import jax
import numpy as np
from device_time import profiled, report

from quire.core.plan import Chunk, Kind, StepPlan
from quire.engine.building.deployment import Deployment
from quire.engine.building.model_weights import load_model
from quire.engine.building.plan import plan_deployment
from quire.executor.launch import Launch, Packer, launches_of
from quire.executor.programs import compiler, compiler_options
from quire.executor.programs.compiler import Compiler
from quire.executor.programs.kinds import Key
from quire.executor.programs.ladder import StepShape
from quire.executor.programs.programs import Programs
from quire.executor.sample.sampler import Features
from quire.executor.slots import ADAPTER
from quire.executor.step import State
from quire.files.progress import silent
from quire.ops.weights import coded
from quire.settings.config import Config
from quire.settings.memory import MAX_ARRAY_NUMBERS

POSITION, NUM_PAGES = 300, 2048
MAX_POOL_BYTES = 16 << 30  # of pages with contexts
PROFILED = 6  # steps whose kernels are listed
PLAIN = Features(*[False] * 5)


class Steps:
    """Runs launches on padding pages, each program compiled when it is first needed."""

    def __init__(self, config: Config, context: int | None = None, least: int = 0) -> None:
        self.least = least  # tokens of a program
        deployment = plan_deployment(config)
        self.position = POSITION if context is None else context
        self.shapes = deployment.shapes.with_pages(NUM_PAGES if context is None else pool_of(deployment, context))
        weights = load_model(deployment, silent)
        compiler = Compiler(deployment.model, weights, self.shapes, deployment.mesh)
        self.programs = Programs(compiler, threads=min(16, os.cpu_count() or 1))
        self.programs.adapters.clear()
        self.state = self.programs.compiler.empty_state()
        slots = self.state.slots  # with tokens that differ, so that rows visit different experts
        tokens = np.random.default_rng(0).integers(0, deployment.model.vocab_size, slots.history.shape, np.int32)
        history = jax.device_put(tokens, slots.history.sharding)
        self.state = self.state._replace(slots=slots._replace(history=history))
        if context is not None:
            self._give_pages()
        words = -(-deployment.model.vocab_size // 32)
        self.masks = {size: np.zeros((size, words), np.uint32) for size in self.shapes.ladder.sample_sizes}

    def _give_pages(self) -> None:
        """To each slot pages for its context, in an order in which memory does not have them."""
        table = self.state.slots.page_table
        rows, groups, _ = table.shape
        count = self.position // self.shapes.page_size + 1
        pages = np.random.default_rng(1).permutation(np.arange(1, self.shapes.num_pages))
        entries = np.zeros(table.shape, np.int32)
        entries[:-1, :, :count] = np.resize(pages, (rows - 1, groups, count))
        slots = self.state.slots._replace(page_table=jax.device_put(entries, table.sharding))
        self.state = self.state._replace(slots=slots)

    def give_adapters(self, count: int) -> None:
        """To each slot one of the first `count`; to none where that is 0."""
        slots = self.state.slots
        numbers = np.arange(slots.int_params.shape[0]) % count + 1 if count else 0
        self.state = self.state._replace(slots=slots._replace(int_params=slots.int_params.at[:, ADAPTER].set(numbers)))

    def step(self, rows: int, tokens: int) -> Launch:
        slots = self.shapes.num_slots
        rows = min(rows, slots - bool(tokens))
        chunks = [Chunk(n, 0, 0, n, Kind.DECODE, self.position, 1, (), True) for n in range(rows)]
        chunks += [Chunk(slots, 0, 0, slots - 1, Kind.PREFILL, 0, tokens, (), True)] * bool(tokens)
        (launch,) = launches_of(StepPlan(1, tuple(chunks), num_prefills=int(tokens > 0)), self.shapes)
        return launch

    def keys(self, rows: int, tokens: int) -> list[Key]:
        """The programs of a step: one for decodes alone where there is such a one, or the forward pass and sampling."""
        launch, ladder = self.step(rows, tokens), self.shapes.ladder
        among = [shape for shape in ladder.all() if shape.tokens >= self.least]
        shape = ladder.choose(launch.shape, launch.num_tiles, among)
        assert shape is not None, f"no step has {launch.num_tokens} tokens; the largest has {ladder.max_tokens}"
        if shape.decodes_only and not self.shapes.fixed_order:
            return [("decode", shape.tokens)]
        size = next(size for size in ladder.sample_sizes if size >= len(launch.sampled))
        way = "filtered" if self.shapes.fixed_order else "plain"
        return [shape, (way if self.shapes.specialised else "any", size)]

    def compile(self, steps: list[tuple[int, int]]) -> float:
        """Seconds to compile the programs of all these steps side by side."""
        begun = time.perf_counter()
        keys = list(dict.fromkeys(key for step in steps for key in self.keys(*step)))
        for _ in self.programs.compile_together(keys, keys):
            pass
        for key in keys:
            self.state = self.programs.checked(key, self.state)
        return time.perf_counter() - begun

    def ms(self, rows: int, tokens: int, count: int) -> tuple[float, str]:
        """Milliseconds of one of so many steps, after two that are not counted, and what ran."""
        launch = self.step(rows, tokens)
        key, *sampling = self.keys(rows, tokens)
        run = self._two(launch, key, sampling[0]) if isinstance(key, StepShape) else self._fused(launch, key)
        for number in range(count + 2):
            if number == 2:
                jax.block_until_ready(self.state)  # type: ignore[no-untyped-call]
                begun = time.perf_counter()
            self.state = run(self.state)
        jax.block_until_ready(self.state)  # type: ignore[no-untyped-call]
        told = ", ".join(str(one) if isinstance(one, StepShape) else f"{one[0]} {one[1]}" for one in (key, *sampling))
        return (time.perf_counter() - begun) * 1000 / count, told

    def kernels(self, rows: int, tokens: int, most: int) -> list[str]:
        """The kernels of such steps."""
        seconds, profile = profiled(lambda: self.ms(rows, tokens, PROFILED - 2)[0] / 1000)
        return report(profile, seconds, most)

    def _fused(self, launch: Launch, key: Key) -> Callable[[State], State]:
        program = self.programs.get(key)
        packed = Packer(self.shapes).pack(launch, StepShape(int(key[1]), decodes_only=True))
        return lambda state: program(self.programs.weights, state, packed)[0]  # type: ignore[no-any-return]

    def _two(self, launch: Launch, shape: StepShape, sampling: Key) -> Callable[[State], State]:
        made, packer = self.programs, Packer(self.shapes)
        packed, size = packer.pack(launch, shape), int(sampling[1])
        forward, sample = made.get(shape), made.get(sampling)
        samples = packer.pack_samples(launch, size, PLAIN)
        masks = jax.device_put(self.masks[size])

        def run(state: State) -> State:
            state, computed = forward(made.weights, state, packed)
            slots, _ = sample(made.compiler.head, state.slots, computed.hidden, samples, masks)
            return state._replace(slots=slots)

        return run


def pool_of(deployment: Deployment, context: int) -> int:
    """Pages for a context in every slot, as far as there is room."""
    shapes = deployment.shapes
    most = min(MAX_POOL_BYTES // deployment.page_bytes, MAX_ARRAY_NUMBERS // deployment.page_numbers)
    return min(most, shapes.num_slots * shapes.num_groups * (context // shapes.page_size + 1) + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", default="8,32,64,128,256", help="decodes")
    parser.add_argument("--tokens", default="0,64,500,2000", help="prompt tokens beside them")
    parser.add_argument("--count", type=int, default=20, help="steps of each")
    parser.add_argument("--least", type=int, default=0, help="tokens that programs are for, at least")
    parser.add_argument("--context", type=int, help="positions before each decode")
    parser.add_argument("--quantize")
    parser.add_argument("--kv-cache-dtype")
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--reproducible", action="store_true")
    parser.add_argument("--few-rows", type=int, default=compiler.FEW_ROWS)
    parser.add_argument("--kernels", type=int, default=0, help="of each step that are listed")
    given = parser.parse_args()
    compiler.FEW_ROWS = compiler_options.FEW_ROWS = coded.FEW_ROWS = given.few_rows
    room = {"adapter_folder": tempfile.gettempdir(), "max_loras": given.adapters, "max_lora_rank": 16}
    most_rows = max(map(int, given.rows.split(",")))
    sizes = {"max_total_tokens": (given.context or 0) + 64, "max_batch_size": most_rows}
    steps = Steps(
        Config(
            model=given.model,
            quantize=given.quantize,
            kv_cache_dtype=given.kv_cache_dtype,
            reproducible=given.reproducible,
            **(room if given.adapters else {}),
            **(sizes if given.context is not None else {}),
        ),
        given.context,
        given.least,
    )
    all_tokens = [int(tokens) for tokens in given.tokens.split(",")]
    all_rows = [int(rows) for rows in given.rows.split(",")]
    took_s = steps.compile([(rows, tokens) for rows in (0, *all_rows) for tokens in all_tokens if rows or tokens])
    print(f"compiled in {took_s:.1f} s", flush=True)
    for count in (0, given.adapters) if given.adapters else (0,):
        if given.adapters:
            print(f"over {count} adapters:", flush=True)
        steps.give_adapters(count)
        tell(steps, all_rows, all_tokens, given.count)
    for rows in (0, *all_rows) if given.kernels else ():
        for tokens in [tokens for tokens in all_tokens if rows or tokens]:
            print(f"\n{PROFILED} steps of {rows} decodes and {tokens} prompt tokens", flush=True)
            print(*steps.kernels(rows, tokens, given.kernels), sep="\n", flush=True)
    steps.programs.close()


def tell(steps: Steps, all_rows: list[int], all_tokens: list[int], count: int) -> None:
    prompts = {tokens: steps.ms(0, tokens, count) for tokens in all_tokens if tokens}
    for tokens, (ms, told) in prompts.items():
        print(f"{tokens} prompt tokens: {ms:.2f} ms ({told})", flush=True)
    for rows in all_rows:
        alone, told = steps.ms(rows, 0, count)
        print(f"{rows} decodes: {alone:.2f} ms ({told})", flush=True)
        for tokens, (prompt, _) in prompts.items():
            ms, told = steps.ms(rows, tokens, count)
            parts = f"{alone + prompt:.2f} ms apart, {ms / (alone + prompt):.2f} of it"
            print(f"{rows} decodes beside {tokens} prompt tokens: {ms:.2f} ms; {parts} ({told})", flush=True)


if __name__ == "__main__":
    main()
