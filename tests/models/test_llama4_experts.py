"""Experts of llama4 that are stored one by one, as tools that quantise do: the same numbers as in one tensor."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from quire.errors import InvalidCheckpoint
from quire.executor.memory import weight_sizes
from quire.files.model_files import locate
from quire.models.checkpoint import leaves, load_weights
from quire.models.formats.quantized_source import QuantizedSource, open_checkpoint
from quire.models.registry import build_model
from quire.ops.weights.coded import Coded
from tests.models.cases import CASES
from tests.models.quantized_checkpoints import FORMATS
from tests.models.test_channel_weights import is_coded, without_rounding
from tests.models.tiny import named_tensor, prompt, relative_error, whole_logits

Array = np.ndarray[Any, Any]
CONFIG = {**CASES["llama4"], "num_hidden_layers": 2, "head_dim": 8, "hidden_size": 32, "intermediate_size": 32}
TOKENS = prompt(12, CONFIG["vocab_size"])
PREFIX = "language_model."


def fused() -> dict[str, Array]:
    """Every tensor of the model as transformers stores it."""
    params = leaves(build_model(CONFIG).params())
    return {tensor.name: named_tensor(tensor.name, tensor.shape) for param in params for tensor in param.sources}


def one_by_one(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The same numbers with a matrix for each projection of each expert."""
    found: dict[str, Array] = {}
    for name, array in tensors.items():
        stem, _, part = name.rpartition(".")
        if not stem.endswith(".experts"):
            found[name] = array
            continue
        for expert, matrix in enumerate(array):
            rows = np.split(matrix.T, 2) if part == "gate_up_proj" else [matrix.T]
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
            found |= {f"{stem}.{expert}.{one}.weight": row for one, row in zip(names, rows, strict=True)}
    return found


def write(folder: Path, tensors: Mapping[str, Array], quantization: Mapping[str, Any] | None = None) -> Path:
    folder.mkdir()
    config = CONFIG if quantization is None else {**CONFIG, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    return folder


def logits(folder: Path, quantize: Any = "none") -> Array:
    files = locate(str(folder))
    model, source = build_model(files.config), open_checkpoint(files)
    assert source is not None
    return whole_logits(model, load_weights(model, source, dtype="float32", quantize=quantize), TOKENS)


@pytest.mark.parametrize("prefix", ["", PREFIX])
def test_experts_one_by_one_are_those_of_one_tensor(prefix: str, tmp_path: Path) -> None:
    tensors = fused()
    apart = {prefix + name: array for name, array in one_by_one(tensors).items()}
    np.testing.assert_array_equal(logits(write(tmp_path / "apart", apart)), logits(write(tmp_path / "fused", tensors)))


@pytest.mark.parametrize("name", ["ct-fp8-dynamic", "ct-int4", "ct-int8", "fp8-blocks", "gptq-4"])
def test_quantised_experts_have_the_numbers_of_their_codes(name: str, tmp_path: Path) -> None:
    apart, format_ = one_by_one(fused()), FORMATS[name]
    stored, wide = {}, {}
    for tensor, array in apart.items():
        module = tensor.removesuffix(".weight")
        if ".experts." not in tensor:
            stored[tensor] = wide[tensor] = array
            continue
        made = format_.make(module, array)
        stored |= {f"{module}.{suffix}": part for suffix, part in made.tensors.items()}
        wide[tensor] = made.wide
    folder = write(tmp_path / "coded", stored, format_.config)
    files = locate(str(folder))
    model, source = build_model(files.config), open_checkpoint(files)
    assert isinstance(source, QuantizedSource)
    weights = load_weights(model, source, dtype="float32")
    experts = weights["layers"][1]["feed_forward"]["experts"]
    assert isinstance(experts["gate_up"], Coded)
    assert isinstance(experts["down"], Coded)
    held = sum(array.nbytes for part in ("gate_up", "down") for array in (experts[part].codes, experts[part].scales))
    assert held <= weight_sizes(model, source, "float32", "none", None).expert_bytes
    exact = jax.tree.map(without_rounding, weights, is_leaf=is_coded)
    expected = logits(write(tmp_path / "wide", wide))
    assert relative_error(whole_logits(model, exact, TOKENS), expected) < 1e-5
    # Rounded activations send one position or another to another expert.
    for rounded in (whole_logits(model, weights, TOKENS), logits(folder, quantize="int8")):
        assert np.median(np.abs(rounded - expected).max(-1) / np.abs(expected).max(-1)) < 0.1


def test_experts_one_by_one_are_cut_for_several_devices_as_one_tensor_is(tmp_path: Path) -> None:
    whole = build_model(CONFIG)
    model = whole.for_devices(2)
    source = locate(str(write(tmp_path / "apart", one_by_one(fused())))).open_weights()
    assert source is not None
    weights = load_weights(model, source, dtype="float32")
    assert weights["layers"][1]["feed_forward"]["experts"]["gate_up"].shape[1] == 2
    expected = logits(write(tmp_path / "fused", fused()))
    assert relative_error(whole_logits(model, weights, TOKENS), expected) < 1e-5


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    apart = one_by_one(fused())
    del apart["model.layers.1.feed_forward.experts.3.up_proj.weight"]
    with pytest.raises(
        InvalidCheckpoint, match=r"1 missing: model\.layers\.1\.feed_forward\.experts\.3\.up_proj\.weight"
    ):
        logits(write(tmp_path / "apart", apart))


def test_experts_in_both_forms_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidCheckpoint, match=r"15 extra: model\.layers\.1\.feed_forward\.experts\.0\.down_proj\.weight"
    ):
        logits(write(tmp_path / "both", {**one_by_one(fused()), **fused()}))


def test_quantised_experts_in_one_tensor_are_refused_by_name_and_with_what_is_read(tmp_path: Path) -> None:
    tensors = fused()
    name = "model.layers.1.feed_forward.experts.gate_up_proj"
    tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    tensors[f"{name}_scale"] = np.ones((len(tensors[name]), 1, 64), np.float32)
    with pytest.raises(InvalidCheckpoint) as refusal:
        logits(write(tmp_path / "fused", tensors, FORMATS["ct-fp8-dynamic"].config))
    assert f"{name} is float8_e4m3fn; experts that are stored in one tensor are read in" in str(refusal.value)
    assert "as model.layers.1.feed_forward.experts.0.gate_proj.weight" in str(refusal.value)
