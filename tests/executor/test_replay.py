"""A follower that runs what a leader announces has the leader's state, bit for bit."""

import queue
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from quire.core.plan import Chunk, Kind, device_copy
from quire.core.scheduler import Scheduler
from quire.engine.engine import Engine
from quire.executor.executor import JaxExecutor
from quire.executor.programs.compiler import Compiler
from quire.executor.programs.kinds import run_on_padding
from quire.executor.programs.ladder import StepShape
from quire.executor.programs.replay import Follower, HostArray, PlainKey, from_plain, to_plain
from quire.executor.shapes import Shapes
from quire.group.arrays import from_message, to_message
from quire.models.random_weights import random_weights
from quire.models.registry import build_model
from quire.request import Request, SamplingParams
from tests.executor.rig import executor_of, quickly_compiled
from tests.executor.sampling import slot_start
from tests.executor.tensor_parallel import LIMITS, SHAPES
from tests.executor.test_results import mask_of
from tests.fake_executor import plan_of
from tests.models.cases import CASES
from tests.patience import WAIT_S

CONFIG = {**CASES["llama"], "num_hidden_layers": 1}


class Direct:
    """Members of this process: the arrays take the form that they have on a link, and nothing else passes."""

    def __init__(self) -> None:
        self.follower: Follower | None = None
        self.calls: list[PlainKey] = []
        self.prepared: list[PlainKey] = []
        self.refused: set[tuple[Any, ...]] = set()
        self._made: dict[tuple[Any, ...], queue.Queue[str | None]] = {}

    def prepare(self, key: PlainKey) -> None:
        self.prepared.append(key)
        assert self.follower is not None
        self._made[tuple(key)] = queue.Queue()
        self.follower.prepare(key, self._made[tuple(key)].put)

    def confirm(self, key: PlainKey) -> None:
        if tuple(key) in self.refused:
            raise RuntimeError("a member has no memory for it")
        assert self._made[tuple(key)].get(timeout=WAIT_S) is None

    def run(self, key: PlainKey, arrays: Sequence[HostArray | None], hidden: int) -> None:
        assert key in self.prepared, "a program runs before every member has it"
        self.calls.append(key)
        assert self.follower is not None
        self.follower.run(key, [from_message(to_message(array)) for array in arrays], hidden)

    def reset(self) -> None:
        assert self.follower is not None
        self.follower.reset()


def both_ends(shapes: Shapes) -> tuple[JaxExecutor, Direct, Follower]:
    model = build_model(CONFIG)
    members = Direct()
    weights = [random_weights(model, seed=1, dtype="float32") for _ in range(2)]
    compiler = Compiler(model, weights[1], shapes, None, None)
    members.follower = Follower(compiler, 1)
    return executor_of(model, weights[0], shapes, threads=1, members=members), members, members.follower


@pytest.fixture(scope="module")
def ends() -> Iterator[tuple[JaxExecutor, Direct, Follower]]:
    with quickly_compiled():
        yield both_ends(SHAPES)


def requests() -> list[Request]:
    """Long and short prompts, greedy and sampled, with log-probabilities of prompts and of tokens."""
    asked = [SamplingParams(temperature=number % 2, logprobs=2 if number == 3 else None) for number in range(5)]
    return [
        Request(number, tuple(range(number, number + 7 * number)), 9, asked[number], seed=number,
                prompt_logprobs=1 if number == 2 else None)
        for number in range(1, 5)
    ]  # fmt: skip


def run(executor: JaxExecutor) -> dict[int, list[int]]:
    engine = Engine(Scheduler(LIMITS, lambda: 0.0), executor)
    for request in requests():
        engine.add(request)
    tokens: dict[int, list[int]] = {}
    while not engine.is_idle:
        outcome = engine.step()
        assert not outcome.failures
        for update in outcome.updates:
            tokens.setdefault(update.request_id, []).extend(update.tokens)
    return tokens


