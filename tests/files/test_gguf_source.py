from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from quire.errors import InvalidCheckpoint, UnsupportedModel
from quire.files.gguf_architecture import ARCHITECTURES
from quire.files.gguf_source import GGUFSource, dequantize
from quire.files.tensor_source import BLOCK
from tests.files.gguf_writing import LLAMA_METADATA, embedding, write_gguf

# How far a value may move, in parts of the largest of its block.
ROUNDING = {
    "F32": 0,
    "F16": 2**-10,
    "BF16": 2**-8,
    "Q8_0": 1 / 200,
    "Q4_0": 1 / 7,
    "Q4_1": 1 / 7,
    "Q5_0": 1 / 15,
    "Q5_1": 1 / 15,
}
K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")


def random_blocks(type_: str, rows: int, width: int) -> np.ndarray:
    """Bytes [rows, row bytes] whose scales are finite: any other bytes are valid in every type."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_]]
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (rows * width // block_size, block_bytes), dtype=np.uint8)
    scales = rng.uniform(-0.01, 0.01, (len(blocks), 2)).astype(np.float16).view(np.uint8)
    if type_ == "Q6_K":
        blocks[:, -2:] = scales[:, :2]
    else:
        blocks[:, :4] = scales
    return blocks.reshape(rows, -1)


def decode_one(type_: str, block: np.ndarray) -> list[float]:
    """A K-quant block, value by value, as the format describes it."""

    def half(start: int) -> float:
        return float(block[start : start + 2].view(np.float16)[0])

    b = [int(byte) for byte in block]
    if type_ == "Q6_K":
        low, high, scales = b[:128], b[128:192], block[192:208].view(np.int8)
        values = []
        for i in range(256):
            half_block, within = divmod(i, 128)
            quarter, lane = divmod(within, 32)
            nibble = low[64 * half_block + 32 * (quarter % 2) + lane] >> (4 * (quarter // 2)) & 15
            top = high[32 * half_block + lane] >> (2 * quarter) & 3
            values.append(half(208) * int(scales[i // 16]) * ((nibble | top << 4) - 32))
        return values
    packed = b[4:16]
    values = []
    for i in range(256):
        group, lane = divmod(i, 32)
        if group < 4:
            scale, minimum = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
            minimum = packed[group + 4] >> 4 | packed[group] >> 6 << 4
        quants = b[16:] if type_ == "Q4_K" else b[48:]
        value = quants[32 * (group // 2) + lane] >> (4 * (group % 2)) & 15
        if type_ == "Q5_K":
            value |= (b[16 + lane] >> group & 1) << 4
        values.append(half(0) * scale * value - half(2) * minimum)
    return values


@pytest.mark.parametrize("type_", ROUNDING)
def test_values_survive_within_the_rounding_of_their_type(tmp_path: Path, type_: str) -> None:
    values = np.random.default_rng(0).normal(size=(8, 256)).astype(np.float32)
    path = write_gguf(tmp_path / "m.gguf", "llama", LLAMA_METADATA, {"token_embd.weight": (values, type_)})
    read = GGUFSource(path).read("model.embed_tokens.weight").astype(np.float32)
    blocks = values.reshape(-1, 32)
    allowed = ROUNDING[type_] * np.abs(blocks).max(axis=1, keepdims=True)
    assert (np.abs(read.reshape(-1, 32) - blocks) <= allowed).all()


@pytest.mark.parametrize("type_", [*ROUNDING, *K_QUANTS])
def test_dequantisation_equals_that_of_the_gguf_package(tmp_path: Path, type_: str) -> None:
    kind = gguf.GGMLQuantizationType[type_]
    if type_ in K_QUANTS:
        data = random_blocks(type_, 8, 256)
    else:
        data = gguf.quants.quantize(np.random.default_rng(0).normal(size=(8, 256)).astype(np.float32), kind)
    path = write_gguf(tmp_path / "m.gguf", "llama", LLAMA_METADATA, {"token_embd.weight": (data.view(np.uint8), type_)})
    source = GGUFSource(path)
    read = source.read("model.embed_tokens.weight")
    info = source.tensors()["model.embed_tokens.weight"]
    assert (info.shape, info.dtype) == ((8, 256), read.dtype.name)
    assert info.dtype == {"F16": "float16", "BF16": "bfloat16"}.get(type_, "float32")
    np.testing.assert_array_equal(read.astype(np.float32), gguf.quants.dequantize(data, kind))


@pytest.mark.parametrize("type_", K_QUANTS)
def test_k_quants_equal_the_format_read_value_by_value(type_: str) -> None:
    data = random_blocks(type_, 4, 512)
    expected = [value for block in data.reshape(8, -1) for value in decode_one(type_, block)]
    np.testing.assert_allclose(dequantize(data.reshape(-1), type_), expected, rtol=1e-5, atol=1e-7)


def test_tensors_larger_than_a_chunk_are_put_together_in_order() -> None:
    data = random_blocks("Q5_1", 1000, 1024)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType.Q5_1)
    np.testing.assert_array_equal(dequantize(data.reshape(-1), "Q5_1").reshape(1000, 1024), expected)


@pytest.mark.parametrize("type_", ["Q8_0", "Q4_0"])
def test_blocks_stand_for_exactly_what_is_read(tmp_path: Path, type_: str) -> None:
    rows = 1100  # more than a chunk
    values = np.random.default_rng(0).normal(size=(rows, 256)).astype(np.float32)
    tensors = {"token_embd.weight": (values, type_), "blk.0.attn_k.weight": (values[:128], type_)}
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", "llama", LLAMA_METADATA, tensors))
    for name in source.tensors():
        blocks = source.read_blocks(name)
        assert blocks is not None
        assert blocks.dtype == BLOCK
        found = blocks["codes"] * blocks["scale"].astype(np.float32)[..., None]
        np.testing.assert_array_equal(found.reshape(len(found), -1), source.read(name))


@pytest.mark.parametrize("type_", ["F32", "F16", "Q4_1", "Q5_1", "Q6_K"])
def test_types_that_are_no_scaled_eight_bits_have_no_blocks(tmp_path: Path, type_: str) -> None:
    data = random_blocks(type_, 8, 256) if type_ == "Q6_K" else embedding()["token_embd.weight"][0]
    path = write_gguf(tmp_path / "m.gguf", "llama", LLAMA_METADATA, {"token_embd.weight": (data, type_)})
    assert GGUFSource(path).read_blocks("model.embed_tokens.weight") is None


def test_a_code_that_has_no_opposite_keeps_a_tensor_from_being_read_as_blocks(tmp_path: Path) -> None:
    data = gguf.quants.quantize(embedding()["token_embd.weight"][0], gguf.GGMLQuantizationType.Q8_0)
    data[3, 40] = np.int8(-128).view(np.uint8)
    path = write_gguf(tmp_path / "m.gguf", "llama", LLAMA_METADATA, {"token_embd.weight": (data, "Q8_0")})
    assert GGUFSource(path).read_blocks("model.embed_tokens.weight") is None


def test_unsupported_tensor_types_are_all_named(tmp_path: Path) -> None:
    tensors = embedding()
    for name, type_ in (("blk.0.ffn_up.weight", "Q2_K"), ("blk.0.ffn_down.weight", "IQ4_XS"), ("a", "IQ4_XS")):
        block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_]][1]
        tensors[name] = (np.zeros((2, block_bytes), np.uint8), type_)
    path = write_gguf(tmp_path / "m.gguf", "llama", LLAMA_METADATA, tensors)
    with pytest.raises(UnsupportedModel, match=r"Q2_K \(1, first blk\.0\.ffn_up\.weight\); IQ4_XS \(2, first blk"):
        GGUFSource(path)


def test_an_unsupported_architecture_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "mamba", {}, embedding())
    with pytest.raises(UnsupportedModel, match=r"'mamba' is not supported; supported: llama, qwen2"):
        GGUFSource(path)


def test_the_page_of_models_names_every_architecture() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text().partition("\n## GGUF\n")[2]
    assert [line.split("`")[1] for line in page.splitlines() if line.startswith("- `")] == list(ARCHITECTURES)


def write_parts(folder: Path, num_tensors: int = 2, second: str = "output_norm.weight") -> tuple[Path, Path]:
    """A model in two files; the second has a tensor and no metadata of the architecture."""
    split = {"split.count": 2, "split.tensors.count": num_tensors}
    tensors = {second: (np.full(256, 7, np.float32), "F32")}
    return (
        write_gguf(
            folder / "m-00001-of-00002.gguf", "llama", LLAMA_METADATA, embedding(), more=split | {"split.no": 0}
        ),
        write_gguf(folder / "m-00002-of-00002.gguf", "llama", {}, tensors, more=split | {"split.no": 1}),
    )


def test_the_parts_of_a_split_file_are_one_model_whichever_is_named(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    for part in parts:
        source = GGUFSource(part)
        assert source.path == parts[0]
        assert source.config["hidden_size"] == 256
        np.testing.assert_array_equal(source.read("model.norm.weight"), np.full(256, 7))
        np.testing.assert_array_equal(source.read("model.embed_tokens.weight"), embedding()["token_embd.weight"][0])


def test_missing_parts_are_named(tmp_path: Path) -> None:
    first, second = write_parts(tmp_path)
    second.unlink()
    with pytest.raises(InvalidCheckpoint, match=r"2 parts, of which are missing: m-00002-of-00002\.gguf"):
        GGUFSource(first)


def test_a_part_under_another_name_is_refused(tmp_path: Path) -> None:
    first, _ = write_parts(tmp_path)
    with pytest.raises(InvalidCheckpoint, match=r"renamed\.gguf: one of 2 parts, but not named so"):
        GGUFSource(first.rename(tmp_path / "renamed.gguf"))


def test_parts_that_do_not_add_up_are_refused(tmp_path: Path) -> None:
    first, _ = write_parts(tmp_path, num_tensors=3)
    with pytest.raises(InvalidCheckpoint, match="3 tensors in all its parts, which hold 2"):
        GGUFSource(first)
    first, _ = write_parts(tmp_path, second="token_embd.weight")
    with pytest.raises(InvalidCheckpoint, match=r"token_embd\.weight is in both .*00001.* and .*00002"):
        GGUFSource(first)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"expert_count": 2000}, InvalidCheckpoint, r"llama\.expert_count is 2000, not a positive integer up to 1024"),
        ({"expert_weights_scale": 2.0}, UnsupportedModel, r"llama\.expert_weights_scale = 2\.0 is not supported"),
        ({"attention.value_length": 32}, UnsupportedModel, r"value_length is 32; only the head size 64"),
        ({"rope.dimension_count": 32}, UnsupportedModel, r"rope\.dimension_count is 32"),
        (
            {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0},
            UnsupportedModel,
            "'longrope'; supported: none",
        ),
        ({"a.new.key": 1.5}, UnsupportedModel, r"llama\.a\.new\.key = 1\.5"),
        ({"attention.head_count_kv": [2, 4]}, UnsupportedModel, r"head_count_kv differs between layers: \[2, 4\]"),
        ({"block_count": 0}, InvalidCheckpoint, r"block_count is 0, not a positive integer"),
        ({"context_length": "long"}, InvalidCheckpoint, r"context_length is 'long'"),
        ({"rope.freq_base": "x"}, InvalidCheckpoint, r"rope\.freq_base is 'x', not a number"),
    ],
)
def test_metadata_that_cannot_be_honoured_is_refused(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", LLAMA_METADATA | change, embedding())
    with pytest.raises(error, match=message):
        _ = GGUFSource(path).config


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 1.0}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_rope_scaling_is_read(tmp_path: Path, change: dict[str, Any], expected: dict[str, Any] | None) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", LLAMA_METADATA | change, embedding())
    assert GGUFSource(path).config.get("rope_scaling") == expected


def test_the_rope_factors_of_llama_3_become_its_scaling(tmp_path: Path) -> None:
    theta, head_dim, factor = 500_000.0, 64, 32.0
    factors = np.empty(head_dim // 2, np.float32)
    for i in range(head_dim // 2):  # as converters write them
        wavelength = 2 * np.pi * theta ** (2 * i / head_dim)
        if wavelength < 8192 / 4:
            factors[i] = 1
        elif wavelength > 8192:
            factors[i] = factor
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors[i] = 1 / ((1 - smooth) / factor + smooth)
    metadata = LLAMA_METADATA | {"rope.freq_base": theta}
    tensors = embedding() | {"rope_freqs.weight": (factors, "F32")}
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", "llama", metadata, tensors))
    assert source.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert set(source.tensors()) == {"model.embed_tokens.weight"}


def test_other_rope_factors_divide_the_frequencies_as_they_are(tmp_path: Path) -> None:
    factors = np.linspace(1, 3, 32, dtype=np.float32)
    path = write_gguf(
        tmp_path / "m.gguf", "llama", LLAMA_METADATA, embedding() | {"rope_freqs.weight": (factors, "F32")}
    )
    scaling = GGUFSource(path).config["rope_scaling"]
    assert scaling["rope_type"] == "longrope"
    assert scaling["short_factor"] == scaling["long_factor"] == factors.tolist()
    assert scaling["attention_factor"] == 1.0


def test_rope_factors_of_the_wrong_length_are_refused(tmp_path: Path) -> None:
    tensors = embedding() | {"rope_freqs.weight": (np.ones(8, np.float32), "F32")}
    with pytest.raises(InvalidCheckpoint, match=r"rope_freqs\.weight has 8 values; a head of 64 has 32"):
        _ = GGUFSource(write_gguf(tmp_path / "m.gguf", "llama", LLAMA_METADATA, tensors)).config


@pytest.mark.parametrize(("name", "num_layers", "scalar"), [("gemma2", 46, 32), ("gemma2", 26, 64), ("gemma3", 62, 32)])
def test_gemma_scales_queries_by_width_in_its_largest_models(
    tmp_path: Path, name: str, num_layers: int, scalar: int
) -> None:
    metadata = LLAMA_METADATA | {
        "block_count": num_layers,
        "attention.head_count": 8,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "attention.sliding_window": 16,
    }
    config = GGUFSource(write_gguf(tmp_path / "m.gguf", name, metadata, embedding())).config
    assert config["query_pre_attn_scalar"] == scalar
    every = 2 if name == "gemma2" else 6
    assert [kind == "full_attention" for kind in config["layer_types"]] == [
        (i + 1) % every == 0 for i in range(num_layers)
    ]


def test_gemma_layers_can_be_listed(tmp_path: Path) -> None:
    metadata = LLAMA_METADATA | {"block_count": 3, "attention.sliding_window": 16}
    metadata["attention.sliding_window_pattern"] = [False, True, True]
    config = GGUFSource(write_gguf(tmp_path / "m.gguf", "gemma3", metadata, embedding())).config
    assert config["layer_types"] == ["full_attention", "sliding_attention", "sliding_attention"]


def test_a_window_in_a_llama_file_makes_it_a_mistral(tmp_path: Path) -> None:
    metadata = LLAMA_METADATA | {"attention.sliding_window": 64}
    config = GGUFSource(write_gguf(tmp_path / "m.gguf", "llama", metadata, embedding())).config
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 64)


def test_unknown_tensors_keep_their_names(tmp_path: Path) -> None:
    tensors = embedding() | {"blk.0.attn_sinks.weight": (np.ones(4, np.float32), "F32")}
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", "llama", LLAMA_METADATA, tensors))
    assert "blk.0.attn_sinks.weight" in source.tensors()
