"""The compiled programs: all are made ahead, none on the request path."""

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import cache, partial
from logging import INFO, WARNING
from threading import Lock
from typing import Any, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from quire.executor.batch import NUM_FEATURES, Launch, Packer, sizes
from quire.executor.buckets import GROUP_SIZE, Bucket
from quire.executor.layer_state import page_layout
from quire.executor.program_store import ProgramStore
from quire.executor.sampler import Features
from quire.executor.shapes import Shapes
from quire.executor.slots import empty_slots, pack_starts, start_slots
from quire.executor.step import SamplingWay, State, decode, forward, sample_next
from quire.models.model import Model
from quire.models.params import ParamTree
from quire.ops.step_attention import kernels_for

log = logging.getLogger(__name__)

START_SIZES = (1, 8)  # slots that one call can start
WAYS = get_args(SamplingWay)

Options = dict[str, Any]  # of the compiler

# For the large products of prefills the library's own choice is as good as a search, and is there at once.
UNTUNED: Options = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
# Decodes of few rows gain from products that XLA writes itself; for more rows the library's are faster, although XLA,
# which times each alone, may choose its own.
FEW_ROWS = 32
OF_THE_LIBRARY: Options = {"xla_gpu_enable_triton_gemm": False}
# On a CPU XLA hands large reductions to a library that sums in another order than XLA does, so that a row's sums would
# depend on how many rows are beside it. This keeps all of them with XLA. The option is experimental.
OWN_REDUCTIONS: Options = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}

Key = Bucket | tuple[str, int]  # a forward pass by its bucket; starting, and each way of sampling, by their rows


