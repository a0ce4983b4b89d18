"""The compiled programs: all are made ahead, none on the request path."""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from quire.executor.batch import NUM_FEATURES, sizes
from quire.executor.buckets import Bucket
from quire.executor.shapes import Shapes
from quire.executor.slots import Slots, empty_slots, pack_starts, start_slots
from quire.executor.step import State, forward, sample_next
from quire.models.model import Model
from quire.models.params import ParamTree
from quire.ops.attention import grouped_attention_for

log = logging.getLogger(__name__)

START_SIZES = (1, 8)  # slots that one call can start

Key = Bucket | tuple[str, int]  # a forward pass by its bucket; sampling and starting by their number of rows


class Programs:
    """Compiles on threads of its own. A program that is not ready when it is wanted is waited for, and counted."""

    def __init__(self, model: Model, weights: ParamTree, shapes: Shapes, threads: int) -> None:
        self._model = model
        self._weights = weights
        self._shapes = shapes
        self._dtype = jax.tree.leaves(weights)[0].dtype
        self._ready: dict[Key, Any] = {}
        self._compiling: dict[Key, Future[Any]] = {}
        self._pool = ThreadPoolExecutor(threads, "quire-compile")
        self.num_late = 0  # compilations on the request path; stays 0

    def empty_state(self) -> State:
        shapes = self._shapes
        pages = []
        for spec in self._model.layers:
            shape = (shapes.num_pages, shapes.page_size, spec.kv_heads, spec.head_dim)
            pages.append((jnp.zeros(shape, self._dtype), jnp.zeros(shape, self._dtype)))
        return State(pages, self._empty_slots())

    def compile_all(self) -> Iterator[float]:
        """Compile everything, the programs that can run any plan first, telling the share done."""
        buckets = self._shapes.buckets
        keys: list[Key] = [("start", size) for size in START_SIZES]
        for bucket in buckets.all():
            keys += [bucket, ("sample", bucket.num_samples)]
        self._compiling = {key: self._pool.submit(self._compile, key) for key in dict.fromkeys(keys)}
        futures = list(self._compiling.values())
        yield 0.0
        for done, future in enumerate(as_completed(futures), start=1):
            future.result()
            yield done / len(futures)

    def forward(self, rows: int, groups: int, scores: bool) -> tuple[Bucket, Callable[..., Any]]:
        """The smallest bucket for so many rows and groups among those that are ready."""
        self._collect()
        buckets = self._shapes.buckets
        ready = [key for key in self._ready if isinstance(key, Bucket)]
        bucket = buckets.covering(rows, groups, scores, ready) or buckets.covering(rows, groups, scores, buckets.all())
        assert bucket is not None, f"no bucket for {rows} rows and {groups} groups"
        return bucket, self._get(bucket)

    def sample(self, rows: int) -> Callable[..., Any]:
        return self._get(("sample", rows))

    def start(self, size: int) -> Callable[..., Any]:
        return self._get(("start", size))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _collect(self) -> None:
        for key in [key for key, future in self._compiling.items() if future.done()]:
            self._ready[key] = self._compiling.pop(key).result()

    def _get(self, key: Key) -> Callable[..., Any]:
        if key not in self._ready:
            self._collect()
        if key not in self._ready:
            self.num_late += 1
            log.warning("a step waits for a program to be compiled: %s", key)
            compiling = self._compiling.pop(key, None)
            self._ready[key] = self._compile(key) if compiling is None else compiling.result()
        program: Callable[..., Any] = self._ready[key]
        return program

    def _compile(self, key: Key) -> Any:
        if isinstance(key, Bucket):
            return self._compile_forward(key)
        kind, size = key
        slots = jax.eval_shape(self._empty_slots)
        if kind == "start":
            numbers, rows = pack_starts([], size, self._shapes)
            return jax.jit(start_slots, donate_argnums=0).lower(slots, numbers, rows).compile()
        logits = _array((size, self._model.vocab_size), jnp.float32)
        packed = _array((3 * size + NUM_FEATURES,), jnp.int32)
        masks = _array((size, -(-self._model.vocab_size // 32)), jnp.uint32)
        return jax.jit(sample_next, donate_argnums=0).lower(slots, logits, packed, masks).compile()

    def _compile_forward(self, bucket: Bucket) -> Any:
        attention = grouped_attention_for(jax.default_backend())
        function = partial(forward, self._model, attention, self._shapes.page_size, bucket)
        packed = _array((sum(sizes(bucket, self._shapes.page_size)),), jnp.int32)
        state = jax.eval_shape(self.empty_state)
        return jax.jit(function, donate_argnums=1).lower(self._weights, state, packed).compile()

    def _empty_slots(self) -> Slots:
        return empty_slots(self._shapes)


def _array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]
