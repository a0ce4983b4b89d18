"""Checkpoints that say how keys and values are cached, with scales for them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.engine.building.deployment import Deployment
from quire.engine.building.model_weights import load_model
from quire.engine.building.plan import plan_deployment
from quire.errors import InvalidCheckpoint, InvalidSetting
from quire.files.model_files import locate
from quire.files.progress import silent
from quire.models.checkpoint import load_weights, stored_names
from quire.models.formats.quantized_source import open_checkpoint
from quire.models.registry import build_model
from quire.ops.native import library
from quire.settings.config import Config
from tests.models.cases import CASES
from tests.models.quantized_checkpoints import FORMATS, Format, write_checkpoint

library.load()  # where it was built before, not in a new folder
LLAMA = CASES["llama"]
SCHEME = {
    "num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True, "group_size": None,
    "observer": "minmax", "observer_kwargs": {}, "actorder": None, "block_structure": None,
}  # fmt: skip
SCALE = np.full(1, 0.02, np.float32)
BY_HEAD = np.ones((2, 1, 1), np.float32)
BOTH = {"self_attn.k_scale": SCALE, "self_attn.v_scale": SCALE}


def written(
    folder: Path, scheme: Any, tensors: dict[str, Any] = BOTH, name: str = "ct-int4", family: str = "llama"
) -> Path:
    """A checkpoint whose first layer has these tensors besides."""
    format_ = FORMATS[name]
    others = {f"model.layers.0.{suffix}": array for suffix, array in tensors.items()}
    format_ = Format({**format_.config, "kv_cache_scheme": scheme}, format_.make)
    return write_checkpoint(folder, CASES[family], format_, others=others).folder


def planned(folder: Path, **settings: Any) -> Deployment:
    sizes: dict[str, Any] = {"page_size": 4, "max_batch_size": 4, "max_total_tokens": 64, "num_pages": 65}
    return plan_deployment(Config(str(folder), cache_dir=str(folder), dtype="float32", **sizes, **settings))


@pytest.mark.parametrize(
    ("scheme", "tensors", "name", "page_dtype"),
    [
        (SCHEME, BOTH, "ct-int4", "float8_e4m3fn"),
        ({**SCHEME, "strategy": "attn_head"}, {"self_attn.k_scale": BY_HEAD}, "ct-int8", "float8_e4m3fn"),
        ({**SCHEME, "type": "int"}, {**BOTH, "self_attn.k_zero_point": np.zeros(1, np.int8)}, "ct-fp8-static", "int8"),
        ("static", {"self_attn.kv_scale": SCALE}, "fp8-static", "float8_e4m3fn"),
        ("static", {"self_attn.k_proj.k_scale": SCALE}, "fp8-static", "float8_e4m3fn"),
    ],
)  # fmt: skip
def test_auto_is_the_type_that_the_checkpoint_asks_for(
    scheme: Any, tensors: dict[str, Any], name: str, page_dtype: str, tmp_path: Path
) -> None:
    folder = written(tmp_path, scheme, tensors, name)
    deployment = planned(folder)
    assert str(deployment.layout.page_dtype) == page_dtype
    (choice,) = (one for one in deployment.choices if one.name == "kv_cache_dtype")
    assert "the checkpoint's kv_cache_scheme" in choice.reason
    source = open_checkpoint(locate(str(folder)))
    assert source is not None
    load_weights(build_model(LLAMA), source, dtype="float32")


@pytest.mark.parametrize(("asked", "page_dtype"), [("float32", "float32"), ("int8", "int8"), ("auto", "float8_e4m3fn")])
def test_a_setting_goes_before_the_checkpoint(asked: str, page_dtype: str, tmp_path: Path) -> None:
    assert str(planned(written(tmp_path, SCHEME), kv_cache_dtype=asked).layout.page_dtype) == page_dtype


def test_the_cache_may_be_all_that_is_quantised(tmp_path: Path) -> None:
    format_ = FORMATS["ct-int4"]
    config = {**format_.config, "config_groups": {}, "kv_cache_scheme": SCHEME}
    write_checkpoint(tmp_path, LLAMA, Format(config, format_.make), ignored=("proj",))
    deployment = planned(tmp_path)
    assert str(deployment.layout.page_dtype) == "float8_e4m3fn"
    assert deployment.facts.quantization == "compressed-tensors, the cache alone"


@pytest.mark.parametrize(
    ("scheme", "tensors", "problem"),
    [
        (None, BOTH, r"2 extra: model\.layers\.0\.self_attn\.[kv]_scale"),
        (SCHEME, {"self_attn.q_scale": SCALE}, r"1 extra: model\.layers\.0\.self_attn\.q_scale"),
        (SCHEME, {"self_attn.v_zero_point": np.ones(1, np.int8)}, r"v_zero_point is not 0"),
    ],
)
def test_scales_that_no_scheme_explains_are_refused_by_name(
    scheme: Any, tensors: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    written(tmp_path, scheme, tensors)
    with pytest.raises(InvalidCheckpoint, match=problem):
        stored_names(build_model(LLAMA), open_checkpoint(locate(str(tmp_path))))  # type: ignore[arg-type]


def test_latent_attention_names_the_setting_that_helps(tmp_path: Path) -> None:
    written(tmp_path, SCHEME, BOTH, "ct-int8-packed", "deepseek_v3")
    with pytest.raises(
        InvalidSetting,
        match=r"kv_cache_dtype is fp8_e4m3 \(the checkpoint's kv_cache_scheme; .*; it does not go with the latent "
        "attention layers of .* Remedy: --kv-cache-dtype float32",
    ):
        planned(tmp_path)
    with pytest.raises(InvalidSetting, match="kv_cache_dtype is int8; it does not go with the latent attention"):
        planned(tmp_path, kv_cache_dtype="int8")
    deployment = planned(tmp_path, kv_cache_dtype="float32")
    assert str(deployment.layout.page_dtype) == "float32"
    load_model(deployment, silent)
