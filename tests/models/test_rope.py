"""Rope in configs, in every spelling. The angles themselves are compared with transformers."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from quire.models.fields import Fields
from quire.models.parts.rope import DynamicRope, LongRope, Rope, read_rope
from quire.models.registry import build_model
from quire.ops.attention.heads import Rotation, rotate
from tests.models.cases import CASES

YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"short_factor": [1.0, 2.0, 3.0, 4.0], "long_factor": [5.0, 6.0, 7.0, 8.0]}


def rope(**fields: Any) -> Rope:
    renamed = {"su": "longrope"}
    return read_rope(Fields({"max_position_embeddings": 128, **fields}, "llama"), head_dim=8, renamed=renamed)


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"rope_theta": 99.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 99.0}}),
        (
            {"rope_theta": 99.0, "rope_scaling": {"type": "linear", "factor": 3}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 99.0, "factor": 3.0}},
        ),
        (
            {"rope_scaling": {"type": "yarn", **YARN}},
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10_000, **YARN}},
        ),
        (
            {"rope_scaling": {"type": "su", **LONG}, "original_max_position_embeddings": 64},
            {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 64, **LONG}},
        ),
    ],
)
def test_both_spellings_mean_the_same(older: dict[str, Any], newer: dict[str, Any]) -> None:
    positions, lengths = jnp.arange(100), jnp.full(100, 100)
    first, second = rope(**older).rotation(positions, lengths), rope(**newer).rotation(positions, lengths)
    assert np.array_equal(first.cos, second.cos)
    assert np.array_equal(first.sin, second.sin)
    plain = rope().rotation(positions, lengths)
    assert not np.allclose(first.cos, plain.cos, atol=1e-3)


def test_features_beyond_the_rotated_ones_pass_through() -> None:
    quarter_turn = Rotation(jnp.zeros((1, 2)), jnp.ones((1, 2)))
    turned = rotate(jnp.arange(1.0, 7.0)[None], quarter_turn)
    assert turned.tolist() == [[-3.0, -4.0, 1.0, 2.0, 5.0, 6.0]]


def test_positions_a_rope_reaches() -> None:
    assert rope().max_positions == 128
    assert rope(rope_scaling={"rope_type": "linear", "factor": 4.0}).max_positions == 128
    assert rope(rope_scaling={"rope_type": "dynamic", "factor": 4.0}).max_positions == 512
    assert rope(rope_scaling={"rope_type": "yarn", **YARN}).max_positions == 256


def test_only_ropes_that_depend_on_length_tell_prompts_apart() -> None:
    assert [build_model(CASES["llama"]).prefix_key(length) for length in (1, 1000)] == [0, 0]
    long = build_model(CASES["phi3-long"])
    assert long.depends_on_length
    assert [long.prefix_key(length) for length in (16, 17, 90)] == [0, 1, 1]
    dynamic = build_model(CASES["llama-dynamic"])
    assert dynamic.depends_on_length
    assert [dynamic.prefix_key(length) for length in (1, 24, 25, 26)] == [0, 0, 1, 2]


@pytest.mark.parametrize("kind", [LongRope, DynamicRope])
def test_each_token_is_rotated_by_the_length_of_its_own_sequence(kind: type[Rope]) -> None:
    scaling = {"rope_type": "longrope", **LONG} if kind is LongRope else {"rope_type": "dynamic", "factor": 2.0}
    original = {"original_max_position_embeddings": 64} if kind is LongRope else {}
    ours = rope(rope_scaling=scaling, **original)
    assert type(ours) is kind
    positions = jnp.asarray([50, 50, 50])
    mixed = ours.rotation(positions, jnp.asarray([51, 300, 51]))
    short, long = (ours.rotation(positions, jnp.full(3, length)) for length in (51, 300))
    assert np.array_equal(mixed.cos, jnp.stack([short.cos[0], long.cos[1], short.cos[2]]))
    assert not np.allclose(short.cos[0], long.cos[0])
