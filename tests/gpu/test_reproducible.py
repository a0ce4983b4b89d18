"""A reproducible engine: tokens and log-probabilities have the same bits whatever else runs. A minute each:

    python -m pytest -m gpu tests/gpu/test_reproducible.py -k none      (bfloat16; -k fp8: weights in eight bits)

Elsewhere it runs with the engine that a CPU has, whose rows depend on nothing in any case.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from quire.engine.building.build import Built, build_engine
from quire.engine.building.plan import plan_deployment
from quire.engine.engine import Engine
from quire.executor import shared_prefixes
from quire.executor.launch import Launch, Packer
from quire.request import Request, SamplingParams
from quire.settings.config import Config

pytestmark = pytest.mark.gpu

ON_GPU = jax.default_backend() == "gpu"
SLOTS, MOST = (64, 1024) if ON_GPU else (8, 64)
LENGTHS = (1, 2, 31, 32, 33, 100, 300, 700) if ON_GPU else (1, 33, 60)
SAMPLINGS = (
    SamplingParams(temperature=0, logprobs=4),
    SamplingParams(temperature=1.0, logprobs=4),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_p=0.9),
)
NEW_TOKENS = 40 if ON_GPU else 8
Between = Callable[[Engine, Any, int], None]
Answers = dict[int, tuple[list[int], list[Any]]]


@pytest.fixture(scope="module", params=["none", "fp8"])
def built(request: pytest.FixtureRequest) -> Iterator[Built]:
    sizes: dict[str, Any] = {"max_batch_size": SLOTS, "max_batch_prefill_tokens": MOST, "max_total_tokens": 1024}
    model = "random:qwen3-0.6b" if ON_GPU else "default"
    if not ON_GPU and request.param == "fp8":
        pytest.skip("on a CPU fp8 is widened")
    config = Config(model=model, quantize=request.param, reproducible=True, **sizes)
    made = build_engine(plan_deployment(config))
    for _ in made.executor.warm_up() if ON_GPU else ():  # and every program is held to the bits of a row
        pass
    yield made
    made.executor.close()


def requests(built: Built, first: int = 0) -> list[Request]:
    rng = np.random.default_rng(7)
    vocabulary = built.deployment.model.vocab_size
    found = []
    for number, length in enumerate(LENGTHS):
        prompt = tuple(rng.integers(0, vocabulary, length).tolist())
        found.append(Request(first + number, prompt, NEW_TOKENS, SAMPLINGS[number % len(SAMPLINGS)], seed=number))
    return found


def crowd(built: Built, count: int) -> list[Request]:
    """Others, of all lengths, some of which ask for what samples by the program that can do everything."""
    rng = np.random.default_rng(count)
    vocabulary = built.deployment.model.vocab_size
    kinds = (*SAMPLINGS, SamplingParams(temperature=1.0, repetition_penalty=1.2))
    return [
        Request(
            1000 + n, tuple(rng.integers(0, vocabulary, 1 + 37 * n % (MOST // 2)).tolist()), 4 + n % 50, kinds[n % 5]
        )
        for n in range(count)
    ]


def run(built: Built, asked: list[Request], between: Between | None = None) -> Answers:
    """Tokens and log-probabilities of each request, in bits."""
    engine, steps = built.engine, 0
    found: Answers = {one.request_id: ([], []) for one in asked}
    for one in asked:
        engine.add(one)
    while not engine.is_idle:
        if between is not None:
            between(engine, built.executor, steps)
        outcome = engine.step()
        assert not outcome.failures
        steps += 1
        for update in outcome.updates:
            tokens, logprobs = found[update.request_id]
            tokens += update.tokens
            logprobs += update.logprobs or []
    return found


@pytest.fixture(scope="module")
def alone(built: Built) -> Answers:
    """Each by itself, and without what the one before it left in the cache."""
    found: Answers = {}
    for one in requests(built):
        found |= run(built, [replace(one, salt=f"alone {one.request_id}")])
    return found


def compare(
    built: Built, alone: Answers, others: list[Request], between: Between | None = None, salt: str = ""
) -> None:
    asked = [replace(one, salt=f"{salt} {one.request_id}") for one in requests(built)]
    found = run(built, [*asked, *others], between)
    assert {number: found[number] for number in alone} == alone


@pytest.mark.parametrize("count", [0, 3, 8, 24, 56, 200] if ON_GPU else [0, 12])
def test_answers_do_not_depend_on_others(built: Built, alone: Answers, count: int) -> None:
    compare(built, alone, crowd(built, count), salt=f"others {count}")


@pytest.mark.parametrize("tokens", [1, 7, 32, 100])
def test_answers_do_not_depend_on_how_prompts_are_cut(built: Built, alone: Answers, tokens: int) -> None:
    def cut(engine: Engine, executor: Any, steps: int) -> None:
        engine.scheduler.budget.prefill_tokens = tokens

    compare(built, alone, crowd(built, 6), cut, salt=f"cut {tokens}")
    engine = built.engine
    engine.scheduler.budget.prefill_tokens = engine.scheduler.limits.max_batch_prefill_tokens


def test_answers_do_not_depend_on_reused_prefixes(built: Built, alone: Answers) -> None:
    for _ in range(2):
        compare(built, alone, crowd(built, 6), salt="reused")


@pytest.mark.parametrize("count", [4, 12, 40] if ON_GPU else [4])
def test_answers_do_not_depend_on_others_that_read_the_same_pages(
    built: Built, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU they read them together. Sequences end one after the other, so that those are others in each step."""
    monkeypatch.setattr(shared_prefixes, "MIN_SAVED", 1)
    rng = np.random.default_rng(11)
    begin = tuple(rng.integers(0, built.deployment.model.vocab_size, 600 if ON_GPU else 40).tolist())
    asked = [
        Request(n, (*begin, *range(1, 2 + 5 * n % 300)), 4 + 3 * n % 37, SAMPLINGS[n % len(SAMPLINGS)], seed=n)
        for n in range(count)
    ]
    alone: Answers = {}
    for one in asked[:12]:
        alone |= run(built, [replace(one, salt=f"by itself {one.request_id}")])
    together: list[int] = []
    with_shared = Packer.with_shared

    def noted(self: Packer, launch: Launch) -> Launch:
        after = with_shared(self, launch)
        together.append(0 if after.shared is None else int((after.shared.tile_of >= 0).sum()))
        return after

    monkeypatch.setattr(Packer, "with_shared", noted)
    run(built, [replace(asked[0], salt=f"together {count}")])
    found = run(built, [replace(one, salt=f"together {count}") for one in asked])
    assert {number: found[number] for number in alone} == alone
    assert not ON_GPU or max(together) >= min(count, 8)


def test_answers_do_not_depend_on_preemptions(built: Built, alone: Answers) -> None:
    def preempt(engine: Engine, executor: Any, steps: int) -> None:
        live = engine.scheduler.request_ids()
        if live and steps % 9 in (5, 6):
            engine.scheduler.focus(live[:1] if steps % 9 == 5 else None)

    compare(built, alone, crowd(built, 12), preempt, salt="preempted")


def test_answers_go_on_in_another_engine_as_in_one(built: Built, alone: Answers) -> None:
    """As after the end of an engine: the tokens so far come with the request."""
    for one in requests(built):
        tokens, logprobs = alone[one.request_id]
        cut = len(tokens) // 2
        again = replace(one, request_id=500 + one.request_id, salt=f"again {one.request_id}")
        built.engine.add(again, so_far=[tokens[:cut]])
        found: tuple[list[int], list[Any]] = ([], [])
        while not built.engine.is_idle:
            for update in built.engine.step().updates:
                found[0].extend(update.tokens)
                found[1].extend(update.logprobs or [])
        assert found == (tokens[cut:], logprobs[cut:] if logprobs else [])
