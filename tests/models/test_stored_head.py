"""Heads in checkpoints whose configs tie them to the embedding."""

import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire.engine.building.plan import plan_deployment
from quire.files.model_files import locate
from quire.models.checkpoint import load_weights
from quire.models.formats.quantized_source import open_checkpoint
from quire.models.registry import build_model
from quire.models.stored_head import with_stored_head
from quire.settings.config import Config
from tests.models.cases import CASES
from tests.models.tiny import NamedTensors

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NESTED = {"model_type": "gemma3", "text_config": CASES["gemma3"]}


def write(folder: Path, config: dict[str, Any], head: str, prefix: str = "") -> None:
    source = NamedTensors(build_model(config))
    tensors = {f"{prefix}{name}": np.ascontiguousarray(source.read(name)) for name in source.tensors()}
    embedding = tensors[f"{prefix}{EMBEDDING}"]
    heads = {"copy": embedding.copy(), "last row": embedding.copy(), "rounded": embedding.astype(np.float16)}
    heads["last row"][-1, -1] += 1
    heads["shape"] = embedding[:-1].copy()
    if head == "two dtypes":
        tensors[f"{prefix}{EMBEDDING}"] = embedding.astype(ml_dtypes.bfloat16)
        heads["two dtypes"] = embedding.astype(ml_dtypes.bfloat16).astype(np.float16)
    if head != "none":
        tensors[f"{prefix}{HEAD}"] = heads[head]
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


def without_embedding(folder: Path, prefix: str = "") -> None:
    """The checkpoint with a head alone."""
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{prefix}{EMBEDDING}"]
    save_file(tensors, folder / "model.safetensors")


def is_tied(folder: Path) -> bool:
    files = locate(str(folder))
    return build_model(with_stored_head(files, open_checkpoint(files)).config).head is None


@pytest.mark.parametrize(
    ("head", "tied"),
    [
        ("none", True),
        ("copy", True),
        ("two dtypes", True),
        ("last row", False),
        ("rounded", False),
        ("shape", False),
    ],
)
def test_a_head_that_is_not_the_embedding_is_used(tmp_path: Path, head: str, tied: bool) -> None:
    write(tmp_path, CASES["llama-biases"], head)
    assert is_tied(tmp_path) == tied


@pytest.mark.parametrize(("head", "tied"), [("copy", True), ("last row", False)])
def test_a_head_within_a_model_with_more_than_text_is_found(tmp_path: Path, head: str, tied: bool) -> None:
    write(tmp_path, NESTED, head, prefix="language_model.")
    assert is_tied(tmp_path) == tied


@pytest.mark.parametrize(("config", "prefix"), [(CASES["llama-biases"], ""), (NESTED, "language_model.")])
def test_a_tied_embedding_may_be_stored_as_the_head_alone(tmp_path: Path, config: dict[str, Any], prefix: str) -> None:
    write(tmp_path, config, "copy", prefix)
    files = locate(str(tmp_path))
    model = build_model(files.config)
    whole = load_weights(model, open_checkpoint(files), dtype="float32")
    without_embedding(tmp_path, prefix)
    alone = load_weights(model, open_checkpoint(files), dtype="float32")
    assert is_tied(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, alone, whole)


def test_a_deployment_has_the_stored_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, CASES["llama-biases"], "last row")
    sizes = {"page_size": 4, "num_pages": 64, "max_batch_size": 2, "max_total_tokens": 64}
    deployment = plan_deployment(Config(str(tmp_path), dtype="float32", cache_dir=str(tmp_path), **sizes))  # type: ignore[arg-type]
    assert deployment.model.head is not None
    assert build_model(deployment.files.config).head is not None
    assert f"{HEAD} is used; it differs from {EMBEDDING}" in caplog.text
