"""The default model's answers, greedy and sampled, alone, among others, and through another engine: the same tokens.

On a CPU a row's bits do not depend on the rows beside it, so nothing here hangs on two tokens that are nearly level.
"""

import dataclasses
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from quire import Config
from quire.core.scheduler import Scheduler
from quire.engine.building.build import Built, build_engine
from quire.engine.building.plan import plan_deployment
from quire.engine.engine import Engine
from quire.ops.native import library
from quire.request import Request, SamplingParams

pytestmark = pytest.mark.skipif(not library.load(), reason="there is no C++ compiler")

STORED = Path(__file__).parents[1] / "default_model" / "expected.json"
COUNT, TOKENS = 16, 16
SAMPLING = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=50),
    SamplingParams(temperature=1.2, repetition_penalty=1.1),
)
# Programs are compiled when they are first needed: the smallest for those alone, then the largest.
CONFIG = Config(
    max_batch_size=COUNT,
    max_batch_prefill_tokens=32,
    max_total_tokens=192,
    page_size=16,
    num_pages=256,
    compile_ahead=False,
)


def prompts() -> list[tuple[int, ...]]:
    """Texts and chats, and as many that mean nothing, after which no token is much likelier than others."""
    stored = [tuple(entry["prompt"])[-96:] for entry in json.loads(STORED.read_text())[: COUNT // 2]]
    rng = np.random.default_rng(0)
    return stored + [tuple(rng.integers(100, 40_000, 5 + 9 * n).tolist()) for n in range(COUNT - len(stored))]


REQUESTS = [
    Request(number, prompt, TOKENS, SAMPLING[number % len(SAMPLING)], seed=number, ignore_end=True)
    for number, prompt in enumerate(prompts())
]


@pytest.fixture(scope="module", params=["int8", "none"])
def built(request: pytest.FixtureRequest) -> Iterator[Built]:
    built = build_engine(plan_deployment(dataclasses.replace(CONFIG, quantize=request.param)))
    yield built
    built.executor.close()


def run(
    built: Built,
    requests: Iterable[Request],
    so_far: dict[int, list[int]] | None = None,
    num_steps: int | None = None,
) -> dict[int, list[int]]:
    """The tokens of each request, `so_far` included, from a new engine; of its first steps, or until the end."""
    built.executor.reset()
    engine = Engine(Scheduler(built.deployment.limits, time.monotonic), built.executor)
    found = {request.request_id: list((so_far or {}).get(request.request_id, [])) for request in requests}
    for request in requests:
        engine.add(request, [found[request.request_id]] if so_far else None)
    while not engine.is_idle and num_steps != 0:
        outcome = engine.step()
        assert not outcome.failures
        for update in outcome.updates:
            found[update.request_id] += update.tokens
        if num_steps is not None:
            num_steps -= 1
    return found


def test_answers_do_not_depend_on_neighbours_nor_on_the_engine_that_goes_on_with_them(built: Built) -> None:
    alone: dict[int, list[int]] = {}
    for request in REQUESTS:
        alone |= run(built, [request])
    assert {len(tokens) for tokens in alone.values()} == {TOKENS}
    assert run(built, REQUESTS) == alone

    # As when its process is killed: the next engine gets what clients have, and computes it anew.
    part = run(built, REQUESTS, num_steps=12)
    lengths = {len(tokens) for tokens in part.values()}
    assert min(lengths) < max(lengths) < TOKENS, "some were further than others"
    part = run(built, REQUESTS, part, num_steps=3)
    assert run(built, REQUESTS, part) == alone
