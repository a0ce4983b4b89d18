"""Models that are compiled once for all the tests that run on them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest

from quire.executor.shapes import Shapes
from tests.executor.rig import MAX_LENGTH, SHAPES, Rig
from tests.models.cases import CASES

VOCAB_SIZE = 300  # no multiple of the sampler's blocks, nor of a mask's words

# Fewer shapes than the first model's, for each is a program to compile.
FEW_SHAPES = Shapes(
    num_pages=400,
    page_size=8,
    num_slots=4,
    max_prefill_tokens=32,
    max_sequence_tokens=MAX_LENGTH,
    min_rows=4,
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep these tests in one worker where there are several: each would compile the models again."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.xdist_group("executor"))


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    return {**CASES[name], "vocab_size": VOCAB_SIZE, "max_position_embeddings": 256, **changes}


@contextmanager
def quickly_compiled() -> Iterator[None]:
    """Without most optimisations: tiny models run for less time than they take to compile."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def made(config: dict[str, Any], shapes: Shapes) -> Iterator[Rig]:
    with quickly_compiled():
        rig = Rig(config, shapes)
    yield rig
    rig.executor.close()


@pytest.fixture(scope="session")
def llama() -> Iterator[Rig]:
    yield from made(config_of("llama"), SHAPES)


FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {"num_hidden_layers": 2},  # windows and soft caps
    "qwen3_moe": {"num_hidden_layers": 2},
    "llama-dynamic": {"max_position_embeddings": 64},  # what a position computes depends on the length of the prompt
}


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Iterator[Rig]:
    yield from made(config_of(request.param, **FAMILIES[request.param]), FEW_SHAPES)
