"""Run by test_tensor_parallel.py in a process with 8 devices: tokens of a model cut across them, against one."""

import re
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from quire.core.limits import Limits
from quire.core.scheduler import Scheduler
from quire.engine.engine import Engine
from quire.engine.pages.store import PageStore
from quire.executor.executor import JaxExecutor
from quire.executor.programs.ladder import StepShape
from quire.executor.shapes import Shapes
from quire.files.peft import open_adapter
from quire.models.adapters import AdapterSizes, host_adapter
from quire.models.checkpoint import load_weights
from quire.models.params import Param
from quire.models.parts.decoder import Decoder
from quire.models.random_weights import random_weights
from quire.models.registry import build_model
from quire.ops.native import library
from quire.ops.sharding import sharding, tensor_mesh
from quire.peers.bundle import PageBundle, PageForm
from quire.request import Request, SamplingParams
from tests.executor.rig import executor_of
from tests.models.adapter_files import write_adapter
from tests.models.cases import CASES
from tests.models.tiny import NamedTensors

NUM_LAYERS = 2
# Two keys for eight queries: on 4 and 8 devices there are fewer keys than devices.
CONFIG = {
    **CASES["llama"],
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": NUM_LAYERS,
    "vocab_size": 304,
    "max_position_embeddings": 256,
}
SHAPES = Shapes(num_pages=24, page_size=4, num_slots=4, max_prefill_tokens=16, max_sequence_tokens=64, min_tokens=4)
LIMITS = Limits(
    page_size=4,
    num_pages=24,
    max_batch_size=4,
    max_step_tokens=20,
    max_batch_prefill_tokens=16,
    max_sequence_tokens=64,
)
REQUESTS = [
    Request(number, tuple(range(number, number + 9 * number)), 12, SamplingParams(temperature=number % 2), seed=number)
    for number in range(1, 5)
]


def executor_on(
    num_devices: int, shapes: Shapes = SHAPES, num_host_pages: int = 0, pins: bool = False
) -> tuple[Decoder, JaxExecutor]:
    """The weights are the same however they are placed, up to the copies of keys that more devices need."""
    model = build_model(CONFIG)
    if num_devices == 1:
        weights = random_weights(model, seed=1, dtype="float32")
        return model, executor_of(model, weights, shapes, num_host_pages=num_host_pages)
    mesh = tensor_mesh(jax.devices()[:num_devices])
    whole = random_weights(model, seed=1, dtype="float32")
    cut = model.for_devices(num_devices)

    def place(param: Param, weight: Any) -> Any:
        (array,) = jax.tree.leaves(weight)
        return param.plain(jax.device_put(param.assemble([array]), sharding(param.shape, param.axes, mesh)))

    weights = jax.tree.map(place, _copying(cut, model), whole, is_leaf=_is_param)
    return cut, executor_of(cut, weights, shapes, mesh=mesh, num_host_pages=num_host_pages, pins_host_pages=pins)


