"""Model files with nonsense in them: a model either loads or is refused by a typed error, and memory stays small."""

import json
import math
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from quire.engine.building.plan import plan_deployment
from quire.errors import InvalidCheckpoint, QuireError
from quire.executor.memory import weight_bytes
from quire.files.gguf_source import GGUFSource
from quire.files.model_files import locate
from quire.models.checkpoint import load_weights
from quire.models.field_ranges import RANGES
from quire.models.parts.rope import Rope
from quire.models.registry import build_model
from quire.settings.config import Config
from tests.files.gguf_writing import LLAMA_METADATA, embedding, write_gguf
from tests.models.cases import CASES
from tests.models.tiny import NamedTensors
from tests.tiny_chat_model import CONFIG, SIZES

NASTY: list[Any] = [
    None, True, False, 0, -0.0, 1, -1, 2, 3, 7, 2.5, 1e-30, 1e30, -1e30, 10**6, 2**31, 2**33, 2**63, 10**400,
    math.nan, math.inf, -math.inf, "", "float32", "\ud800", "x" * 10_000, [], [None], [[]], ["float32"],
    [math.nan] * 4, [0.0] * 4, [1] * 100_000, {}, {"a": 1}, {"rope_type": "yarn", "factor": 0}, {"type": "linear"},
]  # fmt: skip
ROPES = [
    {"rope_type": kind, name: value, "factor": factor}
    for kind in ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
    for name in ("rope_theta", "low_freq_factor", "high_freq_factor", "beta_fast", "attention_factor", "short_factor")
    for value in (0, -1, 1, math.nan, math.inf, [0.0] * 4, 4.0)
    for factor in (0, 1e-300, math.nan, 4.0, 1e300)
]
MOST_BYTES = 256 << 20
MOST_CHARACTERS = 10_000
OTHER_FIELDS = [
    *RANGES,
    "max_position_embeddings",
    "dtype",
    "torch_dtype",
    "rope_parameters",
    "text_config",
    "layer_types",
]


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


@contextmanager
def loads_or_is_refused() -> Iterator[None]:
    message = ""
    with little_memory():
        try:
            yield
        except QuireError as error:
            message = error.message
    assert len(message) < MOST_CHARACTERS


@st.composite
def mutated(draw: st.DrawFn, config: dict[str, Any]) -> dict[str, Any]:
    """The config with one or two fields changed, at the top or within another."""
    config = deepcopy(config)
    for _ in range(draw(st.integers(1, 2))):
        inner = [value for value in config.values() if isinstance(value, dict)]
        place = draw(st.sampled_from([config, *inner]))
        field = draw(st.sampled_from(sorted({*place, *OTHER_FIELDS})))
        place[field] = deepcopy(draw(st.sampled_from([*NASTY, *ROPES] if "rope" in field else NASTY)))
    return config


@given(st.data())
def test_any_mutated_config_gives_a_model_or_a_typed_error(data: st.DataObject) -> None:
    case = data.draw(st.sampled_from(sorted(CASES)))
    with loads_or_is_refused():
        model = build_model(data.draw(mutated(CASES[case])))
        assert weight_bytes(model, "float32", "none", None) > 0
        assert 1 <= model.max_positions < 2**31
        for rope in {id(block.attention.rope): block.attention.rope for block in model.blocks}.values():
            if isinstance(rope, Rope):
                assert np.isfinite(rope.inverse_frequencies).all()
                assert math.isfinite(rope.feature_scale)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("num_hidden_layers", 10**6, "from 1 to 1000"),
        ("hidden_size", 2**33, "from 1 to 1048576"),
        ("vocab_size", 2**40, "from 1 to 16777216"),
        ("num_attention_heads", -2, "from 1 to 65536"),
        ("num_key_value_heads", 0, "from 1 to 65536"),
        ("intermediate_size", 48.0, "a whole number"),
        ("max_position_embeddings", 2**31, "from 1 to 2147483647"),
        ("rope_theta", math.nan, "from 2 to 1e[+]15"),
        ("rope_theta", 0, "from 2 to 1e[+]15"),
        pytest.param("rope_theta", 10**400, "from 2 to 1e[+]15", id="rope_theta of 400 digits"),
        ("rms_norm_eps", math.inf, "from 0 to 1"),
    ],
)
def test_a_number_out_of_range_is_refused_with_the_range(field: str, value: Any, allowed: str) -> None:
    config = {**CASES["llama"], "rope_parameters": None, field: value}
    with little_memory(), pytest.raises(InvalidCheckpoint, match=rf"config: {field} = .*: .*{allowed}"):
        build_model(config)


