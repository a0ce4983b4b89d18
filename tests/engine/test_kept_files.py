"""Programs and weights on disk: found again where everything that they follow from is the same, and nowhere else."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire.engine.building.compiling import program_store
from quire.engine.building.deployment import Deployment
from quire.engine.building.model_weights import load_model
from quire.engine.building.plan import plan_deployment
from quire.files.cache_folder import cache_folder
from quire.files.progress import silent
from quire.models.registry import build_model
from quire.ops.native import int8_product
from quire.settings.config import Config
from tests.models.cases import CASES
from tests.models.quantized_checkpoints import FORMATS, Format, write_checkpoint
from tests.models.quantized_matrices import Matrix, float8_blocks, gptq
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


LLAMA = CASES["llama"]


def by_blocks(size: int, module: str, weight: Any) -> Matrix:
    return float8_blocks(weight, (size, size), "weight_scale", lambda x: x)


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


def test_programs_follow_what_a_file_beside_the_config_says(tmp_path: Path) -> None:
    format_ = FORMATS["modelopt-fp8-blocks"]
    blocks = {"group_size": 16}, {"group_size": 16, "kv_cache_quant_algo": "FP8"}, {"group_size": 32}
    digests = []
    for name, fields in enumerate((blocks[0], *blocks)):
        folder = tmp_path / str(name)
        size = fields["group_size"]
        assert isinstance(size, int)
        write_checkpoint(folder, LLAMA, format_, make=partial(by_blocks, size))
        config = json.loads((folder / "config.json").read_text())
        del config["quantization_config"]
        (folder / "config.json").write_text(json.dumps(config))
        quantization = {"quant_algo": "FP8_PB_WO", **fields}
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
        digests.append(program_store(planned(folder, tmp_path / "kept")).digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_programs_follow_the_bound_of_activations(tmp_path: Path) -> None:
    digests = []
    for reach in (1.5, 1.5, 2.5):
        format_ = FORMATS["fbgemm-fp8"]
        folder = tmp_path / str(len(digests))
        write_checkpoint(folder, LLAMA, Format({**format_.config, "activation_scale_ub": reach}, format_.make))
        digests.append(program_store(planned(folder, tmp_path / "kept")).digest)
    assert digests[0] == digests[1] != digests[2]
