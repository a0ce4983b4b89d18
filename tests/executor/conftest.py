"""Models that are compiled once for all the tests that run on them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from quire.executor.shapes import Shapes
from tests.executor.rig import FEW_SHAPES, SHAPES, Rig, config_of, quickly_compiled

HOST_PAGES = 300


def made(
    config: dict[str, Any],
    shapes: Shapes,
    draft: dict[str, Any] | None = None,
    num_host_pages: int = 0,
    pins_host_pages: bool = False,
) -> Iterator[Rig]:
    with quickly_compiled():
        rig = Rig(config, shapes, draft_config=draft, num_host_pages=num_host_pages, pins_host_pages=pins_host_pages)
    yield rig
    rig.executor.close()


@pytest.fixture(scope="session")
def llama() -> Iterator[Rig]:
    yield from made(config_of("llama"), SHAPES, num_host_pages=HOST_PAGES)


@pytest.fixture(scope="session")
def specialised_llama() -> Iterator[Rig]:
    """With the programs that a GPU has for common cases, and host memory as it has it. Of one layer: they take longer
    to compile than to run."""
    shapes = replace(SHAPES, max_prefill_tokens=32, min_tokens=8, burst=4, specialised=True, is_fine=True)
    config = config_of("llama", num_hidden_layers=1)
    yield from made(config, shapes, num_host_pages=HOST_PAGES, pins_host_pages=True)


@pytest.fixture(params=["llama", "specialised_llama"])
def any_llama(request: pytest.FixtureRequest) -> Rig:
    """With and without programs for common cases."""
    rig: Rig = request.getfixturevalue(request.param)
    return rig


GUESSING = replace(FEW_SHAPES, guesses=4, step_guesses=16)


@pytest.fixture(scope="session")
def guessing_llama() -> Iterator[Rig]:
    """Its next tokens may be guessed."""
    yield from made(config_of("llama"), GUESSING)


@pytest.fixture(scope="session")
def specialised_guessing_llama() -> Iterator[Rig]:
    """With the programs that a GPU has for common cases. Of one layer: they take longer to compile than to run."""
    shapes = replace(GUESSING, min_tokens=8, burst=4, specialised=True, is_fine=True)
    yield from made(config_of("llama", num_hidden_layers=1), shapes)


@pytest.fixture(scope="session")
def guessing_gemma() -> Iterator[Rig]:
    """With windows and soft caps."""
    yield from made(config_of("gemma2", num_hidden_layers=2), replace(GUESSING, num_groups=2))


DRAFTING = replace(FEW_SHAPES, guesses=3, step_guesses=9, num_slots=3, max_prefill_tokens=16)


@pytest.fixture(scope="session")
def drafted_llama() -> Iterator[Rig]:
    """Its draft is the same model, so that every guess should be right."""
    config = config_of("llama", num_hidden_layers=1)
    yield from made(config, DRAFTING, config)


@pytest.fixture(scope="session")
def drafted_gemma() -> Iterator[Rig]:
    """With windows; its draft is another model, of another family."""
    shapes = replace(DRAFTING, num_groups=2)
    draft = config_of("llama", num_hidden_layers=1)
    yield from made(config_of("gemma2", num_hidden_layers=2), shapes, draft, num_host_pages=HOST_PAGES)


FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {"num_hidden_layers": 2},  # windows and soft caps
    "qwen3_moe": {"num_hidden_layers": 2},
    "deepseek_v3": {"num_hidden_layers": 2},  # latent attention
    "phi3-long": {"original_max_position_embeddings": 40},  # a sequence that grows beyond that is computed anew
    "llama-dynamic": {"max_position_embeddings": 64},  # what a position computes depends on the length of the prompt
}


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Iterator[Rig]:
    yield from made(config_of(request.param, **FAMILIES[request.param]), FEW_SHAPES)
