"""Adapters below the weights that they change, as on a GPU: the same tokens, through swaps and lost devices."""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.models.adapters import one_adapter
from quire.ops.weights.adapters import JoinedStack
from tests.executor.faulty_executor import FaultyExecutor
from tests.executor.rig import FEW_SHAPES, Rig, quickly_compiled
from tests.executor.test_adapters import CONFIG, NAMES, SHAPES, crowd, engine
from tests.models.adapter_files import Merged, write_adapter
from tests.models.tiny import NamedTensors


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with quickly_compiled():
        made = Rig(CONFIG, SHAPES, has_room=True)
    yield made
    made.executor.close()


@pytest.fixture(scope="module")
def folders(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(root / name, rig.model, seed=rank, rank=rank) for rank, name in enumerate(NAMES, 2)}


@pytest.fixture(scope="module")
def merged(rig: Rig, folders: dict[str, Path]) -> Iterator[dict[str | None, Rig]]:
    """What each adapter makes of the model."""
    with quickly_compiled():
        made: dict[str | None, Rig] = {
            name: Rig(CONFIG, FEW_SHAPES, checkpoint=Merged(NamedTensors(rig.model), rig.model, folder, 4 / rank))
            for rank, (name, folder) in enumerate(folders.items(), 2)
        }
    yield made | {None: rig}
    for one in made.values():
        one.executor.close()


def test_every_weight_of_a_layer_is_in_its_stack(rig: Rig) -> None:
    compiler = rig.executor.programs.compiler
    stacks = jax.tree.leaves(compiler.adapters, is_leaf=lambda node: isinstance(node, JoinedStack))
    assert len(stacks) == 4 * rig.model.num_layers
    assert all(isinstance(stack, JoinedStack) for stack in stacks)
    weights = {array.unsafe_buffer_pointer() for array in compiler.weights}
    assert all(array.unsafe_buffer_pointer() not in weights for array in rig.executor.programs.adapters.arrays)


def test_an_adapter_is_on_the_device_before_the_program_that_gives_weights_up(rig: Rig) -> None:
    adapters = rig.executor.programs.adapters
    like = one_adapter(rig.executor.programs.compiler.adapters or [])
    host = [np.zeros(one.shape, one.dtype) for one in jax.tree.leaves(like)]
    seen: list[jax.Array] = []

    def program(arrays: list[jax.Array], slot: np.int32, adapter: list[jax.Array]) -> list[jax.Array]:
        seen.extend(adapter)
        return arrays

    adapters.put(program, 0, host)
    assert len(seen) == len(host)
    assert all(isinstance(one, jax.Array) and one.is_ready() for one in seen)


def test_a_reset_without_the_weights_fails_at_once(rig: Rig) -> None:
    """The engine ends then, and another one loads them."""
    adapters = rig.executor.programs.adapters
    whole = adapters.arrays
    adapters.replace([jnp.copy(one) for one in whole])
    for one in adapters.arrays:
        one.delete()
    with pytest.raises(RuntimeError, match="lost"):
        adapters.clear()
    adapters.replace(whole)
    adapters.clear()


@pytest.mark.parametrize("fails", [False, True])
def test_a_mixed_batch_has_the_tokens_of_merged_weights(
    rig: Rig, folders: dict[str, Path], merged: dict[str | None, Rig], fails: bool
) -> None:
    """Three adapters, two slots, four rows; in one run the device is lost."""
    requests = crowd()
    executor = FaultyExecutor(rig.executor, lambda plan: fails and plan.step == 6)
    run = rig.run(requests, engine=engine(rig, folders, executor=executor))
    assert executor.num_resets == fails
    assert not run.failures
    for request in requests:
        merged[request.adapter].near_ties(request, run.tokens()[request.request_id, 0])
    assert len({tuple(tokens) for tokens in run.tokens().values()}) > 4, "the adapters change nothing"