def same(one: Any, other: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def test_a_follower_has_the_state_of_its_leader(ends: tuple[JaxExecutor, Direct, Follower]) -> None:
    executor, members, follower = ends
    executor.reset()
    tokens = run(executor)
    assert all(len(those) == 9 for those in tokens.values())
    assert same(executor.state, follower.state)
    kinds = {key[0] if isinstance(key[0], str) else "forward" for key in members.calls}
    assert kinds >= {"start", "forward", "any"}


def test_both_begin_again_together(ends: tuple[JaxExecutor, Direct, Follower]) -> None:
    executor, _, follower = ends
    executor.reset()
    assert same(executor.state, follower.state)
    assert not np.asarray(follower.state.slots.history).any()
    run(executor)
    assert same(executor.state, follower.state)


def test_masks_copies_and_forced_tokens_reach_a_follower(ends: tuple[JaxExecutor, Direct, Follower]) -> None:
    executor, members, follower = ends
    executor.reset()
    members.calls.clear()
    chunks = tuple(Chunk(slot, 0, 0, slot, Kind.PREFILL, 0, 3, ((1 + slot,),), True) for slot in range(2))
    started = tuple(slot_start(SamplingParams(temperature=0), slot=slot, prompt=(5, 6, 7)) for slot in range(2))
    pending = executor.submit(plan_of(1, chunks, started=started, guided=(1,)))
    pending.sample({1: mask_of([9], CONFIG["vocab_size"])})
    assert pending.result().tokens[1] == [9]
    decodes = tuple(Chunk(slot, 0, 0, slot, Kind.FORCED, 4, 2, (), True) for slot in range(1))
    executor.submit(plan_of(2, decodes, copies=(device_copy(1, 5),), forced=((0, 4, (8, 8)),))).result()
    assert same(executor.state, follower.state)
    kinds = {key[0] for key in members.calls if isinstance(key[0], str)}
    assert kinds >= {"start", "any", "copy", "force"}
    assert [int(one) for one in np.asarray(follower.state.slots.history)[:2, 3]][1] == 9


@pytest.mark.parametrize("is_fused", [False, True])
def test_guesses_reach_a_follower(is_fused: bool) -> None:
    with quickly_compiled():
        executor, members, follower = both_ends(replace(SHAPES, guesses=2, step_guesses=4, specialised=True))
        if is_fused:
            executor.programs.get(("verify", 8))  # from now on it is in the table
        start = slot_start(SamplingParams(temperature=0), slot=0, prompt=(5, 6, 7, 5, 6))
        prompt = Chunk(1, 0, 0, 0, Kind.PREFILL, 0, 5, ((1, 2),), True)
        executor.submit(plan_of(1, (prompt,), started=(start,))).result()
        (drawn,) = executor.submit(plan_of(2, (Chunk(1, 0, 0, 0, Kind.VERIFY, 5, 3, (), True),))).result().tokens
    assert 1 <= len(drawn) <= 3
    assert same(executor.state, follower.state)
    kinds = {key[0] for key in members.calls if isinstance(key[0], str)}
    assert ("verify" in kinds, "guess" in kinds) == (is_fused, not is_fused)


def test_rehearsals_are_replayed(ends: tuple[JaxExecutor, Direct, Follower]) -> None:
    executor, members, follower = ends
    executor.reset()
    run(executor)
    programs = executor.programs
    used = [from_plain(list(key)) for key in dict.fromkeys(map(tuple, members.prepared))]
    members.calls.clear()
    for key in used:
        executor.state = run_on_padding(key, programs.get(key), executor.state, programs)
    assert [from_plain(key) for key in members.calls] == used
    assert same(executor.state, follower.state)


def test_a_program_that_a_member_cannot_make_is_in_no_table(ends: tuple[JaxExecutor, Direct, Follower]) -> None:
    executor, members, _ = ends
    key = ("copy", 16)
    members.refused = {key}
    with pytest.raises(RuntimeError, match="no memory"):
        executor.programs.get(key)
    assert key not in executor.programs.table.keys


@pytest.mark.parametrize("key", [StepShape(4), StepShape(8, scores=True), ("any", 4), ("copy", 16)])
def test_keys_survive_the_link(key: Any) -> None:
    assert from_plain(to_plain(key)) == key


@pytest.mark.parametrize("parts", [[], ["any"], ["any", "x"], ["other", 4], [1, 2, 3, 4, 5, 6]])
def test_other_lists_are_no_keys(parts: PlainKey) -> None:
    with pytest.raises((ValueError, TypeError, IndexError)):
        from_plain(parts)
