"""Models with weights of eight bits: near float32 in every kind of block, in both forms, and cut across devices."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from quire.executor.memory import weight_bytes
from quire.models.checkpoint import load_weights
from quire.models.context import PlatformOps
from quire.models.params import Param, ParamTree
from quire.models.parts.feed_forward import Experts, SharedExperts
from quire.models.random_weights import random_weights
from quire.models.registry import build_model
from quire.ops.attention.reference import whole_sequence
from quire.ops.native import int8_product
from quire.ops.weights.int8 import Grouped, Packed
from tests.models.cases import CASES
from tests.models.test_dtypes import BLOCKS
from tests.models.tiny import NamedTensors, prompt, whole_logits

Array = np.ndarray[Any, Any]


def on_first_device(param: Param) -> jax.sharding.Sharding:
    """A placement, with which weights are grouped for XLA instead of packed for the kernel."""
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def matrices(weights: ParamTree) -> list[object]:
    kinds = (Grouped, Packed)
    return [
        leaf for leaf in jax.tree.leaves(weights, is_leaf=lambda x: isinstance(x, kinds)) if isinstance(leaf, kinds)
    ]


def spread(got: Array, expected: Array) -> float:
    """The root mean square of the differences, in parts of that of the logits."""
    return float(np.sqrt(((got - expected) ** 2).mean() / (expected**2).mean()))


# One rounded router sends a token to other experts, which is no measure of the products. Weights that are off by half a
# percent move the logits of the tiny recurrent models as far.
ROUTED = ("qwen3_moe", "qwen3_next", "granitemoehybrid", "llama4")


@pytest.mark.parametrize("name", [name for name in BLOCKS if name not in ROUTED])
def test_int8_is_near_float32(name: str) -> None:
    model = build_model(CASES[name])
    tokens = prompt(12, model.vocab_size)
    exact = whole_logits(model, load_weights(model, NamedTensors(model), dtype="float32"), tokens)
    weights = load_weights(model, NamedTensors(model), dtype="float32", quantize="int8")
    assert matrices(weights)
    assert 0 < spread(whole_logits(model, weights, tokens), exact) < 0.12


@pytest.mark.parametrize("name", ["llama-biases", "gpt2", "qwen3_moe"])
def test_the_kernel_and_xla_compute_the_same_model(name: str) -> None:
    model = build_model(CASES[name])
    tokens = prompt(12, model.vocab_size)
    source = NamedTensors(model)
    native = load_weights(model, source, dtype="float32", quantize="int8")
    plain = load_weights(model, source, dtype="float32", quantize="int8", placement=on_first_device)
    assert all(isinstance(weight, Grouped) for weight in matrices(plain))
    assert int8_product.is_fast() == all(isinstance(weight, Packed) for weight in matrices(native))
    first, second = (whole_logits(model, weights, tokens) for weights in (native, plain))
    # A number halfway between two codes may get either: that token differs, by as much as quantising takes.
    errors = np.abs(first - second).max(axis=1) / np.abs(second).max()
    assert (errors < 1e-5).sum() >= len(tokens) - 1
    assert errors.max() < 0.1


EXPERTS = {"qwen3_moe": 0, "mixtral": 0, "gpt_oss": 0, "deepseek_v3": 1, "llama4": 1}  # the first layer that has them


def experts_of(part: object, weights: ParamTree) -> tuple[Experts, ParamTree]:
    if isinstance(part, SharedExperts):
        part, weights = part.experts, weights["experts"]
    assert isinstance(part, Experts)
    return part, weights


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_have_eight_bits_and_stay_near_float32_row_by_row(name: str) -> None:
    model = build_model(CASES[name])
    source, at = NamedTensors(model), EXPERTS[name]
    both = [load_weights(model, source, dtype="float32", quantize=kind)["layers"][at] for kind in ("none", "int8")]
    (block, exact), (_, int8) = (experts_of(model.blocks[at].feed_forward, one["feed_forward"]) for one in both)
    kind = Packed if int8_product.is_fast() else Grouped
    assert isinstance(int8["gate_up"], kind)
    assert isinstance(int8["down"], kind)
    x = np.random.default_rng(0).standard_normal((37, model.hidden_size), dtype=np.float32)
    run = jax.jit(partial(block, ops=PlatformOps(whole_sequence)))
    together = np.asarray(run(int8, x))
    assert 0 < spread(together, np.asarray(run(exact, x))) < 0.03
    if kind is Packed:
        alone = np.concatenate([run(int8, x[row : row + 1]) for row in range(len(x))])
        np.testing.assert_array_equal(alone, together)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_of_eight_bits_take_a_quarter_of_their_floats(name: str) -> None:
    wide = {"hidden_size": 128, "intermediate_size": 96, "moe_intermediate_size": 96}  # whole groups
    model = build_model(CASES[name] | wide)
    sizes = []
    for kind in ("none", "int8"):
        weights = random_weights(model, seed=0, dtype="float32", quantize=kind)
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(weights)) == weight_bytes(model, "float32", kind, None)
        _, experts = experts_of(model.blocks[0].feed_forward, weights["layers"][0]["feed_forward"])
        sizes.append(sum(leaf.nbytes for leaf in jax.tree.leaves([experts["gate_up"], experts["down"]])))
    assert sizes[1] / sizes[0] == (32 + 4) / (4 * 32)  # codes and a scale for each 32 of them


def test_random_weights_are_quantised_as_loaded_ones_are() -> None:
    model = build_model(CASES["llama"])
    tokens = prompt(12, model.vocab_size)
    exact, rounded = (
        whole_logits(model, random_weights(model, seed=1, dtype="float32", quantize=quantize), tokens)
        for quantize in ("none", "int8")
    )
    assert 0 < spread(rounded, exact) < 0.12


def test_the_size_of_quantised_weights_is_known_before_they_are_read() -> None:
    model = build_model(CASES["llama"])
    weights = load_weights(model, NamedTensors(model), dtype="float32", quantize="int8", placement=on_first_device)
    held = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(weights))
    assert held <= weight_bytes(model, "float32", "int8", None) < weight_bytes(model, "float32", "none", None)
