"""Eight-bit weights from quantised GGUF files: taken over where that is exact, and rounded anew elsewhere."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.files.gguf_source import GGUFSource
from quire.files.tensor_source import TensorInfo
from quire.models.checkpoint import Placement, load_weights
from quire.models.model import Model
from quire.models.params import ParamTree
from quire.models.registry import build_model
from quire.ops.native import int8_product
from quire.ops.weights.int8 import Grouped, Packed
from quire.ops.weights.weight import Weight, is_weight
from tests.models.cases import CASES
from tests.models.gguf_conversion import write_as_gguf
from tests.models.test_quantized import on_first_device
from tests.models.tiny import NamedTensors

Array = np.ndarray[Any, Any]
CONFIG: dict[str, Any] = {
    "model_type": "llama",  # the family whose files have rows in another order
    "vocab_size": 90,  # no whole number of tiles
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "eos_token_id": 3,
}
FIRST, SECOND = "model.layers.0", "model.layers.1"
# With a placement weights are grouped for XLA, without one packed for the kernel.
forms = pytest.mark.parametrize("placement", [None, on_first_device], ids=["kernel", "xla"])


class Watched(GGUFSource):
    """A file that remembers which of its matrices were asked for as floats."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.widened: set[str] = set()

    def read(self, name: str) -> Array:
        values = super().read(name)
        if values.ndim > 1:
            self.widened.add(name)
        return values


class Floats:
    """The same tensors from a source that knows of no blocks."""

    def __init__(self, source: GGUFSource) -> None:
        self._source = source

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._source.tensors()

    def read(self, name: str) -> Array:
        return self._source.read(name)


def write(path: Path, type_: str, others: Mapping[str, str] | None = None, **changes: Any) -> tuple[Model, Watched]:
    config = CONFIG | changes
    tensors = NamedTensors(build_model(config))
    arrays = {name: tensors.read(name) for name in tensors.tensors()}
    source = Watched(write_as_gguf(path / "m.gguf", config, arrays, type_, others=others))
    return build_model(source.config), source


def int8(model: Model, source: Any, placement: Placement | None) -> ParamTree:
    return load_weights(model, source, dtype="float32", quantize="int8", placement=placement)


def numbers(weight: Any) -> Array:
    if isinstance(weight, Packed):
        channels = prod(weight.shape[: -weight.num_contracted])
        return np.asarray(int8_product.rows(weight.tiles, jnp.arange(channels)).reshape(weight.shape))
    if isinstance(weight, Weight):
        return np.asarray(weight.widened() if isinstance(weight, Grouped) else weight.values)
    return np.asarray(weight)


def all_numbers(weights: ParamTree) -> Any:
    return jax.tree.map(numbers, weights, is_leaf=is_weight)


def assert_same(found: ParamTree, expected: ParamTree) -> None:
    """The very codes and scales."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other, strict=True)


@forms
@pytest.mark.parametrize("type_", ["Q8_0", "Q4_0"])
def test_weights_are_exactly_those_of_the_file_and_never_floats(
    tmp_path: Path, type_: str, placement: Placement | None
) -> None:
    model, source = write(tmp_path, type_)
    found = all_numbers(int8(model, source, placement))
    assert not source.widened
    assert_same(found, all_numbers(load_weights(model, source, dtype="float32")))


@forms
def test_what_is_taken_over_is_what_rounding_would_have_made_of_it(tmp_path: Path, placement: Placement | None) -> None:
    model, source = write(tmp_path, "Q8_0")
    assert_same(int8(model, source, placement), int8(model, Floats(source), placement))


@forms
def test_a_weight_is_rounded_where_one_of_its_tensors_has_another_type(
    tmp_path: Path, placement: Placement | None
) -> None:
    others = {
        f"{FIRST}.self_attn.k_proj.weight": "Q4_1",
        f"{FIRST}.mlp.up_proj.weight": "Q4_0",
        f"{SECOND}.mlp.gate_proj.weight": "F16",
    }
    model, source = write(tmp_path, "Q8_0", others)
    found = int8(model, source, placement)
    own = {f"{SECOND}.mlp.{part}_proj.weight" for part in ("gate", "up")}
    assert source.widened == own | {f"{FIRST}.self_attn.{part}_proj.weight" for part in "qkv"}

    gate_up = found["layers"][0]["feed_forward"].pop("gate_up")
    exact = load_weights(model, source, dtype="float32")["layers"][0]["feed_forward"]["gate_up"]
    np.testing.assert_array_equal(numbers(gate_up), numbers(exact))
    rounded = int8(model, Floats(source), placement)
    del rounded["layers"][0]["feed_forward"]["gate_up"]
    assert_same(found, rounded)


@forms
def test_a_weight_is_rounded_where_its_groups_are_not_those_of_the_file(
    tmp_path: Path, placement: Placement | None
) -> None:
    model, source = write(tmp_path, "Q8_0", head_dim=16)  # the output's inputs are cut at each head
    found = int8(model, source, placement)
    assert source.widened == {f"{layer}.self_attn.o_proj.weight" for layer in (FIRST, SECOND)}
    assert_same(found, int8(model, Floats(source), placement))


def test_keys_that_are_copied_for_more_devices_are_copied_with_their_scales(tmp_path: Path) -> None:
    model, source = write(tmp_path, "Q8_0")
    copied = model.for_devices(2 * model.layers[0].kv_heads)
    assert copied.layers[0].kv_heads == 2 * model.layers[0].kv_heads
    found = int8(copied, source, on_first_device)
    assert not source.widened
    assert_same(found, int8(copied, Floats(source), on_first_device))


class Asked(NamedTensors):
    """A checkpoint without blocks that remembers which were asked for."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.names: set[str] = set()

    def read_blocks(self, name: str) -> None:
        self.names.add(name)


def test_a_weight_whose_tensors_are_turned_around_is_never_made_of_blocks() -> None:
    model = build_model(CASES["gpt2"] | {"n_embd": 64, "n_inner": 64})
    source = Asked(model)
    int8(model, source, on_first_device)
    assert source.names == {"transformer.wte.weight"}
