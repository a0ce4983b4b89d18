"""An adapter computes what its changes merged into the weights would."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.errors import InvalidAdapter
from quire.files.peft import open_adapter
from quire.models.adapters import (
    AdapterSizes,
    adapted_layers,
    check_adapter,
    empty,
    host_adapter,
    join,
    make_room,
    put,
    structure,
)
from quire.models.checkpoint import leaves, load_weights
from quire.models.context import Adapters, NoStates, PlatformOps, TokenContext
from quire.models.model import Model
from quire.models.params import ParamTree
from quire.models.registry import FAMILIES, build_model
from quire.ops.attention.reference import whole_sequence
from quire.ops.weights.adapters import RoomyWeight
from tests.models.adapter_files import Merged, modules_of, write_adapter
from tests.models.cases import CASES, PROMPT_LENGTH, VOCAB_SIZE
from tests.models.tiny import NamedTensors, prompt, relative_error, whole_logits, without_native

# The families, and the mechanisms that change how weights are joined.
NAMES = [name for name in CASES if name in FAMILIES] + ["gemma3", "llama-biases", "llama-one-key"]
LLAMA = build_model(CASES["llama"])
MODULE = "base_model.model.model.layers.0.self_attn.q_proj"


def stacks_of(model: Model, adapters: list[Path], rank: int) -> list[Any]:
    stacks = empty(structure(model, AdapterSizes(len(adapters), rank), None))
    for slot, folder in enumerate(adapters):
        stacks = put(stacks, jnp.int32(slot), host_adapter(model, open_adapter(folder), rank, np.float32))
    return stacks


def adapted(model: Model, tokens: list[int]) -> Callable[[ParamTree, list[Any], int], np.ndarray[Any, Any]]:
    """The logits after each token, by weights, stacks and the adapter that all tokens have."""

    def run(weights: ParamTree, stacks: list[Any], rows: jax.Array) -> jax.Array:
        count = len(tokens)
        context = TokenContext(jnp.asarray(tokens), jnp.arange(count), jnp.full(count, count), Adapters(rows, stacks))
        hidden, _ = model.forward(weights, context, NoStates(), PlatformOps(whole_sequence))
        return model.logits(weights, hidden)

    compiled = jax.jit(run)
    return lambda weights, stacks, row: np.asarray(compiled(weights, stacks, jnp.full(len(tokens), row, jnp.int32)))


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_merged_weights(name: str, tmp_path: Path) -> None:
    model = build_model(CASES[name])
    source = NamedTensors(model)
    other, own = (write_adapter(tmp_path / f"{seed}", model, seed=seed, rank=2 + seed) for seed in (1, 2))
    tokens = prompt(PROMPT_LENGTH, VOCAB_SIZE)
    expected = whole_logits(model, load_weights(model, Merged(source, model, own, 4 / 4), dtype="float32"), tokens)
    weights = load_weights(model, source, dtype="float32")
    run, stacks = adapted(model, tokens), stacks_of(model, [other, own], rank=5)
    assert relative_error(run(weights, stacks, 2), expected) < 1e-4
    assert relative_error(run(weights, stacks, 1), expected) > 1e-2
    assert relative_error(run(weights, stacks, 0), expected) > 1e-2, "the adapter changes nothing"


@pytest.mark.parametrize("name", ["llama", "llama-biases", "gpt2", "deepseek_v3", "gemma3", "qwen3_next"])
def test_adapters_below_the_weights_give_the_same_logits(name: str, tmp_path: Path) -> None:
    model = build_model(CASES[name])
    folders = [write_adapter(tmp_path / f"{seed}", model, seed=seed, rank=2 + seed) for seed in (1, 2)]
    tokens, sizes = prompt(PROMPT_LENGTH, VOCAB_SIZE), AdapterSizes(2, 5)

    weights = without_native(load_weights(model, NamedTensors(model), dtype="float32"))
    run = adapted(model, tokens)
    expected = [run(weights, stacks_of(model, folders, 5), row) for row in range(3)]
    make_room(weights, model, sizes, share=0)
    left, stacks = join(weights, structure(model, sizes, None))
    stacks = empty(stacks)
    for slot, folder in enumerate(folders):
        stacks = put(stacks, jnp.int32(slot), host_adapter(model, open_adapter(folder), 5, np.float32))
    for row in range(3):
        assert relative_error(run(left, stacks, row), expected[row]) < 1e-4


def test_there_is_room_where_it_is_small_beside_a_plain_weight() -> None:
    weights = load_weights(LLAMA, NamedTensors(LLAMA), dtype="bfloat16")
    make_room(weights, LLAMA, AdapterSizes(1, 5, "bfloat16"), share=6)  # 16 rows below the 96 of a gate and an up
    parts = weights["layers"][0]["attention"] | weights["layers"][0]["feed_forward"]
    assert [name for name, one in parts.items() if isinstance(one, RoomyWeight)] == ["gate_up"]
    others = load_weights(LLAMA, NamedTensors(LLAMA), dtype="bfloat16")
    make_room(others, LLAMA, AdapterSizes(1, 5, "float32"), share=6)
    assert jax.tree.structure(others) == jax.tree.structure(load_weights(LLAMA, NamedTensors(LLAMA), dtype="bfloat16"))


@pytest.mark.parametrize("name", NAMES)
def test_every_matrix_of_a_layer_is_adapted_apart_from_those_of_experts_and_latents(name: str) -> None:
    model = build_model(CASES[name])
    matrices = [param for param in leaves(model.params()["layers"]) if param.is_matrix]
    declared = [param for param in matrices if param.axes[0] != "experts" and not param.is_widened]
    assert [param for layer in adapted_layers(model) for param in leaves(layer)] == declared


@pytest.mark.parametrize("devices", [2, 4])
def test_weights_for_several_devices_take_the_same_adapter(devices: int, tmp_path: Path) -> None:
    whole = build_model({**CASES["llama"], "num_key_value_heads": 1})
    split = whole.for_devices(devices)
    adapter = write_adapter(tmp_path, whole)
    tokens = prompt(PROMPT_LENGTH, VOCAB_SIZE)
    got = []
    for model in (whole, split):
        weights = load_weights(model, NamedTensors(whole), dtype="float32")
        got.append(adapted(model, tokens)(weights, stacks_of(model, [adapter], 3), 1))
    assert relative_error(*got) < 1e-5


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 4 / 3),
        ({"use_rslora": True}, 4 / 3**0.5),
        ({"alpha_pattern": {"layers.0.self_attn.q_proj": 9}}, 9 / 3),
        ({"alpha_pattern": {r"model\.layers\.\d+\.self_attn\.q_proj": 6}}, 6 / 3),
        ({"alpha_pattern": {"k_proj": 9}}, 4 / 3),
        ({"alpha_pattern": {r"^model\.layers\.(?:0|1[0-5]|\d{3})\.(self_attn|mlp)\.(q|k|v)_proj$": 9}}, 9 / 3),
        ({"alpha_pattern": {r".*layers.*self_attn.*proj": 9, "(layers.0)?.self_attn.q_proj": 5}}, 9 / 3),
        ({"r": 8, "rank_pattern": {"q_proj": 3}}, 4 / 3),
        ({"target_modules": "all-linear"}, 4 / 3),
        ({"target_modules": r".*\.q_proj"}, 4 / 3),
        ({"fan_in_fan_out": True, "lora_dropout": 0.1, "init_lora_weights": "gaussian"}, 4 / 3),
        ({"init_lora_weights": None}, 4 / 3),
    ],
)
def test_scales_follow_the_config(config: dict[str, Any], scale: float, tmp_path: Path) -> None:
    adapter = open_adapter(write_adapter(tmp_path, LLAMA, only="q_proj", **config))
    change = adapter.modules["model.layers.0.self_attn.q_proj"]
    assert change.scale == pytest.approx(scale)
    assert change.rank == adapter.rank == 3


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"use_dora": True}, "use_dora is True; it is not supported"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; adapters of LoRA are supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"r": 0}, "r is 0; it must be between 1 and 1024"),
        ({"r": 5}, "is [3, 32]; by the config it is [5, inputs]"),
        ({"lora_alpha": "much"}, "lora_alpha is 'much'; it must be a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan; it must be a number"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
        ({"alpha_pattern": {"q_proj": -(10**400)}}, "alpha_pattern is"),
        ({"rank_pattern": {"q_proj": 2**63}}, "ranks must be between 1 and 1024"),
        ({"r": -1}, "r is -1; it must be between 1 and 1024"),
        ({"alpha_pattern": {"(": 1}}, "'(' is not a regular expression"),
        ({"alpha_pattern": {"q{1,99999999999}": 1}}, "is not a regular expression"),
        ({"alpha_pattern": {"(" * 5000 + ")" * 5000: 1}}, "of at most 1000 characters each"),
        ({"alpha_pattern": {r"([a-z_.\d]+)+!": 1}}, "alpha_pattern is {'([a-z_.\\\\d]+)+!': 1}; to match it"),
        ({"rank_pattern": {"(e|e)?" * 40 + "(?:_|.)" * 40: 3}}, "could take too long"),
        ({"rank_pattern": {".*.*.*.*.*.*.*.*!": 3}}, "could take too long"),
        ({"rank_pattern": {r"(?x:(\w +) +!)": 3}}, "could take too long"),
        ({"rank_pattern": {"q_proj": 0.5}}, "ranks must be between 1 and 1024"),
        ({"target_modules": ["q_proj", "w9"]}, "target_modules has w9, but there is no tensor of them"),
        ({"target_modules": None}, "target_modules is None; it must be a list"),
    ],
)
def test_a_config_that_is_not_supported_is_refused_by_the_field(
    config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "style", LLAMA, only="q_proj", **config)
    with pytest.raises(InvalidAdapter) as refused:
        open_adapter(folder)
    assert said in str(refused.value)
    assert "style" in str(refused.value)


ONE = np.zeros((3, 32), np.float32)
PAIR = {"lora_A.weight": ONE, "lora_B.weight": np.zeros((32, 3), np.float32)}


def pair(module: str) -> dict[str, np.ndarray[Any, Any] | None]:
    return {f"base_model.model.{module}.{part}": tensor for part, tensor in PAIR.items()}


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({f"{MODULE}.lora_B.weight": None}, "q_proj.lora_B.weight is missing"),
        ({f"{MODULE}.lora_magnitude_vector": ONE}, "DoRA is not supported"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": ONE}, "adapters of embeddings are not supported"),
        ({f"{MODULE}.lora_B.bias": ONE}, "such tensors are not supported"),
        ({"model.layers.0.self_attn.q_proj.lora_A.weight": ONE}, "q_proj.lora_A.weight is there twice"),
        (pair("lm_head"), "lm_head is not adapted here"),
        (pair("model.layers.0.input_layernorm"), "input_layernorm is not adapted here"),
        (pair("model.layers.7.self_attn.q_proj"), "model.layers.7.self_attn.q_proj is unknown"),
        ({f"{MODULE}.lora_A.weight": np.zeros((3, 31), np.float32)}, "lora_A.weight is [3, 31]; the model has [3, 32]"),
        ({f"{MODULE}.lora_A.weight": np.zeros((3, 32), np.int8)}, "lora_A.weight is int8"),
        ({f"{MODULE}.lora_B.weight": np.full((32, 3), np.nan, np.float32)}, "numbers that are not finite"),
    ],
)
def test_a_broken_adapter_is_refused_with_its_name_and_the_tensor(
    tensors: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "style", LLAMA, only="q_proj", tensors=tensors)
    with pytest.raises(InvalidAdapter) as refused:
        host_adapter(LLAMA, open_adapter(folder), 3, np.float32)
    assert said in str(refused.value)
    assert "style" in str(refused.value)


def test_adapters_of_experts_are_refused_by_name(tmp_path: Path) -> None:
    model = build_model(CASES["qwen3_moe"])
    module = "model.layers.0.mlp.experts.0.up_proj"
    folder = write_adapter(tmp_path, model, only="q_proj", tensors=pair(module))
    with pytest.raises(InvalidAdapter, match=r"experts\.0\.up_proj is not adapted here: .* norms and experts"):
        check_adapter(model, open_adapter(folder))


def test_two_changes_of_one_weight_by_two_of_its_names_are_refused(tmp_path: Path) -> None:
    model = build_model(CASES["gpt2"])
    folder = write_adapter(tmp_path, model, only="h.0.attn.c_proj", tensors=pair("h.0.attn.c_proj"))
    with pytest.raises(InvalidAdapter, match=r"h\.0\.attn\.c_proj is the module that .* changes, by another name"):
        check_adapter(model, open_adapter(folder))


def test_an_adapter_of_another_model_is_refused_with_both_shapes(tmp_path: Path) -> None:
    other = build_model({**CASES["llama"], "hidden_size": 64})
    with pytest.raises(InvalidAdapter, match=r"lora_A.weight is \[3, 64\]; the model has \[3, 32\]"):
        check_adapter(LLAMA, open_adapter(write_adapter(tmp_path, other)))


def test_a_rank_above_the_limit_is_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, LLAMA, rank=6)
    with pytest.raises(InvalidAdapter, match="rank 6; max_lora_rank is 4"):
        host_adapter(LLAMA, open_adapter(folder), 4, np.float32)


@pytest.mark.parametrize(("missing", "said"), [("adapter_config.json", "no adapter_config.json")])
def test_a_folder_without_an_adapter_is_refused(missing: str, said: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, LLAMA)
    (folder / missing).unlink()
    with pytest.raises(InvalidAdapter, match=said):
        open_adapter(folder)


def test_pickled_adapters_are_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, LLAMA)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(InvalidAdapter, match=r"adapter_model\.bin is not read"):
        open_adapter(folder)


def test_modules_have_the_names_of_the_checkpoint() -> None:
    assert set(modules_of(build_model(replace_layers(CASES["gpt2"])))) == {
        f"transformer.h.0.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }


def replace_layers(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "n_layer": 1}


def test_files_that_become_shorter_while_they_are_read_are_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, LLAMA, only="q_proj")
    adapter = open_adapter(folder)
    os.truncate(folder / "adapter_model.safetensors", 2000)
    with pytest.raises(InvalidAdapter, match="was changed while it was read"):
        host_adapter(LLAMA, adapter, 3, np.float32)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(InvalidAdapter, match="cannot be read"):
        host_adapter(LLAMA, adapter, 3, np.float32)
