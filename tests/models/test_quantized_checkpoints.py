"""Quantised checkpoints give the logits that their definition gives, computed in numpy from the same codes."""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors import safe_open

from quire.executor.memory import weight_bytes, weight_sizes
from quire.files.model_files import locate
from quire.models.checkpoint import load_weights, weights_like
from quire.models.formats.quantized_source import QuantizedSource, open_checkpoint
from quire.models.params import ParamTree
from quire.models.parts.decoder import Decoder
from quire.models.registry import build_model
from quire.ops.weights.coded import Coded
from quire.ops.weights.parts import Parts
from tests.models.cases import CASES
from tests.models.numpy_llama import numpy_logits
from tests.models.quantized_checkpoints import FORMATS, Checkpoint, Format, write_checkpoint, write_plain
from tests.models.quantized_matrices import GROUP, Array, Matrix, by_stored, by_token, in_words, quantized, runs
from tests.models.test_quantized import on_first_device, spread
from tests.models.tiny import prompt, relative_error, whole_logits

LLAMA = CASES["llama"]
MIXTRAL = {**CASES["mixtral"], "head_dim": 8}
TOKENS = prompt(12, LLAMA["vocab_size"])


def loaded(folder: Path, **how: object) -> tuple[Decoder, ParamTree]:
    files = locate(str(folder))
    model, source = build_model(files.config), open_checkpoint(files)
    assert source is not None
    return model, load_weights(model, source, **{"dtype": "float32", **how})


def coded(weights: ParamTree) -> list[Coded]:
    leaves = jax.tree.leaves(weights, is_leaf=lambda node: isinstance(node, Coded))
    return [leaf for leaf in leaves if isinstance(leaf, Coded)]


def assert_logits(checkpoint: Checkpoint) -> ParamTree:
    model, weights = loaded(checkpoint.folder)
    got = whole_logits(model, weights, TOKENS)
    expected = numpy_logits(checkpoint.config, checkpoint.wide, checkpoint.rounds, TOKENS)
    errors = np.abs(got - expected).max(axis=1) / np.abs(expected).max()
    # An activation halfway between two codes may get either: that token, and those that attend to it, differ slightly.
    assert (errors < 1e-5).sum() >= len(TOKENS) // 2, errors
    assert errors.max() < 0.02, errors
    return weights


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_definition(name: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, LLAMA, FORMATS[name])
    weights = assert_logits(checkpoint)
    assert len(coded(weights)) == 4 * LLAMA["num_hidden_layers"]  # qkv, out, gate and up, down


@pytest.mark.parametrize(
    "name", ["fp8-blocks", "fp8-static", "ct-fp8-dynamic", "ct-int8", "ct-int8-static", "fbgemm-fp8"]
)
def test_rounded_activations_show_in_the_logits(name: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, LLAMA, FORMATS[name])
    rounded, exact = (
        numpy_logits(checkpoint.config, checkpoint.wide, rounds, TOKENS) for rounds in (checkpoint.rounds, {})
    )
    assert relative_error(rounded, exact) > 1e-3


def test_the_bound_of_activations_shows_in_the_logits(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, LLAMA, FORMATS["fbgemm-fp8"])
    bounded, usual = (
        numpy_logits(checkpoint.config, checkpoint.wide, rounds, TOKENS)
        for rounds in (checkpoint.rounds, dict.fromkeys(checkpoint.rounds, by_token(True)))
    )
    assert relative_error(bounded, usual) > 0.05


@pytest.mark.parametrize(
    ("name", "format_name"),
    [
        ("qwen2", "ct-int8-packed"),
        ("phi3", "gptq-4-act-order"),
        ("gemma3", "ct-int8-packed"),
        ("mixtral", "gptq-4-act-order"),
        ("qwen3_moe", "ct-int8-packed"),
        ("llama-biases", "gptq-4-act-order"),
        ("deepseek_v3", "ct-int8-packed"),
    ],
)
def test_every_kind_of_block_can_be_quantised(name: str, format_name: str, tmp_path: Path) -> None:
    config = {**CASES[name], "head_dim": 8, "moe_intermediate_size": 32}
    checkpoint = write_checkpoint(tmp_path / "coded", config, FORMATS[format_name])
    write_plain(tmp_path / "plain", config, checkpoint.wide)
    got, expected = (whole_logits(*loaded(folder), TOKENS) for folder in (checkpoint.folder, tmp_path / "plain"))
    assert relative_error(got, expected) < 1e-5


