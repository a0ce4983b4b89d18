"""Models with recurrent layers: a slot has state beside pages, which is that of its own tokens and of no others."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.engine.engine import Engine
from quire.executor.programs.kinds import run_on_padding
from quire.executor.snapshot_arrays import LOAD, SAVE, STATE_SIZES
from quire.ops.native import library
from quire.request import Request, SamplingParams
from tests.executor.faulty_executor import FaultyExecutor
from tests.executor.rig import FEW_SHAPES, Rig, config_of, quickly_compiled
from tests.executor.test_schedules import check
from tests.executor.workload import GREEDY, workload

SHAPES = replace(FEW_SHAPES, page_size=4, num_snapshots=24)
KINDS = ["linear_attention", "full_attention"]
RIGS = {
    "qwen3_next": (config_of("qwen3_next", num_hidden_layers=2, layer_types=KINDS), SHAPES),
    # With the programs that a GPU has for common cases.
    "granitemoehybrid": (
        config_of("granitemoehybrid", num_hidden_layers=2, layer_types=KINDS),
        replace(SHAPES, max_prefill_tokens=16, min_tokens=8, burst=4, specialised=True, is_fine=True),
    ),
}


@pytest.fixture(scope="module", params=RIGS)
def recurrent(request: pytest.FixtureRequest) -> Iterator[Rig]:
    config, shapes = RIGS[request.param]
    with quickly_compiled():
        rig = Rig(config, shapes)
    yield rig
    rig.executor.close()


def poison(rig: Rig) -> Callable[[Engine, int], None]:
    """NaN in the state of padding and of every slot that no sequence has, before each step."""

    def between(engine: Engine, step: int) -> None:
        is_free = np.ones(rig.shapes.num_slots + 1, bool)
        is_free[[one.slot for one in engine.scheduler._running]] = False
        state = rig.executor.state
        rig.executor.state = state._replace(slot_arrays=poisoned(state.slot_arrays, is_free))

    return between


@partial(jax.jit, donate_argnums=0)
def poisoned(arrays: Any, is_free: jax.Array) -> Any:
    def one(array: jax.Array) -> jax.Array:
        return jnp.where(is_free.reshape(-1, *[1] * (array.ndim - 1)), jnp.nan, array)

    return jax.tree.map(one, arrays)


SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no snapshots": {"snapshots": 0},
    "one snapshot, two steps ahead": {"snapshots": 1, "lookahead": 2},
    "snapshots at all ends of pages": {"snapshot_tokens": 0, "max_batch_prefill_tokens": 13},
    "no prefix cache": {"prefix_caching": False, "lookahead": 0},
    "chunks of 1, two steps ahead": {"max_batch_prefill_tokens": 1, "lookahead": 2},
    "chunks of 7, bursts": {"max_batch_prefill_tokens": 7, "max_burst": 4},
    "few pages": {"num_pages": 49},
    "few pages, chunks of 11, bursts, two steps ahead": {
        "num_pages": 49,
        "max_batch_prefill_tokens": 11,
        "max_burst": 3,
        "lookahead": 2,
        "snapshot_tokens": 0,
    },
}


def requests_of(rig: Rig) -> list[Request]:
    """Many begin alike; one has several samples, one wants the log-probabilities of its prompt."""
    requests = workload(rig, 9, seed=5, max_tokens=20)
    requests[2] = replace(
        requests[2], samples=3, prompt=(requests[0].prompt + requests[1].prompt + (1, 2, 3) * 10)[:30]
    )
    requests[4] = replace(requests[4], prompt_logprobs=1)
    return requests


@pytest.mark.parametrize("name", SCHEDULES)
def test_answers_are_those_of_the_plain_forward(recurrent: Rig, name: str) -> None:
    requests = requests_of(recurrent)
    run = recurrent.run(requests, between=poison(recurrent), **SCHEDULES[name])
    assert check(recurrent, requests, run) <= 1
    counters = run.engine.scheduler.counters
    assert (counters.cached_tokens > 0) == (name != "no snapshots") or name.startswith("one snapshot")
    assert (counters.preemptions > 0) == ("few pages" in name)


@pytest.mark.skipif(not library.load(), reason="there is no C++ compiler")
def test_sampled_answers_do_not_depend_on_scheduling(recurrent: Rig) -> None:
    requests = [replace(one, sampling=SamplingParams(temperature=1.0)) for one in requests_of(recurrent)]
    expected = recurrent.run(requests).tokens()
    for settings in SCHEDULES.values():
        assert recurrent.run(requests, **settings).tokens() == expected, settings


@pytest.mark.skipif(not library.load(), reason="there is no C++ compiler")
def test_the_state_of_a_slot_depends_neither_on_chunks_nor_on_neighbours(recurrent: Rig) -> None:
    prompt = tuple(np.random.default_rng(0).integers(0, recurrent.model.vocab_size, 61).tolist())

    def state_after(others: list[Request], before: list[Request] | None = None, **settings: Any) -> list[Any]:
        engine = recurrent.engine(**settings)
        recurrent.run(before or [], engine=engine)
        engine.add(Request(0, prompt, 1, GREEDY))
        for other in others:
            engine.add(other)
        while engine.scheduler.has(0):
            engine.step()
        slot = engine.scheduler._running._free_slots[-1]  # it was given back last
        state = recurrent.executor.state
        found = [np.asarray(array)[slot] for array in jax.tree.leaves(state.slot_arrays)]
        for other in others:
            engine.scheduler.abort(other.request_id)
        return found

    expected = state_after([])
    assert all(array.any() for array in expected)
    others = [Request(number, prompt[number:] + prompt, 30, GREEDY) for number in (1, 2)]
    for beside, chunk in (([], 1), ([], 7), (others, 16), (others, 5)):
        found = state_after(beside, max_batch_prefill_tokens=chunk, lookahead=0)
        for array, right in zip(found, expected, strict=True):
            np.testing.assert_array_equal(array, right)
    first = Request(1, prompt, 30, GREEDY)
    for array, right in zip(state_after([], [first], snapshot_tokens=4), expected, strict=True):
        np.testing.assert_array_equal(array, right, "it continues from the snapshot that another took")


@pytest.mark.parametrize("lookahead", [0, 2])
def test_a_lost_device_changes_no_answer(recurrent: Rig, lookahead: int) -> None:
    requests = requests_of(recurrent)
    executor = FaultyExecutor(recurrent.executor, lambda plan: plan.step in (3, 9), "result")
    run = recurrent.run(requests, executor=executor, lookahead=lookahead)
    assert executor.num_resets == 2
    assert check(recurrent, requests, run) <= 1


def test_the_next_turn_continues_from_the_answer_with_the_tokens_that_it_has_without(recurrent: Rig) -> None:
    prompt = tuple(np.random.default_rng(1).integers(0, recurrent.model.vocab_size, 45).tolist())
    engine = recurrent.engine()
    answer = recurrent.run([Request(1, prompt, 30, GREEDY)], engine=engine).tokens()[1, 0]
    second = Request(2, (*prompt, *answer, 1, 2, 3), 20, GREEDY)
    run = recurrent.run([second], engine=engine)
    assert run.answers[2, 0].cached_tokens == 68, "8 or more after the last, from 44 on"
    assert recurrent.near_ties(second, run.tokens()[2, 0]) <= 1
    if library.load():
        assert run.tokens() == recurrent.run([second], snapshots=0).tokens()


@pytest.mark.parametrize("size", STATE_SIZES)
def test_copies_of_padding_leave_slots_and_snapshots_as_they_are(recurrent: Rig, size: int) -> None:
    recurrent.executor.reset()
    programs, state = recurrent.executor.programs, recurrent.executor.state
    state = state._replace(slot_arrays=jax.tree.map(jnp.ones_like, state.slot_arrays))
    programs.snapshots.arrays = jax.tree.map(lambda array: jnp.full_like(array, 2), programs.snapshots.arrays)
    for kind in (SAVE, LOAD):
        key = kind, size
        state = run_on_padding(key, programs.get(key), state, programs)
    slots, snapshots = jax.tree.leaves(state.slot_arrays), jax.tree.leaves(programs.snapshots.arrays)
    assert all((array[:-1] == 1).all() for array in slots)
    assert all((array[1:] == 2).all() for array in snapshots)
    assert not all((array[0] == 2).all() for array in snapshots), "nothing was copied"
    recurrent.executor.reset()
