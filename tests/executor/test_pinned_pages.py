"""Pages in pinned memory of the host: programs copy them, and what was on the host stays while it is read."""

import os
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.core.plan import StepPlan
from quire.executor.executor import JaxExecutor
from quire.executor.host_pages import stacks_of
from quire.executor.memory import reserve_device_memory
from quire.executor.pinned_pages import (
    PINNED,
    PinnedPages,
    can_pin,
    pin_pages,
    pinned_like,
    pinning_works,
    unpin_pages,
)
from quire.executor.program_store import ProgramStore
from quire.models.checkpoint import load_weights
from quire.models.registry import build_model
from tests.executor.conftest import SHAPES, config_of
from tests.executor.rig import NamedTensors
from tests.executor.test_host_pages import host_copies


def executor_of(folder: Path) -> JaxExecutor:
    model = build_model(config_of("llama", num_hidden_layers=1))
    weights = load_weights(model, NamedTensors(model), dtype="bfloat16")
    store = ProgramStore(folder, "pinned")
    return JaxExecutor(model, weights, SHAPES, 1, store=store, num_host_pages=8, pins_host_pages=True)


def fill(executor: JaxExecutor) -> None:
    """Every page has other numbers."""
    rng = np.random.default_rng(3)
    pages = executor._state.pages
    filled = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 1, leaf.shape).astype(leaf.dtype)), pages)
    executor._state = executor._state._replace(pages=filled)


def test_pages_are_the_same_after_they_were_pinned_also_with_kept_programs(tmp_path: Path) -> None:
    for _ in range(2):  # the second one loads the programs of the first
        executor = executor_of(tmp_path)
        host = executor.host_pages
        assert isinstance(host, PinnedPages)
        fill(executor)
        first, second = executor.read_pages([3])(), executor.read_pages([4])()
        assert first != second
        executor.submit(StepPlan(1, (), copies=host_copies({3: 2}, to_host=True))).result()
        assert {one.sharding.memory_kind for one in host._pages[2]} == {PINNED}
        both = host_copies({11: 2}, to_host=False) + host_copies({4: 2}, to_host=True)  # read, then written
        executor.submit(StepPlan(2, (), copies=both)).result()
        assert executor.read_pages([11])() == first
        assert b"".join(one.tobytes() for one in host.read([2])) == second
        executor.reset()
        executor.submit(StepPlan(3, (), copies=host_copies({12: 2}, to_host=False))).result()
        assert executor.read_pages([12])() == second, "pages of the host survive a reset"
        executor.close()


def test_pinning_is_tried_before_it_is_used() -> None:
    assert pinning_works()
    assert not can_pin(), "a CPU gains nothing"


def test_programs_that_pin_pages_are_translated_for_a_gpu() -> None:
    pages = [(jnp.zeros((9, 4, 2, 8), jnp.bfloat16),) * 2] * 2
    stacks, numbers = stacks_of(pages), jnp.zeros(3, jnp.int32)
    places = jax.tree.map(lambda one: one.sharding, pinned_like(stacks, 3))
    pin = jax.jit(partial(pin_pages, stacks), out_shardings=places)
    text = pin.trace(pages, numbers).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(PINNED) >= 3, "the results are not placed on the host"
    unpin = jax.jit(partial(unpin_pages, stacks))
    text = unpin.trace(pages, numbers, pinned_like(stacks, 3)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("annotate_device_placement") == 3, "a page is not moved to the device by the program"


@pytest.mark.parametrize(("gib", "limit"), [(0.0, None), (4.5, "13"), (100.0, "108")])
def test_a_gpu_may_pin_as_much_as_its_pages_take(
    gib: float, limit: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "")
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB")
    reserve_device_memory(gib)
    assert os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB") == limit
