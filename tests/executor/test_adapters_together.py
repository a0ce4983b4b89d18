"""Adapters beside a draft model and in bursts: each sequence has the tokens that it has alone, one token at a time."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from quire.models.adapters import AdapterSizes
from tests.executor.conftest import DRAFTING, made
from tests.executor.rig import Rig, config_of
from tests.executor.test_adapters import NAMES, crowd, engine
from tests.models.adapter_files import write_adapter


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """With the programs that a GPU has for common cases. Its draft is the same model, without adapters."""
    config = config_of("llama", num_hidden_layers=1)
    adapters = AdapterSizes(slots=2, rank=4)
    shapes = replace(DRAFTING, min_tokens=8, burst=4, specialised=True, is_fine=True, adapters=adapters)
    yield from made(config, shapes, config)


@pytest.fixture(scope="module")
def folders(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(root / name, rig.model, seed=rank, rank=rank) for rank, name in enumerate(NAMES, 2)}


@pytest.fixture(scope="module")
def expected(rig: Rig, folders: dict[str, Path]) -> list[list[int]]:
    """Each alone, without guesses, bursts and cache."""
    plain = {"max_guesses": 0, "max_burst": 1, "prefix_caching": False}
    answers = [rig.run([one], engine=engine(rig, folders, **plain)).tokens()[one.request_id, 0] for one in crowd()]
    assert len({tuple(tokens) for tokens in answers}) > 4, "the adapters change nothing"
    return answers


def test_a_draft_without_adapters_guesses_for_those_that_have_one(
    rig: Rig, folders: dict[str, Path], expected: list[list[int]]
) -> None:
    run = rig.run(crowd(), engine=engine(rig, folders, lookahead=2))
    assert [run.tokens()[number, 0] for number in range(len(expected))] == expected
    counters = run.engine.scheduler.counters
    assert 0 < counters.right_guesses < counters.guesses, "it knows what no adapter changes, and no more"


@pytest.mark.parametrize("num_pages", [400, 16])
def test_adapters_differ_within_a_burst(
    rig: Rig, folders: dict[str, Path], expected: list[list[int]], num_pages: int
) -> None:
    settings = {"max_guesses": 0, "max_burst": 4, "num_pages": num_pages}
    run = rig.run(crowd(), engine=engine(rig, folders, **settings))
    assert [run.tokens()[number, 0] for number in range(len(expected))] == expected
    assert run.engine.scheduler.counters.steps < sum(map(len, expected)) / 3, "no step had several tokens of a row"
