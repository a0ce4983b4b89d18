"""Logits of the engine's programs in bfloat16, for the shapes of an 8B model, against the plain forward."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.core.plan import Chunk, Kind, SlotStart
from quire.executor.batch import Launch, Packer, num_groups, sampled_rows
from quire.executor.programs import Programs
from quire.executor.shapes import Shapes
from quire.executor.slots import pack_starts
from quire.files.shapes import SHAPES
from quire.models.random_weights import random_weights
from quire.models.registry import build_model
from quire.ops.step_attention import kernels_for
from quire.request import SamplingParams
from tests.executor.rig import _logits

pytestmark = pytest.mark.gpu
ON_GPU = jax.default_backend() == "gpu"
# All of its layers would tell no more than four do; without a GPU, none so wide.
SMALLER = {"num_hidden_layers": 4} | (
    {} if ON_GPU else {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
)
LONG, SHORT = 2300, 900  # tokens of two prompts
CUT = 2240  # where the longer one is cut in two


def chunk(slot: int, start: int, end: int, is_decode: bool = False) -> Chunk:
    return Chunk(slot, 0, 0, slot, Kind.DECODE if is_decode else Kind.PREFILL, start, end - start, (), True)


def run(programs: Programs, packer: Packer, state: Any, chunks: tuple[Chunk, ...], alone: int) -> tuple[Any, list[Any]]:
    """The logits after each chunk."""
    rows = [index for index, one in enumerate(chunks) if one.length == 1]
    fills = [index for index, one in enumerate(chunks) if one.length > 1]
    launch = Launch(rows, fills, sum(num_groups(chunks[index]) for index in fills))
    bucket, forward = programs.forward(len(rows), launch.num_groups, False, alone)
    assert bool(bucket.alone) == bool(alone and ON_GPU)
    state, logits, _ = forward(programs.weights, state, packer.pack(launch, chunks, set(), bucket))
    order = {index: row for row, index in sampled_rows(chunks, launch, bucket)}
    return state, [np.asarray(logits[order[index]]) for index in range(len(chunks))]


def test_logits_of_new_prompts_of_mixed_steps_and_of_decodes_are_those_of_the_plain_forward() -> None:
    model = build_model(SHAPES["llama-3.1-8b"] | SMALLER)
    weights = random_weights(model, seed=0, dtype="bfloat16")
    most_alone = kernels_for(jax.default_backend(), "bfloat16", 1).most_alone
    shapes = Shapes(256, 32, 8, 4096, 4096, min_rows=8, min_groups=4, most_alone=most_alone)
    programs = Programs(model, weights, shapes, threads=2)
    packer = Packer(shapes.num_slots, shapes.page_size)
    chance = np.random.default_rng(0)
    known = [tuple(chance.integers(10, 100_000, size).tolist()) for size in (LONG + 1, SHORT + 2)]
    pages = np.split(chance.permutation(np.arange(1, 256))[:220], 2)
    starts = [
        (SlotStart(slot, SamplingParams(), 0, 0, tokens, (), 0, (), None), tuple(pages[slot].tolist()))
        for slot, tokens in enumerate(known)
    ]
    state = programs.empty_state()
    state = state._replace(slots=programs.start(8)(state.slots, pack_starts(starts, 8, shapes)))

    got: dict[tuple[int, int], Any] = {}
    state, logits = run(programs, packer, state, (chunk(0, 0, CUT), chunk(1, 0, SHORT)), alone=2 if most_alone else 0)
    got[1, SHORT - 1] = logits[1]
    state, logits = run(programs, packer, state, (chunk(1, SHORT, SHORT + 1, True), chunk(0, CUT, LONG)), alone=0)
    got[1, SHORT], got[0, LONG - 1] = logits
    decodes = (chunk(0, LONG, LONG + 1, True), chunk(1, SHORT + 1, SHORT + 2, True))
    state, logits = run(programs, packer, state, decodes, alone=0)
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
