"""Logits of the engine's programs in bfloat16, for the shapes of an 8B model, against the plain forward."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.core.plan import Chunk, Kind, SlotStart
from quire.executor.launch import Packer, launches_of
from quire.executor.programs.compiler import Compiler
from quire.executor.programs.programs import Programs
from quire.executor.shapes import Shapes
from quire.executor.slots import pack_starts
from quire.files.shapes import SHAPES
from quire.models.random_weights import random_weights
from quire.models.registry import build_model
from quire.ops.kernels import kernels_for
from quire.request import SamplingParams
from tests.executor.rig import _logits
from tests.fake_executor import plan_of

pytestmark = pytest.mark.gpu
ON_GPU = jax.default_backend() == "gpu"
# All of its layers would tell no more than four do; without a GPU, none so wide.
SMALLER = {"num_hidden_layers": 4} | (
    {} if ON_GPU else {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
)
LONG, SHORT = 2300, 800  # tokens of two prompts
CUT = 2240  # where the longer one is cut in two


def chunk(slot: int, start: int, end: int, is_decode: bool = False) -> Chunk:
    return Chunk(slot, 0, 0, slot, Kind.DECODE if is_decode else Kind.PREFILL, start, end - start, (), True)


def run(
    programs: Programs, model: Any, weights: Any, packer: Packer, state: Any, chunks: tuple[Chunk, ...], is_fresh: bool
) -> tuple[Any, list[Any]]:
    """The logits after each chunk."""
    (launch,) = launches_of(plan_of(1, chunks), programs.compiler.shapes)
    ladder = programs.compiler.shapes.ladder
    shape = ladder.choose(launch.shape, launch.num_tiles, ladder.all())
    assert shape is not None
    forward = programs.get(shape)
    assert bool(shape.fresh_sequences) == (is_fresh and ON_GPU)
    assert shape.decodes_only == (not launch.num_prefills)
    state, computed = forward(programs.compiler.weights, state, packer.pack(launch, shape))
    logits = model.logits(weights, computed.hidden)
    order = {index: row for row, index in enumerate(launch.sampled)}
    return state, [np.asarray(logits[order[index]]) for index in range(len(chunks))]


def test_logits_of_new_prompts_of_mixed_steps_and_of_decodes_are_those_of_the_plain_forward() -> None:
    model = build_model(SHAPES["llama-3.1-8b"] | SMALLER)
    weights = random_weights(model, seed=0, dtype="bfloat16")
    fresh = kernels_for(jax.default_backend(), "bfloat16").max_fresh_sequences
    shapes = Shapes(256, 32, 8, 4096, 4096, min_tokens=8, is_fine=True, specialised=True, max_fresh_sequences=fresh)
    programs = Programs(Compiler(model, weights, shapes), threads=2)
    packer = Packer(shapes)
    chance = np.random.default_rng(0)
    known = [tuple(chance.integers(10, 100_000, size).tolist()) for size in (LONG + 1, SHORT + 2)]
    pages = np.split(chance.permutation(np.arange(1, 256))[:220], 2)
    starts = [
        (SlotStart(slot, SamplingParams(), 0, 0, tokens, (), 0, (), None), (tuple(pages[slot].tolist()),))
        for slot, tokens in enumerate(known)
    ]
    state = programs.compiler.empty_state()
    state = state._replace(slots=programs.get(("start", 8))(state.slots, pack_starts(starts, 8, shapes)))

    got: dict[tuple[int, int], Any] = {}
    step = partial(run, programs, model, weights, packer)
    state, logits = step(state, (chunk(0, 0, CUT), chunk(1, 0, SHORT)), is_fresh=True)
    got[1, SHORT - 1] = logits[1]
    state, logits = run(
        programs, model, weights, packer, state, (chunk(1, SHORT, SHORT + 1, True), chunk(0, CUT, LONG)), is_fresh=False
    )
    got[1, SHORT], got[0, LONG - 1] = logits
    decodes = (chunk(0, LONG, LONG + 1, True), chunk(1, SHORT + 1, SHORT + 2, True))
    state, logits = step(state, decodes, is_fresh=False)
    got[0, LONG], got[1, SHORT + 1] = logits

    exact = jax.tree.map(lambda weight: weight.astype(jnp.float32), weights)
    reference = jax.jit(partial(_logits, model))
    for (slot, position), ours in got.items():
        tokens = jnp.asarray(known[slot])
        lengths = jnp.full(len(tokens), len(tokens))
        plain, right = (np.asarray(reference(those, tokens, lengths)[position]) for those in (weights, exact))
        error, allowed = (np.linalg.norm(one - right) / np.linalg.norm(right) for one in (ours, plain))
        print(f"slot {slot} position {position}: relative error {error:.4f}, of the plain forward {allowed:.4f}")
        assert error <= max(1.5 * allowed, 2e-3), f"slot {slot}, position {position}: {error}, plain {allowed}"