@pytest.mark.parametrize("value", [0, math.nan, -4.0, 1e300])
@pytest.mark.parametrize("case", ["llama-linear", "llama-dynamic", "llama-llama3", "llama-yarn"])
def test_a_rope_factor_out_of_range_is_refused(case: str, value: float) -> None:
    config = deepcopy(CASES[case])
    config["rope_scaling"]["factor"] = value
    with pytest.raises(InvalidCheckpoint, match=r"rope_scaling.factor = .*: a number from 0.001 to 1e[+]06 is needed"):
        build_model(config)


def test_experts_are_counted_over_all_layers() -> None:
    config = {**CASES["qwen3_moe"], "num_hidden_layers": 1000, "num_experts": 1000, "mlp_only_layers": []}
    with little_memory(), pytest.raises(InvalidCheckpoint, match="num_experts = 1000: 1000 layers may have 65536"):
        build_model(config)


def test_a_message_shows_the_beginning_of_a_long_value() -> None:
    with pytest.raises(InvalidCheckpoint) as refusal:
        build_model({**CASES["llama"], "hidden_size": ["x" * 1000] * 1000})
    assert len(refusal.value.message) < 2000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its weights."""
    folder = tmp_path_factory.mktemp("tiny")
    source = NamedTensors(build_model(CONFIG))
    save_file({name: source.read(name) for name in source.tensors()}, folder / "model.safetensors")
    return folder


@given(config=mutated(CONFIG))
@settings(max_examples=100)
def test_a_checkpoint_with_a_mutated_config_loads_or_is_refused(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    with loads_or_is_refused():
        deployment = plan_deployment(Config(str(folder), **SIZES))
        assert deployment.source is not None
        load_weights(deployment.model, deployment.source, dtype="float32")


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("hidden_size", 2**20, r"embed_tokens.weight is \[264, 32\], the config says \[264, 1048576\]"),
        ("num_hidden_layers", 1000, r"missing: .*model\.layers\.1\..* and \d+ more"),
        ("vocab_size", 2**24, r"embed_tokens.weight is \[264, 32\], the config says \[16777216, 32\]"),
    ],
)
def test_a_config_is_compared_with_the_tensors_before_anything_is_planned(
    folder: Path, field: str, value: int, problem: str
) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, field: value}))
    with little_memory(), pytest.raises(InvalidCheckpoint, match=problem) as refusal:
        plan_deployment(Config(str(folder), **SIZES))
    assert len(refusal.value.message) < MOST_CHARACTERS


@pytest.mark.parametrize("depth", [100, 3_000, 100_000])
def test_json_that_is_nested_too_deep_is_refused(tmp_path: Path, folder: Path, depth: int) -> None:
    deep = b"[" * depth + b"]" * depth
    config = tmp_path / "config.json"
    config.write_bytes(b'{"model_type": ' + deep + b"}")
    with pytest.raises(InvalidCheckpoint, match=r"config\.json: lists and objects are nested more than 64 deep"):
        locate(f"random:{config}")
    header = b'{"a": ' + deep + b"}"
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    config.write_text(json.dumps(CONFIG))
    with pytest.raises(InvalidCheckpoint, match=r"the header of model\.safetensors: lists and objects are nested"):
        locate(str(tmp_path)).open_weights()


@pytest.mark.parametrize("dtype", [["F32"], {"F32": 1}, 7, None])
def test_a_tensor_type_that_is_no_string_is_refused(tmp_path: Path, dtype: Any) -> None:
    header = json.dumps({"a": {"dtype": dtype, "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(InvalidCheckpoint, match="a has dtype"):
        locate(str(tmp_path)).open_weights()


def test_json_larger_than_any_config_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)  # takes no space on the disk
    with little_memory(), pytest.raises(InvalidCheckpoint, match="1099511627776 bytes; at most 33554432"):
        locate(f"random:{tmp_path}")


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", math.nan), ("top_p", 2), ("top_k", 1.5), ("repetition_penalty", 0), ("max_new_tokens", -1)],
)
def test_generation_defaults_that_no_request_could_use_are_refused(tmp_path: Path, field: str, value: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "generation_config.json").write_text(json.dumps({field: value}))
    with pytest.raises(InvalidCheckpoint, match=f"generation_config.json: {field} is .* is needed"):
        locate(f"random:{tmp_path}")


GGUF_VALUES: list[Any] = [
    0,
    1,
    3,
    2**31,
    2**32 - 1,
    0.0,
    -1.0,
    1e-30,
    1e30,
    math.nan,
    math.inf,
    "x",
    True,
    [0, 1],
    [4, 4],
]
GGUF_KEYS = [
    *LLAMA_METADATA, "vocab_size", "attention.key_length", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast",
    "rope.scale_linear", "attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa",
    "final_logit_softcapping", "attn_logit_softcapping", "expert_count", "expert_used_count",
    "expert_feed_forward_length", "expert_weights_norm", "expert_gating_func", "expert_weights_scale",
    "expert_shared_count", "expert_group_count", "expert_group_used_count", "leading_dense_block_count",
    "nextn_predict_layers", "rope.dimension_count", "rope.scaling.yarn_log_multiplier", "attention.key_length_mla",
    "attention.value_length_mla", "attention.kv_lora_rank", "attention.q_lora_rank",
]  # fmt: skip
_FEW = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 8}
GGUF_EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3moe": _FEW,
    "glm4moe": _FEW | {"expert_shared_count": 1},
    "gpt-oss": _FEW | {"attention.sliding_window": 16},
    "deepseek2": _FEW
    | {"expert_shared_count": 1, "rope.dimension_count": 8, "attention.kv_lora_rank": 16}
    | {"attention.head_count_kv": 1, "attention.key_length": 24, "attention.value_length": 16}
    | {"attention.key_length_mla": 20, "attention.value_length_mla": 12},
}


@given(
    architecture=st.sampled_from(["llama", "gemma2", "gemma3", *GGUF_EXPERTS]),
    changes=st.dictionaries(st.sampled_from(GGUF_KEYS), st.sampled_from(GGUF_VALUES), min_size=1, max_size=3),
    scaling=st.sampled_from([{}, {"rope.scaling.type": "linear"}, {"rope.scaling.type": "yarn"}]),
    factors=st.sampled_from([None, [1.0] * 32, [0.0] * 32, [math.nan] * 32, [-1.0] * 32]),
)
def test_any_mutated_gguf_metadata_gives_a_model_or_a_typed_error(
    tmp_path_factory: pytest.TempPathFactory,
    architecture: str,
    changes: dict[str, Any],
    scaling: dict[str, str],
    factors: list[float] | None,
) -> None:
    tensors = embedding()
    if factors is not None:
        tensors["rope_freqs.weight"] = (np.array(factors, np.float32), "F32")
    path = tmp_path_factory.getbasetemp() / "mutated.gguf"
    own = GGUF_EXPERTS.get(architecture, {})
    write_gguf(path, architecture, LLAMA_METADATA | own | scaling | changes, tensors)
    with loads_or_is_refused():
        build_model(GGUFSource(path).config)


@given(st.data())
def test_any_damaged_header_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    base = tmp_path_factory.getbasetemp()
    gguf, folder = base / "damaged.gguf", base / "damaged"
    folder.mkdir(exist_ok=True)
    write_gguf(gguf, "llama", LLAMA_METADATA, embedding())
    save_file({"a": np.ones((2, 3), np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    path = data.draw(st.sampled_from([gguf, folder / "model.safetensors", folder / "config.json"]))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(content), 1000) - 1))
        content[at] = data.draw(st.sampled_from([0, 0x7F, 0x80, 0xFF, content[at] ^ 1, content[at] ^ 0x80]))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    with loads_or_is_refused():
        source = locate(str(gguf if path is gguf else folder)).open_weights()
        assert source is not None
        for name in source.tensors():
            source.read(name)