class Programs:
    """Compiles on threads of its own. A program that is not ready when it is wanted is waited for, and counted."""

    def __init__(
        self,
        model: Model,
        weights: ParamTree,
        shapes: Shapes,
        threads: int,
        mesh: Mesh | None = None,
        store: ProgramStore | None = None,
        specialised: bool | None = None,
    ) -> None:
        self._store = store
        self._model = model
        # Flat, because every call walks what it is given.
        self.weights = tuple(jax.tree.leaves(weights))
        self._weights_structure = jax.tree.structure(weights)
        self._shapes = shapes
        self._mesh = mesh
        self._dtype = jax.tree.leaves(weights["norm"])[0].dtype  # never quantised
        num_devices = 1 if mesh is None else mesh.size
        self._kernels = kernels_for(jax.default_backend(), str(self._dtype), num_devices)
        # Where the host would wait for a branch that the device takes, and where it takes long to start a program, the
        # common cases have their own.
        self.is_specialised = jax.default_backend() == "gpu" if specialised is None else specialised
        self._ways = WAYS if self.is_specialised else WAYS[:1]
        # One group: the slots have one page table.
        self.layout = page_layout(
            model.layers, shapes.page_size, shapes.max_sequence_tokens, self._dtype, mesh, max_groups=1
        )
        self._whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
        self._state = self._state_structure()
        self._placement = None if mesh is None else jax.tree.map(lambda array: array.sharding, self._state)
        self._ready: dict[Key, Any] = {}
        self._chosen: dict[Bucket, Bucket] = {}  # among those that are ready
        self._compiling: dict[Key, Future[Any]] = {}
        self._rehearsed: set[Key] = set()
        self._pool = ThreadPoolExecutor(threads, "quire-compile")
        # On a GPU XLA times kernels for decodes, which busy processors disturb; so few are compiled at a time.
        self._tuning_pool = ThreadPoolExecutor(min(threads, 2), "quire-tune")
        # Tracing is Python's, and one thread's at a time: side by side, all would be traced before any is compiled.
        self._tracing = Lock()
        self._ahead = False  # whether everything was to be compiled before it is needed
        self.num_late = 0  # compilations on the request path although it was; stays 0

    def empty_state(self) -> State:
        pages = self.layout.empty(self._shapes.num_pages)
        return State(pages, jax.device_put(empty_slots(self._shapes), self._whole))

    def _state_structure(self) -> State:
        """Shapes and shardings of everything a step changes; the slots are whole on every device."""
        slots = jax.eval_shape(lambda: empty_slots(self._shapes))
        return State(
            self.layout.structure(self._shapes.num_pages),
            jax.tree.map(lambda array: _array(array.shape, array.dtype, self._whole), slots),
        )

    def compile_all(self) -> Iterator[float]:
        """Compile everything, the programs that can run any plan first, telling the share done."""
        self._ahead = True
        keys: list[Key] = [("start", size) for size in START_SIZES]
        for bucket in self._shapes.buckets.all():
            if self.is_specialised and not bucket.groups:
                keys += [("decode", bucket.rows), *[("burst", bucket.rows)] * (self._shapes.burst > 1)]
            keys += [bucket, *((way, bucket.num_samples) for way in self._ways)]
        return self._compile_together(keys, self._needed())

    @property
    def can_run_anything(self) -> bool:
        """Whether every plan finds a program that is ready; those still to come are faster for some plans."""
        self._collect()
        return all(key in self._ready for key in self._needed())

    def _needed(self) -> list[Key]:
        """What a server needs to begin; any other program can be done without."""
        needed: list[Key] = [("start", size) for size in START_SIZES]
        for bucket in self._shapes.buckets.first():
            needed += [bucket, ("any", bucket.num_samples)]
        return needed

    def largest_step_bytes(self) -> int:
        """What the largest step takes besides weights and state, as the compiler laid it out."""
        bucket = max(self._shapes.buckets.all(), key=lambda bucket: (bucket.num_tokens, bucket.num_samples))
        keys: list[Key] = [bucket, ("any", bucket.num_samples)]
        layouts = [program.memory_analysis() for program in self._pool.map(self._make, keys)]
        logits = bucket.num_samples * self._model.vocab_size * 4
        return sum(int(layout.temp_size_in_bytes) for layout in layouts) + logits

    def compile_for_one(self, num_tokens: int) -> Iterator[float]:
        """Compile what one sequence needs that runs alone, after a prompt of `num_tokens`; tells the share done."""
        buckets, most = self._shapes.buckets, self._shapes.max_prefill_tokens
        launches = [Bucket(0, -(-min(num_tokens, most) // GROUP_SIZE), alone=1), Bucket(1, 0)]
        if num_tokens > most:  # the chunks between, and the last
            launches += [Bucket(0, -(-length // GROUP_SIZE)) for length in (most, num_tokens % most or most)]
        found = [buckets.covering(launch, buckets.all()) for launch in launches]
        keys: list[Key] = [("start", START_SIZES[0])]
        for bucket in found:
            if bucket is not None:
                keys += [bucket, *((way, bucket.num_samples) for way in self._ways)]
        return self._compile_together(keys, keys)

    def _compile_together(self, keys: list[Key], needed: list[Key]) -> Iterator[float]:
        """Those of `keys` that are not ready or under way, side by side. Raises where one of the `needed` fails."""
        missing = [key for key in dict.fromkeys(keys) if key not in self._ready and key not in self._compiling]
        if self.is_specialised:
            missing.sort(key=_is_tuned_by_another)
        for key in missing:
            self._compiling[key] = self._begin(key)
        futures = {self._compiling[key]: key for key in missing}
        if missing:
            yield 0.0
        for done, future in enumerate(as_completed(futures), start=1):
            if futures[future] in needed:
                future.result()
            yield done / len(missing)

    def _begin(self, key: Key) -> Future[Any]:
        """Make a program on a thread. XLA times the products of decodes: once for all programs that have the same."""
        if not self.is_specialised or not (key[0] == "decode" or _is_tuned_by_another(key)):
            return self._pool.submit(self._make, key)
        other = self._compiling.get(("decode", key.rows if isinstance(key, Bucket) else key[1]))
        if other is None:
            return self._tuning_pool.submit(self._make, key)

        def make_after() -> Any:
            other.exception()  # whatever became of it; where it was cancelled, so is this
            return self._make(key)

        return self._pool.submit(make_after)

    def forward(self, rows: int, groups: int, scores: bool, alone: int = 0) -> tuple[Bucket, Callable[..., Any]]:
        """The smallest bucket for so many rows and groups among those that are ready, with what samples after it."""
        self._collect()
        launch = Bucket(rows, groups, scores, alone)
        if launch not in self._chosen:
            buckets = self._shapes.buckets
            ready = [key for key in self._ready if isinstance(key, Bucket) and ("any", key.num_samples) in self._ready]
            bucket = buckets.covering(launch, ready) or buckets.covering(launch, buckets.all())
            assert bucket is not None, f"no bucket for {rows} rows and {groups} groups"
            self._chosen[launch] = bucket
        bucket = self._chosen[launch]
        return bucket, self._get(bucket)

    def decode(self, rows: int, burst: int) -> tuple[Bucket, Callable[..., Any]] | None:
        """The bucket for so many rows alone, with what computes and samples so many tokens of each; None where no one
        program does."""
        bucket, _ = self.forward(rows, 0, False)
        if bucket.groups or burst not in (1, self._shapes.burst):
            return None
        program = self._ready.get(("decode" if burst == 1 else "burst", bucket.rows))
        return None if program is None else (bucket, program)

    def sample(self, rows: int, features: Features) -> Callable[..., Any]:
        """What samples from so many rows, by the fastest program that is ready and does what they ask for."""
        ways = [] if any(features[1:]) else [("filtered" if features.filters else "plain", rows)]
        ready = [way for way in ways if way in self._ready]
        return self._get(ready[0] if ready else ("any", rows))

    def start(self, size: int) -> Callable[..., Any]:
        return self._get(("start", size))

    def rehearse(self, state: State) -> State:
        """Run every program that is ready once, on padding: a GPU takes its time to load one that it has not run.

        Not while others are compiled whose kernels are timed.
        """
        if any(key[0] == "decode" and not future.done() for key, future in self._compiling.items()):
            return state
        self._collect()
        packer = Packer(self._shapes.num_slots, self._shapes.page_size)
        for key in [key for key in self._ready if key not in self._rehearsed]:
            self._rehearsed.add(key)
            program = self._ready[key]
            if isinstance(key, Bucket):
                state = program(self.weights, state, packer.pack(Launch(), (), set(), key))[0]
                continue
            kind, size = key
            if kind in ("decode", "burst"):
                packed = packer.pack_decodes(Launch(), (), set(), Bucket(size, 0))
                state = program(self.weights, state, packed)[0]
            elif kind == "start":
                state = state._replace(slots=program(state.slots, pack_starts([], size, self._shapes)))
            else:
                logits = jnp.zeros((size, self._model.vocab_size), jnp.float32)
                masks = jnp.zeros((size, -(-self._model.vocab_size // 32)), jnp.uint32)
                packed = np.full(3 * size + NUM_FEATURES, self._shapes.num_slots, np.int32)
                packed[size:] = 0
                state = state._replace(slots=program(state.slots, logits, packed, masks)[0])
        return state

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._tuning_pool.shutdown(wait=False, cancel_futures=True)

    def _collect(self) -> None:
        for key in [key for key, future in self._compiling.items() if future.done()]:
            future = self._compiling.pop(key)
            if (error := future.exception()) is None:
                self._ready[key] = future.result()
                self._chosen.clear()
            else:  # a larger program runs in its place
                log.error("a program could not be compiled: %s: %r", key, error)

    def _get(self, key: Key) -> Callable[..., Any]:
        if key not in self._ready:
            self._collect()
        if key not in self._ready:
            self.num_late += self._ahead
            log.log(WARNING if self._ahead else INFO, "a step waits for a program to be compiled: %s", key)
            compiling = self._compiling.pop(key, None)
            self._ready[key] = self._make(key) if compiling is None else compiling.result()
            self._chosen.clear()
        program: Callable[..., Any] = self._ready[key]
        return program

    def _make(self, key: Key) -> Any:
        """From the store, or compiled and stored."""
        begun_s = time.monotonic()
        name = "-".join([self._kernels.attend.__module__, *(str(int(p) if isinstance(p, bool) else p) for p in key)])
        program = None if self._store is None else self._store.load(name)
        is_kept = program is not None
        if program is None:
            program = self._compile(key)
            if self._store is not None:
                self._store.save(name, program)
        # With the time that others were traced in.
        log.debug("%s %s in %.2f s", "loaded" if is_kept else "compiled", key, time.monotonic() - begun_s)
        return program

    def _compile(self, key: Key) -> Any:
        if isinstance(key, Bucket):
            return self._compile_forward(key)
        kind, size = key
        slots = self._state.slots
        if kind in ("decode", "burst"):
            return self._compile_decode(Bucket(size, 0), 1 if kind == "decode" else self._shapes.burst)
        if kind == "start":
            return self._compile_traced(start_slots, 0, self._whole, slots, pack_starts([], size, self._shapes))
        logits = _array((size, self._model.vocab_size), jnp.float32)
        packed = _array((3 * size + NUM_FEATURES,), jnp.int32)
        masks = _array((size, -(-self._model.vocab_size // 32)), jnp.uint32)
        function = partial(sample_next, cast(SamplingWay, kind), cuts=self._kernels.filter_cuts)
        return self._compile_traced(function, 0, self._whole, slots, logits, packed, masks)

    def _compile_forward(self, bucket: Bucket) -> Any:
        step = partial(forward, self._model, self._kernels, self.layout, bucket)
        size = sum(sizes(bucket, self._shapes.page_size))
        return self._compile_step(step, (size,), (self._placement, self._whole, self._whole), _options(bucket))

    def _compile_decode(self, bucket: Bucket, count: int) -> Any:
        step = partial(decode, self._model, self._kernels, self.layout, bucket, count)
        return self._compile_step(step, (4, bucket.rows), (self._placement, self._whole), _options(bucket))

    def _compile_step(self, step: Callable[..., Any], packed: tuple[int, ...], places: Any, options: Options) -> Any:
        def with_flat_weights(weights: tuple[jax.Array, ...], state: State, packed: jax.Array) -> Any:
            return step(jax.tree.unflatten(self._weights_structure, weights), state, packed)

        inputs = _array(packed, jnp.int32)
        return self._compile_traced(with_flat_weights, 1, places, self.weights, self._state, inputs, options=options)

    def _compile_traced(
        self, function: Callable[..., Any], donated: int, places: Any, *inputs: Any, options: Options | None = None
    ) -> Any:
        where = {} if self._mesh is None else {"out_shardings": places}
        with self._tracing:
            lowered = jax.jit(function, donate_argnums=donated, **where).lower(*inputs)
        return lowered.compile({**(cpu_options() if jax.default_backend() == "cpu" else {}), **(options or {})})


@cache
def cpu_options() -> Options:
    """OWN_REDUCTIONS where this XLA knows the option. Only sums over a vocabulary depend on it: norms are native."""
    try:
        jax.jit(lambda x: x).lower(0).compile(OWN_REDUCTIONS)
    except jax.errors.JaxRuntimeError as error:
        log.info("this XLA does not know %s: %s", next(iter(OWN_REDUCTIONS)), str(error).partition("\n")[0])
        return {}
    return OWN_REDUCTIONS


def _options(bucket: Bucket) -> Options:
    if jax.default_backend() != "gpu":
        return {}
    if bucket.groups:
        return UNTUNED
    return OF_THE_LIBRARY if bucket.rows > FEW_ROWS else {}


def _is_tuned_by_another(key: Key) -> bool:
    """Whether its products are those of the program that decodes as many rows, which finds out how to do them."""
    return key[0] == "burst" or (isinstance(key, Bucket) and not key.groups)


def _array(shape: tuple[int, ...], dtype: Any, where: Sharding | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)  # type: ignore[no-untyped-call]
