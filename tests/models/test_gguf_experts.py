"""GGUF files of models with experts, whose matrices of a layer are one tensor."""

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

from quire.errors import InvalidCheckpoint, UnsupportedModel
from quire.files.gguf import GGUFHeader
from quire.files.gguf_architecture import ARCHITECTURES
from quire.files.gguf_experts import expert_fields
from quire.files.gguf_keys import MetadataKeys
from quire.files.gguf_source import GGUFSource
from quire.models.checkpoint import Placement, load_weights
from quire.models.model import Model
from quire.models.params import ParamTree
from quire.models.registry import build_model
from quire.ops.native import int8_product
from quire.ops.weights.int8 import Grouped, Packed
from tests.files.gguf_writing import embedding, write_gguf
from tests.files.test_gguf_source import random_blocks
from tests.models.gguf_conversion import write_as_gguf
from tests.models.test_quantized import on_first_device
from tests.models.tiny import NamedTensors

Array = np.ndarray[Any, Any]
COUNT, MLP, EMBED = 5, 36, 256  # no whole number of tiles of outputs
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 96,
    "hidden_size": EMBED,
    "intermediate_size": 64,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "num_experts": COUNT,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "eos_token_id": 3,
}
EXPERTS = "model.layers.0.mlp.experts"
forms = pytest.mark.parametrize("placement", [None, on_first_device], ids=["kernel", "xla"])


