"""Quantised checkpoints give the logits that their definition gives, computed in numpy from the same codes."""

from pathlib import Path

import jax
import numpy as np
import pytest

from quire.files.model_files import locate
from quire.models.checkpoint import load_weights
from quire.models.formats.quantized_source import open_checkpoint
from quire.models.params import ParamTree
from quire.models.registry import build_model
from quire.ops.coded import Coded
from tests.models.cases import CASES
from tests.models.numpy_llama import numpy_logits
from tests.models.quantized_checkpoints import FORMATS, Checkpoint, write_checkpoint
from tests.models.tiny import prompt, relative_error, whole_logits

LLAMA = CASES["llama"]
TOKENS = prompt(12, LLAMA["vocab_size"])


def loaded(folder: Path, **how: object) -> tuple[object, ParamTree]:
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


@pytest.mark.parametrize("name", ["fp8-blocks", "fp8-static", "ct-fp8-dynamic", "ct-int8", "ct-int8-static"])
def test_rounded_activations_show_in_the_logits(name: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, LLAMA, FORMATS[name])
    rounded, exact = (
        numpy_logits(checkpoint.config, checkpoint.wide, rounds, TOKENS) for rounds in (checkpoint.rounds, {})
    )
    assert relative_error(rounded, exact) > 1e-3
