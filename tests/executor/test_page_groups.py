"""Models with windows: layers share pages by groups, and pages behind a window go back while their sequence runs."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.engine.engine import Engine
from quire.executor.layer_state import page_layout
from quire.models.registry import build_model
from quire.reach import ChunkReach, Reach
from quire.request import Request
from tests.executor.rig import FEW_SHAPES, MAX_LENGTH, Rig, config_of, quickly_compiled
from tests.executor.test_schedules import check
from tests.executor.workload import GREEDY, workload

# Windows and chunks are of 7 positions, and the sequences of up to 174.
SHAPES = replace(FEW_SHAPES, page_size=4, num_pages=600)
GROUPS: dict[str, tuple[Reach, ...]] = {
    "gemma2": (None, 7, 7),
    "gemma3": (None, 7, 7, 7),
    "mistral": (7,),
    "llama4": (None, *[ChunkReach(7)] * 3),
    "gpt_oss": (None, 7, 7),
}


def made(name: str, **options: Any) -> tuple[Rig, tuple[Reach, ...]]:
    """A model with its page groups."""
    config = config_of(name)
    windows = page_layout(build_model(config).layers, SHAPES.page_size, MAX_LENGTH, "float32", **options).groups
    with quickly_compiled():
        rig = Rig(config, replace(SHAPES, num_groups=len(windows)))
    return rig, windows


@pytest.fixture(scope="module", params=GROUPS)
def windowed(request: pytest.FixtureRequest) -> Iterator[tuple[Rig, dict[str, Any]]]:
    rig, windows = made(request.param)
    assert windows == GROUPS[request.param]
    yield rig, {"page_groups": windows}
    rig.executor.close()


def poison(rig: Rig) -> Callable[[Engine, int], None]:
    """NaN in page 0 and in every page that nothing holds, before each step."""

    def between(engine: Engine, step: int) -> None:
        is_free = np.zeros(rig.shapes.num_pages, bool)
        is_free[[0, *engine.scheduler._running.pool.free_pages()]] = True
        state = rig.executor.state
        rig.executor.state = state._replace(pages=poisoned(state.pages, is_free))

    return between


@partial(jax.jit, donate_argnums=0)
def poisoned(pages: Any, is_free: jax.Array) -> Any:
    return jax.tree.map(lambda array: jnp.where(is_free[:, None, None, None], jnp.nan, array), pages)


SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no prefix cache": {"prefix_caching": False, "lookahead": 0},
    "chunks of 1": {"max_batch_prefill_tokens": 1},
    "chunks of 7, two steps ahead": {"max_batch_prefill_tokens": 7, "lookahead": 2},
    "bursts": {"max_burst": 4, "max_batch_prefill_tokens": 32},
    "few pages": {},
    "few pages, chunks of 7, bursts, two steps ahead": {
        "max_batch_prefill_tokens": 7,
        "max_burst": 3,
        "lookahead": 2,
    },
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_answers_are_those_without_pages_whatever_stands_behind_a_window(
    windowed: tuple[Rig, dict[str, Any]], name: str
) -> None:
    rig, groups = windowed
    settings = groups | SCHEDULES[name]
    if "few pages" in name:
        limits = rig.limits(**{key: value for key, value in settings.items() if key != "lookahead"})
        settings["num_pages"] = limits.pages_of(MAX_LENGTH) + 4
    requests = workload(rig, 8, seed=5, longest=70, max_tokens=50)
    for request in requests[:6]:  # the same beginnings again, when the first are computed
        prompt = (*request.prompt, *range(5))
        requests.append(replace(request, request_id=len(requests), prompt=prompt))
    run = rig.run(requests, between=poison(rig), **settings)
    assert check(rig, requests, run) <= 1
    stats = run.engine.scheduler.stats()
    assert (stats.preemptions > 0) == ("few pages" in name)
    if "few pages" in name:
        assert stats.evicted_pages > 50
    elif name != "no prefix cache":
        assert stats.cached_tokens >= 40


def most_running(rig: Rig, num_pages: int, page_groups: tuple[Reach, ...]) -> int:
    """The most sequences of up to 96 tokens that run at the same time."""
    most = 0

    def count(engine: Engine, step: int) -> None:
        nonlocal most
        most = max(most, engine.scheduler.num_running)

    requests = [Request(number, tuple(range(number, number + 56)), 40, GREEDY) for number in range(6)]
    limits = {"max_batch_prefill_tokens": 8, "prefix_caching": False}
    run = rig.run(requests, between=count, num_pages=num_pages, page_groups=page_groups, **limits)
    assert check(rig, requests, run) <= 1
    return most


def test_more_sequences_run_at_once_in_the_same_memory() -> None:
    found = {}
    for max_groups in (1, 4):
        rig, windows = made("gemma3", max_groups=max_groups)
        layout = rig.executor.programs.compiler.layout
        num_pages = 1 + 100 * page_bytes_of_one_layer(rig) // layout.page_bytes
        found[len(windows)] = most_running(rig, num_pages, windows)
        rig.executor.close()
    assert found == {1: 1, 4: 3}


def page_bytes_of_one_layer(rig: Rig) -> int:
    return page_layout(rig.model.layers[:1], SHAPES.page_size, MAX_LENGTH, "float32").page_bytes
