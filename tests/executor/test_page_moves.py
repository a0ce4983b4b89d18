"""Programs that move pages between the device and the host have the platform's kernels: here the GPU's, interpreted."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.executor.programs import compiler
from quire.models.checkpoint import load_weights
from quire.models.registry import build_model
from quire.ops.attention.step_attention import PLAIN
from quire.ops.gpu.move_pages import gather, scatter
from quire.ops.page_moves import PageMoves
from tests.executor.conftest import SHAPES, config_of
from tests.executor.rig import NamedTensors, executor_of
from tests.executor.test_host_pages import host_copies
from tests.fake_executor import plan_of


class Noted:
    """A function, and the number of times that it was traced."""

    def __init__(self, function: Any) -> None:
        self._function, self.count = partial(function, interpret=True), 0

    def __call__(self, *given: Any) -> Any:
        self.count += 1
        return self._function(*given)


@pytest.mark.parametrize("is_pinned", [False, True])
def test_pages_are_the_same_after_kernels_have_moved_them(is_pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are read, too. A few of many are restored, so that some rows go nowhere."""
    moves = PageMoves(Noted(gather), Noted(scatter))
    monkeypatch.setattr(compiler, "kernels_for", lambda *_: PLAIN._replace(moves=moves))
    model = build_model(config_of("llama", num_hidden_layers=2))
    weights = load_weights(model, NamedTensors(model), dtype="bfloat16")
    executor = executor_of(model, weights, SHAPES, threads=1, num_host_pages=30, pins_host_pages=is_pinned)
    rng = np.random.default_rng(5)
    pages = executor.state.pages
    filled = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 1, leaf.shape).astype(leaf.dtype)), pages)
    executor.state = executor.state._replace(pages=filled)
    before = executor.read_pages(range(1, 40))()
    size = len(before) // 39
    saved = {page: page for page in range(1, 17)}
    executor.submit(plan_of(1, (), copies=host_copies(saved, to_host=True))).result()
    restored = {21: 4, 22: 16, 29: 1}
    executor.submit(plan_of(2, (), copies=host_copies(restored, to_host=False))).result()
    after = executor.read_pages(range(1, 40))()
    for page in range(1, 40):
        source = restored.get(page, page)
        assert after[(page - 1) * size : page * size] == before[(source - 1) * size : source * size], page
    assert moves.gather.count >= 1
    assert moves.scatter.count >= 1
    executor.close()