def _copying(cut: Decoder, model: Decoder) -> Any:
    """The params of `cut`, each made from the weight of `model` as it is rather than from a checkpoint."""

    def from_whole(target: Param, source: Param) -> Param:
        copies = target.shape[0] // source.shape[0]

        def join(tensors: Any) -> Any:
            fused = np.asarray(tensors[0])
            if copies == 1:
                return fused
            if target.axes[0] == "mlp":
                return fused.reshape(2, copies, *target.shape[2:]).swapaxes(0, 1)
            kv_heads, parts, *rest = fused.shape
            queries = fused[:, :-2].reshape(kv_heads * copies, (parts - 2) // copies, *rest)
            return np.concatenate((queries, np.repeat(fused[:, -2:], copies, axis=0)), axis=1)

        return replace(target, sources=target.sources[:1], join=join)

    return jax.tree.map(from_whole, cut.params(), model.params(), is_leaf=_is_param)


def _is_param(node: object) -> bool:
    return isinstance(node, Param)


def generate(
    executor: JaxExecutor, adapter: list[Any] | None = None, requests: list[Request] = REQUESTS
) -> dict[int, list[int]]:
    """`adapter`, as the executor's model takes it, is called `a`."""
    limits = LIMITS if adapter is None else replace(LIMITS, max_loras=1)
    engine = Engine(Scheduler(limits, time.monotonic), executor, read_adapter=lambda _: adapter)
    if adapter is not None:
        engine.adapters.load("a", "")
    return run(engine, requests)


def run(engine: Engine, requests: list[Request]) -> dict[int, list[int]]:
    for request in requests:
        engine.add(request)
    tokens: dict[int, list[int]] = {}
    while not engine.is_idle:
        outcome = engine.step()
        assert not outcome.failures, outcome.failures
        for update in outcome.updates:
            tokens.setdefault(update.request_id, []).extend(update.tokens)
    return tokens


def compare_adapters() -> None:
    """Half of the requests have an adapter."""
    requests = [replace(one, adapter="a" if one.request_id % 2 else None) for one in REQUESTS]
    shapes = replace(SHAPES, adapters=AdapterSizes(1, 3))
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        opened = open_adapter(write_adapter(Path(folder), build_model(CONFIG)))
        for num_devices in (1, 2, 4):
            model, executor = executor_on(num_devices, shapes)
            answers.append(generate(executor, host_adapter(model, opened, 3, np.float32), requests))
    _, executor = executor_on(1)
    plain = generate(executor)
    for tokens in answers:
        assert tokens == answers[0], "several devices say something else with adapters"
        assert all((tokens[one.request_id] == plain[one.request_id]) == (one.adapter is None) for one in requests)
    print("same tokens with adapters")


def compare_host_pages() -> None:
    """The same requests again, after others have taken their pages."""
    again = [replace(one, request_id=one.request_id + 10) for one in REQUESTS]
    for num_devices in (1, 2, 4):
        _, executor = executor_on(num_devices, num_host_pages=60, pins=num_devices == 2)
        engine = Engine(Scheduler(replace(LIMITS, host_pages=60), time.monotonic), executor)
        first = run(engine, REQUESTS)
        second = run(engine, again)
        assert {number - 10: tokens for number, tokens in second.items()} == first
        assert engine.scheduler.stats().restored_pages > 4, "nothing came back from the host"
        check_exchange(executor, first)
    print("same tokens from the host")


def check_exchange(executor: JaxExecutor, expected: dict[int, list[int]]) -> None:
    """An engine on the same devices goes on from the pages of another one."""
    assert executor.host_pages is not None
    form, asked = PageForm(4, executor.host_pages.page_bytes, (None,)), REQUESTS[-1]
    engine, store = engine_with_store(executor, form)
    assert run(engine, [asked])[asked.request_id] == expected[asked.request_id]
    pages = store.find(asked, 0)
    data = store.read(asked, pages.rows(), pages.end)
    assert data is not None
    bundle = PageBundle(pages, memoryview(bytes(data())))
    engine, store = engine_with_store(executor, form)
    assert store.insert(asked, bundle, 0, pages.num_pages)
    assert store.num_cached(asked) == 8
    assert run(engine, [asked])[asked.request_id] == expected[asked.request_id]


def engine_with_store(executor: JaxExecutor, form: PageForm) -> tuple[Engine, PageStore]:
    executor.reset()
    engine = Engine(Scheduler(replace(LIMITS, host_pages=60), time.monotonic), executor)
    return engine, PageStore(engine.scheduler, lambda: engine.executor, form)


def recurrent_on(name: str, num_devices: int) -> JaxExecutor:
    kinds = ["linear_attention", "full_attention"]
    model = build_model({**CASES[name], "layer_types": kinds, "num_hidden_layers": 2})
    source = NamedTensors(model)
    if num_devices == 1:
        return executor_of(model, load_weights(model, source, dtype="float32"), SHAPES)
    mesh, cut = tensor_mesh(jax.devices()[:num_devices]), model.for_devices(num_devices)

    def placement(param: Param) -> jax.sharding.Sharding:
        return sharding(param.shape, param.axes, mesh)

    weights = load_weights(cut, source, dtype="float32", placement=placement)
    return executor_of(cut, weights, replace(SHAPES, num_snapshots=4), mesh=mesh)


def two_turns(executor: JaxExecutor) -> tuple[list[dict[int, list[int]]], int]:
    """The answers, and then that to the next turn of one conversation; the tokens of it that were in the cache."""
    snapshots = executor.programs.compiler.shapes.num_snapshots
    engine = Engine(Scheduler(replace(LIMITS, snapshots=snapshots, snapshot_tokens=0), time.monotonic), executor)
    answers = run(engine, REQUESTS)
    before = engine.scheduler.counters.cached_tokens
    turn = replace(REQUESTS[2], request_id=9, prompt=(*REQUESTS[2].prompt, *answers[3], 1, 2), max_tokens=6)
    return [answers, run(engine, [turn])], engine.scheduler.counters.cached_tokens - before


def compare_recurrent(name: str, devices: tuple[int, ...], whole_on: int | None = None) -> None:
    """Each device has a key head, with its part of the state; on `whole_on` devices, which do not divide the two that
    there are, each has both. Only several devices have snapshots."""
    expected, _ = two_turns(recurrent_on(name, 1))
    for num_devices in devices:
        executor = recurrent_on(name, num_devices)
        found, cached = two_turns(executor)
        assert found == expected, f"{num_devices} devices say something else"
        assert cached > 0, "the next turn was computed from its beginning"
        _, matrices = executor.state.slot_arrays[0]
        assert matrices.addressable_shards[0].data.shape[1] == (2 if num_devices == whole_on else 1)
        program: Any = executor.programs.get(StepShape(4))
        calls = program.as_text().count('custom_call_target="quire_recur"')
        assert calls == (1 if library.load() else 0), "another kernel than on one device"
    print(f"same tokens of {name}")


def main() -> None:
    _, executor = executor_on(1)
    expected = generate(executor)
    assert all(len(tokens) == 12 for tokens in expected.values())
    for num_devices in (2, 4, 8):
        model, executor = executor_on(num_devices)
        assert generate(executor) == expected, f"{num_devices} devices say something else"
        keys, _ = executor.state.pages[0]
        assert keys.addressable_shards[0].data.shape[2] * num_devices == model.layers[0].kv_heads
        program: Any = executor.programs.get(StepShape(4))
        # Besides those of the layers: one for the embedding, which is cut by vocabulary.
        reduces = len(re.findall(r" all-reduce(?:-start)?\(", program.as_text()))
        assert reduces == 2 * NUM_LAYERS + 1, f"{reduces} all-reduces on {num_devices} devices"
        assert not re.findall(r" (all-gather|all-to-all|collective-permute)(?:-start)?\(", program.as_text())
        calls = program.as_text().count('custom_call_target="quire_place_heads"')
        assert calls == (NUM_LAYERS if library.load() else 0), "another kernel than on one device"
        print(f"{num_devices} devices: same tokens, {reduces} all-reduces in {NUM_LAYERS} layers")


if __name__ == "__main__":
    assert StepShape(4) in SHAPES.ladder.all()
    main()
    compare_adapters()
    compare_host_pages()
    compare_recurrent("qwen3_next", (2, 4), whole_on=4)
    compare_recurrent("granitemoehybrid", (4,))  # of its one key head each has a copy