@pytest.mark.parametrize(
    ("name", "ignored"),
    [("gptq-4", "q_proj"), ("ct-int8-static", "q_proj"), ("ct-fp8-dynamic", "layers.1."), ("gptq-4", "down_proj")],
)
def test_modules_that_are_not_quantised_stay_as_they_are(name: str, ignored: str, tmp_path: Path) -> None:
    format_ = FORMATS[name]
    if name.startswith("ct"):
        format_ = Format({**format_.config, "ignore": ["lm_head", f"re:.*{ignored}.*"]}, format_.make)
    weights = assert_logits(write_checkpoint(tmp_path, LLAMA, format_, ignored=(ignored,)))
    kinds = jax.tree.leaves(weights, is_leaf=lambda node: isinstance(node, Parts | Coded))
    assert sum(isinstance(kind, Parts) for kind in kinds) == (2 if ignored == "q_proj" else 0)
    assert len(coded(weights)) == {"q_proj": 2 * (2 + 3), "layers.1.": 4, "down_proj": 6}[ignored]


def test_parts_of_a_fused_projection_may_be_quantised_differently(tmp_path: Path) -> None:
    """Each has its own order of inputs, and its own scale of activations."""

    def by_name(module: str, weight: Array) -> Matrix:
        index = np.random.default_rng(zlib.crc32(module.encode())).permutation(runs(weight.shape[1], GROUP))
        made = FORMATS["gptq-4-act-order"].make(module, weight)
        codes, scales, _, wide = quantized(weight, 4, index, True)
        tensors = {"qweight": in_words(codes, 4).T, "scales": scales.T, "g_idx": index.astype(np.int32)}
        return Matrix({**made.tensors, **tensors}, wide)

    weights = assert_logits(write_checkpoint(tmp_path / "a", LLAMA, FORMATS["gptq-4-act-order"], make=by_name))
    assert isinstance(weights["layers"][0]["attention"]["qkv"], Parts)

    def by_scale(module: str, weight: Array) -> Matrix:
        made = FORMATS["fp8-static"].make(module, weight)
        scale = 0.02 + 0.001 * (zlib.crc32(module.encode()) % 7)
        return Matrix({**made.tensors, "input_scale": np.full(1, scale, np.float32)}, made.wide, by_stored(scale, True))

    weights = assert_logits(write_checkpoint(tmp_path / "b", LLAMA, FORMATS["fp8-static"], make=by_scale))
    assert isinstance(weights["layers"][0]["attention"]["qkv"], Parts)


@pytest.mark.parametrize("in_order", [(1,), (0, 2, 3)], ids=str)
def test_experts_whose_inputs_are_in_order_may_be_beside_others(in_order: tuple[int, ...], tmp_path: Path) -> None:
    """Act-order sorts nothing where calibration never reached an expert."""

    def make(module: str, weight: Array) -> Matrix:
        is_in_order = any(f".experts.{expert}." in module for expert in in_order)
        return FORMATS["gptq-4" if is_in_order else "gptq-4-act-order"].make(module, weight)

    checkpoint = write_checkpoint(tmp_path / "coded", MIXTRAL, FORMATS["gptq-4-act-order"], make=make)
    write_plain(tmp_path / "plain", MIXTRAL, checkpoint.wide)
    got, expected = (whole_logits(*loaded(folder), TOKENS) for folder in (checkpoint.folder, tmp_path / "plain"))
    assert relative_error(got, expected) < 1e-5
    model, weights = loaded(checkpoint.folder)
    like = weights_like(model, open_checkpoint(locate(str(checkpoint.folder))), dtype="float32")
    shapes, expected_shapes = ([leaf.shape for leaf in jax.tree.leaves(coded(one))] for one in (weights, like))
    assert shapes == expected_shapes


def test_a_head_can_be_quantised_too(tmp_path: Path) -> None:
    weights = assert_logits(write_checkpoint(tmp_path, LLAMA, FORMATS["gptq-8"], head=True))
    assert isinstance(weights["head"], Coded)


