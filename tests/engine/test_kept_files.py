"""Programs and weights on disk: found again where everything that they follow from is the same, and nowhere else."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire.cache_folder import cache_folder
from quire.config import Config
from quire.engine.build import plan_deployment
from quire.engine.compiling import program_store
from quire.engine.deployment import Deployment
from quire.engine.model_weights import load_model
from quire.files.progress import silent
from quire.models.registry import build_model
from quire.ops.native import int8_product
from tests.models.cases import CASES
from tests.models.quantized_checkpoints import FORMATS, write_checkpoint
from tests.models.quantized_matrices import gptq
from tests.models.tiny import NamedTensors


def planned(folder: Path, cache: Path, **settings: Any) -> Deployment:
    cache.mkdir(exist_ok=True)
    if not (cache / "native").exists():
        (cache / "native").symlink_to(cache_folder() / "native")
    sizes: dict[str, Any] = {"page_size": 4, "num_pages": 64, "max_batch_size": 2, "max_total_tokens": 64}
    return plan_deployment(Config(str(folder), cache_dir=cache, dtype="float32", **sizes, **settings))


@pytest.mark.skipif(not int8_product.is_fast(), reason="weights are packed for the native kernel alone")
def test_packed_weights_follow_the_config_that_says_how_they_are_joined(tmp_path: Path) -> None:
    model, config = tmp_path / "model", {**CASES["glm4"], "head_dim": 8}
    model.mkdir()
    tensors = NamedTensors(build_model(config))
    save_file({name: tensors.read(name) for name in tensors.tensors()}, model / "model.safetensors")

    def loaded(share: float, cache: Path) -> list[Any]:
        (model / "config.json").write_text(json.dumps({**config, "partial_rotary_factor": share}))
        weights = load_model(planned(model, cache, quantize="int8"), silent)
        return [np.asarray(leaf) for leaf in jax.tree.leaves(weights)]

    half, whole, fresh = loaded(0.5, tmp_path / "kept"), loaded(1.0, tmp_path / "kept"), loaded(1.0, tmp_path / "fresh")
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(whole, fresh, strict=True))
    assert not all(np.array_equal(ours, theirs) for ours, theirs in zip(half, whole, strict=True))


def with_other_scales(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    scales = {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors.items() if name.endswith(".scales")}
    assert scales
    save_file(tensors | scales, model / "model.safetensors")


CHANGES: dict[str, tuple[dict[str, Any], Callable[[Path], None]]] = {
    "the type of scales": ({}, with_other_scales),
    "an order of inputs": ({"make": gptq(4, act_order=True)}, lambda model: None),
    "matrices that are left as they were": ({"ignored": ("o_proj",)}, lambda model: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_programs_are_those_of_the_files_and_not_of_their_config_alone(tmp_path: Path, change: str) -> None:
    how, edit = CHANGES[change]

    def digest(name: str, **how: Any) -> str:
        write_checkpoint(tmp_path / name, CASES["llama"], FORMATS["gptq-4"], **how)
        if name == "other":
            edit(tmp_path / name)
        return program_store(planned(tmp_path / name, tmp_path / "kept")).digest

    assert digest("one") == digest("same")
    assert digest("one") != digest("other", **how)
