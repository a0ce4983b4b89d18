import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from quire.errors import InvalidCheckpoint
from quire.files.model_files import locate
from quire.files.shapes import SHAPES
from quire.files.tensor_source import TensorInfo
from quire.models.checkpoint import leaves, load_weights
from quire.models.random_weights import random_weights
from quire.models.registry import build_model
from tests.models.gguf_conversion import write_as_gguf
from tests.models.tiny import NamedTensors, prompt, whole_logits
from tests.shared_programs import environment

TINY = build_model(SHAPES["tiny"])
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class Arrays:
    """A checkpoint in memory."""

    def __init__(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        self.arrays = dict(arrays)

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(array.shape, array.dtype.name) for name, array in self.arrays.items()}

    def read(self, name: str) -> np.ndarray[Any, Any]:
        return self.arrays[name]


def tiny_arrays() -> dict[str, np.ndarray[Any, Any]]:
    source = NamedTensors(TINY)
    return {name: source.read(name) for name in source.tensors()}


def test_every_difference_is_reported_by_name_at_once() -> None:
    arrays = tiny_arrays()
    del arrays["model.layers.0.mlp.up_proj.weight"]
    del arrays["model.norm.weight"]
    arrays["model.layers.2.mlp.up_proj.weight"] = np.ones(3, np.float32)
    arrays["score.weight"] = np.ones(3, np.float32)
    arrays["model.layers.1.self_attn.q_proj.weight"] = np.ones((64, 65), np.float32)
    arrays["model.layers.1.self_attn.k_proj.weight"] = np.ones((32, 64), np.int8)
    arrays["model.layers.0.input_layernorm.weight"] = np.ones(63, np.float64)  # wrong in both ways
    with pytest.raises(InvalidCheckpoint) as caught:
        load_weights(TINY, Arrays(arrays), dtype="float32")
    message = str(caught.value)
    assert "2 missing: model.layers.0.mlp.up_proj.weight [128, 64], model.norm.weight [64]" in message
    assert "2 extra: model.layers.2.mlp.up_proj.weight, score.weight" in message
    assert "2 misshapen: " in message
    assert "model.layers.1.self_attn.q_proj.weight is [64, 65], the config says [64, 64]" in message
    assert "model.layers.0.input_layernorm.weight is [63], the config says [64]" in message
    assert "2 wrong dtype: " in message
    assert "model.layers.1.self_attn.k_proj.weight is int8, supported are float32, float16, bfloat16" in message
    assert "model.layers.0.input_layernorm.weight is float64" in message


def test_nothing_is_read_before_everything_fits() -> None:
    class Unreadable(Arrays):
        def read(self, name: str) -> np.ndarray[Any, Any]:
            raise AssertionError(f"{name} was read")

    arrays = tiny_arrays()
    del arrays["model.norm.weight"]
    with pytest.raises(InvalidCheckpoint, match=r"model\.norm\.weight"):
        load_weights(TINY, Unreadable(arrays), dtype="float32")


def test_tensors_the_model_has_no_use_for_are_left_alone() -> None:
    arrays = tiny_arrays()
    arrays["lm_head.weight"] = np.full((512, 64), np.nan, np.float32)  # tied: the embedding is used
    arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.int64)
    weights = load_weights(TINY, Arrays(arrays), dtype="float32")
    assert all(bool(jnp.isfinite(weight).all()) for weight in jax.tree.leaves(weights))


def test_two_names_for_one_tensor_are_refused() -> None:
    config = SHAPES["tiny"] | {"model_type": "gemma3_text", "architectures": None, "sliding_window": 8, "head_dim": 16}
    model = build_model(config)
    source = NamedTensors(model)
    arrays = {name: source.read(name) for name in source.tensors()}
    arrays["language_model.model.norm.weight"] = arrays["model.norm.weight"]
    with pytest.raises(InvalidCheckpoint, match=r"twice: model\.norm\.weight \(as model\.norm\.weight and language"):
        load_weights(model, Arrays(arrays), dtype="float32")


@pytest.mark.parametrize("stored", BYTES)
@pytest.mark.parametrize("wanted", BYTES)
def test_any_float_becomes_any_other(stored: str, wanted: str) -> None:
    arrays = {name: array.astype(jnp.dtype(stored)) for name, array in tiny_arrays().items()}
    weights = load_weights(TINY, Arrays(arrays), dtype=wanted)
    assert {weight.dtype.name for weight in jax.tree.leaves(weights)} == {wanted}
    expected = arrays["model.embed_tokens.weight"].astype(jnp.dtype(wanted))
    np.testing.assert_array_equal(*jax.tree.leaves(weights["embedding"]), expected)


def test_progress_counts_every_byte() -> None:
    reports: list[tuple[int, int]] = []

    class Recorded:
        def __init__(self, label: str) -> None:
            assert label == "Loading weights"

        def __enter__(self):
            return lambda done, total: reports.append((done, total))

        def __exit__(self, *error: object) -> None: ...

    arrays = {name: array.astype(ml_dtypes.bfloat16) for name, array in tiny_arrays().items()}
    load_weights(TINY, Arrays(arrays), dtype="float32", progress=Recorded)
    total = sum(array.nbytes for array in arrays.values())
    assert reports[-1] == (total, total)
    assert [done for done, _ in reports] == sorted({done for done, _ in reports})
    assert len(reports) == len(leaves(TINY.params()))