def test_each_group_of_a_config_has_its_own_modules(tmp_path: Path) -> None:
    int4, int8 = FORMATS["ct-int4"], FORMATS["ct-int8"]
    groups = {
        "group_0": {**int4.config["config_groups"]["group_0"], "format": "pack-quantized"},
        "group_1": {
            **int8.config["config_groups"]["group_0"],
            "targets": ["re:.*mlp.*", "model.layers.0.self_attn.o_proj"],
            "format": "int-quantized",
        },
    }

    def make(module: str, weight: Array) -> Matrix:
        is_int8 = "mlp" in module or module == "model.layers.0.self_attn.o_proj"
        return (int8 if is_int8 else int4).make(module, weight)

    config = {**int4.config, "config_groups": groups, "format": "mixed-precision"}
    weights = assert_logits(write_checkpoint(tmp_path, LLAMA, Format(config, make)))
    assert [one.bits for one in coded(weights["layers"][0])] == [8, 4, 8, 8]  # out, qkv, down, gate and up


def test_the_name_of_a_module_goes_before_a_pattern_and_that_before_a_class(tmp_path: Path) -> None:
    int4, int8 = FORMATS["ct-int4"], FORMATS["ct-int8"]
    by_class, by_name = int4.config["config_groups"]["group_0"], int8.config["config_groups"]["group_0"]
    groups = {
        "group_0": {**by_class, "format": "pack-quantized"},
        "group_1": {**by_name, "targets": ["re:.*_proj$"], "format": "int-quantized"},
        "group_2": {**by_class, "targets": ["model.layers.0.mlp.down_proj"], "format": "pack-quantized"},
    }

    def make(module: str, weight: Array) -> Matrix:
        return (int4 if module == "model.layers.0.mlp.down_proj" else int8).make(module, weight)

    config = {**int4.config, "config_groups": groups, "format": "mixed-precision"}
    weights = assert_logits(write_checkpoint(tmp_path, LLAMA, Format(config, make)))
    assert [one.bits for one in coded(weights["layers"][0])] == [8, 8, 4, 8]  # out, qkv, down, gate and up


def test_bfloat16_is_as_near_to_the_definition_as_with_plain_weights(tmp_path: Path) -> None:
    """Where activations are rounded it is not: then the last bits of bfloat16 decide about codes."""
    checkpoint = write_checkpoint(tmp_path / "coded", LLAMA, FORMATS["gptq-4-act-order"])
    write_plain(tmp_path / "plain", LLAMA, checkpoint.wide)
    expected = numpy_logits(checkpoint.config, checkpoint.wide, {}, TOKENS)
    ours, plain = (
        spread(whole_logits(*loaded(tmp_path / name, dtype="bfloat16"), TOKENS), expected)
        for name in ("coded", "plain")
    )
    assert 0 < ours < 1.5 * plain


def test_int8_rounds_what_a_checkpoint_has_quantised_already(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, LLAMA, FORMATS["gptq-4"])
    model, weights = loaded(checkpoint.folder, quantize="int8")
    assert not coded(weights)
    expected = numpy_logits(checkpoint.config, checkpoint.wide, {}, TOKENS)
    assert 0 < relative_error(whole_logits(model, weights, TOKENS), expected) < 0.2


@pytest.mark.parametrize("name", ["gptq-4-act-order", "awq", "fp8-blocks", "ct-int8-static"])
@pytest.mark.parametrize("case", ["llama", "mixtral"])
def test_sizes_are_known_before_weights_are_read(name: str, case: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CASES[case], FORMATS[name])
    files = locate(str(tmp_path))
    model, source = build_model(files.config), open_checkpoint(files)
    assert isinstance(source, QuantizedSource)
    like = weights_like(model, source, dtype="float32")
    weights = load_weights(model, source, dtype="float32", placement=on_first_device)
    same = jax.tree.map(lambda one, array: (one.shape, one.dtype) == (array.shape, array.dtype), like, weights)
    assert jax.tree.all(same)
    sizes = weight_sizes(model, source, "float32", "none", None)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    assert held == sizes.num_bytes < weight_bytes(model, "float32", "none", None)
    assert sizes.widened_bytes > 0


def test_progress_counts_the_bytes_of_the_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LLAMA, Format(FORMATS["awq"].config, FORMATS["awq"].make))
    reports: list[tuple[int, int]] = []

    @contextmanager
    def progress(label: str) -> Iterator[Callable[[int, int], None]]:
        yield lambda done, total: reports.append((done, total))

    loaded(tmp_path, progress=progress)
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        total = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    assert reports[-1] == (total, total)