class Watched(GGUFSource):
    """A file that remembers which experts were asked for as floats, and how many of those existed at once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.widened: set[str] = set()
        self.most = 0
        self._alive: list[weakref.ref[Array]] = []

    def read(self, name: str) -> Array:
        values = super().read(name)
        if ".experts." in name:
            self.widened.add(name)
            self._alive = [*(one for one in self._alive if one() is not None), weakref.ref(values)]
            self.most = max(self.most, len(self._alive))
        return values


def write(path: Path, type_: str, others: Mapping[str, str] | None = None, **changes: Any) -> tuple[Model, Watched]:
    config = CONFIG | changes
    tensors = NamedTensors(build_model(config))
    arrays = {name: tensors.read(name) for name in tensors.tensors()}
    source = Watched(write_as_gguf(path / "m.gguf", config, arrays, type_, others=others))
    return build_model(source.config), source


def feed_forward(model: Model, source: Any, placement: Placement | None, **how: Any) -> ParamTree:
    found: ParamTree = load_weights(model, source, dtype="float32", placement=placement, **how)["layers"][0]
    return found["feed_forward"]


def numbers(weight: Any) -> Array:
    """float32 [experts, outputs, inputs]"""
    if isinstance(weight, Packed):
        width = int(np.prod(weight.shape[1:-1]))
        each = [int8_product.rows(tiles, jnp.arange(width)) for tiles in weight.tiles]
        return np.stack(each).reshape(len(each), width, -1)[..., : weight.shape[-1]]
    floats = weight.widened() if isinstance(weight, Grouped) else weight.values
    return np.asarray(floats).reshape(len(floats), -1, weight.shape[-1])


def matrices(source: GGUFSource, part: str) -> Array:
    return np.stack([GGUFSource.read(source, f"{EXPERTS}.{index}.{part}.weight") for index in range(COUNT)])


@forms
@pytest.mark.parametrize("type_", ["Q8_0", "Q4_0"])
def test_codes_are_taken_over_as_they_are(tmp_path: Path, type_: str, placement: Placement | None) -> None:
    model, source = write(tmp_path, type_, moe_intermediate_size=96)
    found = feed_forward(model, source, placement, quantize="int8")
    assert not source.widened
    both = np.concatenate((matrices(source, "gate_proj"), matrices(source, "up_proj")), axis=1)
    np.testing.assert_array_equal(numbers(found["gate_up"]), both)
    np.testing.assert_array_equal(numbers(found["down"]), matrices(source, "down_proj"))


@forms
def test_rows_that_do_not_fill_a_tile_stay_with_their_expert(tmp_path: Path, placement: Placement | None) -> None:
    model, source = write(tmp_path, "Q8_0", {f"{EXPERTS}.down_proj.weight": "F32"}, moe_intermediate_size=MLP)
    found = feed_forward(model, source, placement, quantize="int8")
    both = np.concatenate((matrices(source, "gate_proj"), matrices(source, "up_proj")), axis=1)
    np.testing.assert_array_equal(numbers(found["gate_up"]), both)
    exact = matrices(source, "down_proj")
    assert np.abs(numbers(found["down"]) - exact).max() <= np.abs(exact).max() / 200


@forms
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_other_types_are_in_float_for_one_expert_at_a_time(
    tmp_path: Path, quantize: str, placement: Placement | None
) -> None:
    model, source = write(tmp_path, "Q5_1")
    found = feed_forward(model, source, placement, quantize=quantize)
    assert len(source.widened) == 3 * COUNT
    assert source.most <= 2  # a gate and its up
    exact = matrices(source, "down_proj")
    off = np.abs(numbers(found["down"]) - exact).max()
    assert off <= (np.abs(exact).max() / 200 if quantize == "int8" else 0)


@pytest.mark.parametrize("type_", ["F16", "BF16", "Q4_1", "Q5_0", "Q4_K", "Q5_K", "Q6_K"])
def test_experts_of_every_type_are_what_the_gguf_package_reads(tmp_path: Path, type_: str) -> None:
    kind = gguf.GGMLQuantizationType[type_]
    if type_.endswith("_K"):
        data = random_blocks(type_, 3 * 8, 512).reshape(3, 8, -1)
    else:
        values = np.random.default_rng(0).normal(size=(3, 8, 512)).astype(np.float32)
        data = gguf.quants.quantize(values, kind).view(np.uint8)
    tensors = embedding() | {"blk.0.ffn_up_exps.weight": (data, type_)}
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", "qwen3moe", METADATA, tensors))
    expected = gguf.quants.dequantize(data.reshape(24, -1), kind).reshape(3, 8, 512)
    for index in range(3):
        name = f"{EXPERTS}.{index}.up_proj.weight"
        assert source.tensors()[name].shape == (8, 512)
        np.testing.assert_array_equal(source.read(name).astype(np.float32), expected[index])


def mxfp4(exponents: list[int]) -> Array:
    """Bytes [8, row bytes] of 256 numbers a row, with any codes and these exponents."""
    blocks = np.random.default_rng(0).integers(0, 256, (64, 17), dtype=np.uint8)
    blocks[:, 0] = np.resize(exponents, 64)
    return blocks.reshape(8, -1)


def test_experts_of_mxfp4_are_codes_of_eight_bits_with_half_of_their_powers_of_two(tmp_path: Path) -> None:
    data = mxfp4(list(range(104, 144)))
    tensors = embedding() | {"blk.0.ffn_up_exps.weight": (np.stack((data, data[::-1])), "MXFP4")}
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", "gpt-oss", METADATA, tensors))
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType.MXFP4)
    for index, values in enumerate((expected, expected[::-1])):
        name = f"{EXPERTS}.{index}.up_proj.weight"
        np.testing.assert_array_equal(source.read(name), values)
        blocks = source.read_blocks(name)
        assert blocks is not None
        found = blocks["codes"] * blocks["scale"].astype(np.float32)[..., None]
        np.testing.assert_array_equal(found.reshape(8, 256), values)


@pytest.mark.parametrize("exponent", [103, 144])
def test_mxfp4_with_powers_that_float16_lacks_is_widened(tmp_path: Path, exponent: int) -> None:
    tensors = embedding() | {"blk.0.ffn_up_exps.weight": (mxfp4([120, exponent])[None], "MXFP4")}
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", "gpt-oss", METADATA, tensors))
    assert source.read_blocks(f"{EXPERTS}.0.up_proj.weight") is None


METADATA: dict[str, Any] = {
    "block_count": 1,
    "context_length": 128,
    "embedding_length": 256,
    "feed_forward_length": 512,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "expert_count": 3,
    "expert_used_count": 2,
}


def experts(count: int = 3, shape: tuple[int, ...] = (8, 256)) -> dict[str, tuple[Array, str]]:
    return {"blk.0.ffn_up_exps.weight": (np.ones((count, *shape), np.float32), "F32")}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"expert_count": 0}, InvalidCheckpoint, r"qwen3moe\.expert_count is 0, not a positive integer up to 1024"),
        ({"expert_count": 1025}, InvalidCheckpoint, r"expert_count is 1025, not a positive integer up to 1024"),
        ({"expert_count": True}, InvalidCheckpoint, r"expert_count is True"),
        ({"expert_count": "many"}, InvalidCheckpoint, r"expert_count is 'many'"),
        ({"expert_used_count": 4}, InvalidCheckpoint, r"expert_used_count is 4, not a positive integer up to 3"),
        ({"expert_count": 4}, InvalidCheckpoint, r"blk\.0\.ffn_up_exps\.weight has 3 experts; .*expert_count is 4"),
        ({"expert_gating_func": 2}, UnsupportedModel, r"expert_gating_func is 2; supported: 1"),
        ({"expert_weights_norm": 1}, InvalidCheckpoint, r"expert_weights_norm is 1, not true or false"),
        ({"expert_weights_scale": 2.5}, UnsupportedModel, r"expert_weights_scale = 2\.5 is not supported"),
        ({"expert_group_count": 2}, UnsupportedModel, r"expert_group_count = 2 is not supported"),
        ({"expert_feed_forward_length": 0}, InvalidCheckpoint, r"expert_feed_forward_length is 0"),
    ],
)
def test_metadata_of_experts_that_makes_no_sense_is_refused_by_its_key(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", METADATA | change, embedding() | experts())
    with pytest.raises(error, match=message):
        _ = GGUFSource(path).config


@pytest.mark.parametrize(
    ("gate", "count", "given", "groups"),
    [
        (2, 256, {}, (8, 4)),
        (1, 160, {}, (8, 3)),
        (1, 64, {}, (1, 1)),
        (2, 256, {"expert_group_count": 4, "expert_group_used_count": 2}, (4, 2)),
    ],
)
def test_groups_that_older_deepseek_files_leave_out_are_those_of_the_published_models(
    gate: int, count: int, given: dict[str, int], groups: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    said = {
        "expert_count": count,
        "expert_used_count": 8,
        "expert_gating_func": gate,
        "expert_feed_forward_length": 64,
        "expert_shared_count": 1,
    }
    metadata = {f"deepseek2.{key}": value for key, value in (said | given).items()}
    header = GGUFHeader(Path("m.gguf"), {"general.architecture": "deepseek2", **metadata}, {})
    fields = expert_fields(MetadataKeys(header), header, ARCHITECTURES["deepseek2"])
    assert (fields["n_group"], fields["topk_group"]) == groups
    assert ("has no expert_group_count" in caplog.text) == (not given and groups != (1, 1))


@pytest.mark.parametrize(
    ("count", "shape"), [(1025, (1, 1)), (3, (256,)), (3, (2, 2, 64))], ids=["too many", "a vector each", "four axes"]
)
def test_a_tensor_of_experts_with_another_shape_is_named(tmp_path: Path, count: int, shape: tuple[int, ...]) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", METADATA, embedding() | experts(count, shape))
    with pytest.raises(InvalidCheckpoint, match=r"blk\.0\.ffn_up_exps\.weight has the shape .* at most 1024 experts"):
        GGUFSource(path)


def test_a_missing_tensor_of_experts_and_one_of_other_sizes_are_named(tmp_path: Path) -> None:
    tensors = NamedTensors(build_model(CONFIG))
    arrays = {name: tensors.read(name) for name in tensors.tensors() if ".up_proj." not in name}
    for index in range(COUNT):
        arrays[f"{EXPERTS}.{index}.down_proj.weight"] = np.ones((EMBED, 128), np.float32)
    source = GGUFSource(write_as_gguf(tmp_path / "m.gguf", CONFIG, arrays))
    with pytest.raises(InvalidCheckpoint, match=r"5 misshapen: .*experts\.0\.down_proj.*5 missing: .*0\.up_proj"):
        load_weights(build_model(source.config), source, dtype="float32")


def test_a_file_with_more_experts_than_memory_is_refused(tmp_path: Path) -> None:
    tensors = embedding()
    for layer in range(100):
        for part in ("gate", "up", "down"):
            tensors[f"blk.{layer}.ffn_{part}_exps.weight"] = (np.ones((1024, 1, 1), np.float32), "F32")
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", METADATA, tensors)
    with pytest.raises(InvalidCheckpoint, match="more than 262144 tensors and experts"):
        GGUFSource(path)