def test_weights_do_not_change_with_the_file_they_came_from(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["tiny"]))
    save_file(tiny_arrays(), tmp_path / "model.safetensors")
    source = locate(str(tmp_path)).open_weights()
    assert source is not None
    weights = load_weights(TINY, source, dtype="float32")
    before = [np.array(weight) for weight in jax.tree.leaves(weights)]
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(-100_000, 2)
        file.write(bytes(100_000))
    for weight, copy in zip(jax.tree.leaves(weights), before, strict=True):
        np.testing.assert_array_equal(weight, copy)


BIG = {
    "model_type": "llama",
    "vocab_size": 16_384,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_the_host_holds_at_most_three_times_the_largest_weight_besides_those_placed(kind: str, tmp_path: Path) -> None:
    model = build_model(BIG)
    arrays = {
        tensor.name: np.full(tensor.shape, 0.5, ml_dtypes.bfloat16 if kind == "safetensors" else np.float32)
        for param in leaves(model.params())
        for tensor in param.sources
    }
    if kind == "safetensors":
        (tmp_path / "config.json").write_text(json.dumps(BIG))
        save_file(arrays, tmp_path / "model.safetensors")
    else:
        write_as_gguf(tmp_path / "model.gguf", BIG, arrays, "Q8_0")
    total = sum(array.size * 4 for array in arrays.values())
    del arrays
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.measure_loading", str(tmp_path), "float32"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    found = json.loads(done.stdout)
    assert found["placed"] == total
    assert found["placed"] > 6 * found["largest"]  # so that holding everything twice would show
    assert found["besides"] <= 3 * found["largest"], found


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_a_quantised_checkpoint_is_never_held_in_float(tmp_path: Path) -> None:
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
    (tmp_path / "config.json").write_text(json.dumps({**BIG, "quantization_config": quantization}))
    arrays, in_float = {}, 0
    for param in leaves(build_model(BIG).params()):
        for tensor in param.sources:
            in_float += math.prod(tensor.shape) * 4
            if not tensor.name.endswith("_proj.weight"):
                arrays[tensor.name] = np.full(tensor.shape, 0.5, np.float16)
                continue
            module = tensor.name.removesuffix(".weight")
            outputs, inputs = tensor.shape
            arrays[f"{module}.qweight"] = np.full((inputs // 8, outputs), 0x12345678, np.int32)
            arrays[f"{module}.qzeros"] = np.full((inputs // 128, outputs // 8), 0x77777777, np.int32)
            arrays[f"{module}.scales"] = np.full((inputs // 128, outputs), 0.5, np.float16)
            arrays[f"{module}.g_idx"] = np.arange(inputs, dtype=np.int32) // 128
    save_file(arrays, tmp_path / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.measure_loading", str(tmp_path), "bfloat16"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    found = json.loads(done.stdout)
    assert found["placed"] < 0.3 * in_float
    assert found["besides"] <= 3 * found["largest"] < 0.3 * in_float, found


SHARDED = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from quire.files.shapes import SHAPES
from quire.models.checkpoint import load_weights
from quire.models.random_weights import random_weights
from quire.models.registry import build_model
from tests.models.tiny import NamedTensors

assert jax.device_count() == 8
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
cuts = {"kv_heads": "y", "mlp": ("x", "y"), "vocab": "x"}
model = build_model(SHAPES["tiny"]).for_devices(8)
def placement(param):
    return NamedSharding(mesh, PartitionSpec(*(cuts.get(axis) for axis in param.axes)))

def compare(whole, cut):
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(cut), strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(cut["embedding"].values.sharding.device_set) == 8
    assert cut["embedding"].values.addressable_shards[0].data.shape == (128, 64)

source = NamedTensors(model)
compare(load_weights(model, source, dtype="float32"),
        load_weights(model, source, dtype="float32", placement=placement))
compare(random_weights(model, seed=3, dtype="float32"),
        random_weights(model, seed=3, dtype="float32", placement=placement))
print("the same")
"""


def test_weights_spread_over_devices_are_the_same_weights() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHARDED],
        env=environment(num_devices=8),
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == "the same", done.stderr


def test_random_weights_are_a_function_of_their_seed() -> None:
    one, same, other = (random_weights(TINY, seed=seed, dtype="float32") for seed in (7, 7, 8))
    for a, b, c in zip(*(jax.tree.leaves(weights) for weights in (one, same, other)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert not np.array_equal(a, c)


def test_random_weights_fit_the_model() -> None:
    weights = random_weights(TINY, seed=0, dtype="bfloat16")
    assert [(w.shape, w.dtype.name) for w in jax.tree.leaves(weights)] == [
        (param.shape, "bfloat16") for param in leaves(TINY.params())
    ]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral"])
def test_random_weights_give_finite_and_varied_logits(family: str) -> None:
    config = SHAPES["tiny"] | {"model_type": family, "architectures": None}
    if family == "gemma3_text":
        config |= {"sliding_window": 8, "head_dim": 16}
    if family == "mixtral":
        config |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = build_model(config)
    weights = random_weights(model, seed=0, dtype="float32")
    logits = whole_logits(model, weights, prompt(12, 512))
    assert np.isfinite(logits).all()
    assert (logits.std(axis=-1) > 0.1).all()
    assert np.abs(logits).max() < 100
    assert len(set(logits.argmax(axis=-1).tolist())) > 3
