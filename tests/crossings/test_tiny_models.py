"""All pairs of capabilities with tiny models: each request has the tokens that it has alone in a plain engine."""

from collections.abc import Iterator
from random import Random

import pytest

from quire.ops.native import library
from tests.crossings.covering import covering_sets
from tests.crossings.model_bench import ModelBench, Models
from tests.crossings.runs import run_sets
from tests.crossings.table import ENTRIES

SIZE = 20  # capabilities of a set: as many as make few engines
MOST_TRIES = 60  # each takes seconds
MODELS = [one for one in ENTRIES if one.in_models]

pytestmark = [
    pytest.mark.usefixtures("patient_masks"),
    pytest.mark.skipif(not library.load(), reason="there is no C++ compiler, so rows depend on others"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    made = Models(tmp_path_factory.mktemp("adapters"))
    yield made
    made.close()


def test_every_pair_goes_together_with_tiny_models(models: Models) -> None:
    sets = [(one, number) for number, one in enumerate(covering_sets(MODELS, SIZE, Random(0)))]
    happened = run_sets(lambda: ModelBench(models), sets, "models", MOST_TRIES)
    assert happened["answered"] > 5 * len(sets), happened
    for what in (
        "aborted", "deadline_exceeded", "overloaded", "engine_stopped", "generation", "engine ended", "preempted",
        "evicted", "reused", "restored", "guessed", "failed steps",
    ):  # fmt: skip
        assert happened[what], f"{what} never happened"
