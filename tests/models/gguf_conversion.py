"""A checkpoint written as GGUF the way llama.cpp's converter does, so that reading it back can be compared."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.files.gguf_writing import write_gguf

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
_SCALES = {"linear", "yarn"}
_EXPERT = re.compile(r"(?P<before>.+\.experts)\.\d+\.(?P<after>.+)")


def write_as_gguf(
    path: Path,
    config: dict[str, Any],
    tensors: Mapping[str, np.ndarray],
    type_: str = "F32",
    *,
    others: Mapping[str, str] | None = None,
) -> Path:
    """Matrices become `type_`, or what `others` has for their names; everything else is float32, routers too.

    Experts of a layer are one tensor, whose name is that of each without its number."""
    model_type = config["model_type"]
    architecture = ARCHITECTURES[model_type]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    stored: dict[str, tuple[np.ndarray, str]] = {}
    for name, values in _with_stacked_experts(tensors).items():
        if model_type == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            values = _interleaved(values, heads)
        if model_type.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new_name is not None, name
        is_plain = values.ndim == 1 or new_name.endswith("ffn_gate_inp.weight")
        own_type = "F32" if is_plain else (others or {}).get(name, type_)
        stored[new_name] = (np.ascontiguousarray(values), own_type)
    scaling = config.get("rope_scaling", {})
    if scaling.get("rope_type") == "llama3":
        stored["rope_freqs.weight"] = (_llama3_factors(config), "F32")
    more = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", *(f"t{i}" for i in range(3, config["vocab_size"]))],
        "tokenizer.ggml.token_type": [1] * config["vocab_size"],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }
    return write_gguf(path, gguf.MODEL_ARCH_NAMES[architecture], _metadata(config, scaling), stored, more=more)


def _metadata(config: dict[str, Any], scaling: dict[str, Any]) -> dict[str, Any]:
    head_dim = config["head_dim"]
    found = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": config["rope_theta"],
    }
    if config["model_type"] == "llama":
        found |= {"vocab_size": config["vocab_size"], "rope.dimension_count": head_dim}
    if scaling.get("rope_type") in _SCALES:
        found |= {"rope.scaling.type": scaling["rope_type"], "rope.scaling.factor": scaling["factor"]}
    if "original_max_position_embeddings" in scaling and scaling["rope_type"] == "yarn":
        found["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
    if config["model_type"].startswith("gemma"):
        found["attention.sliding_window"] = config["sliding_window"]
    if config["model_type"] == "gemma2":
        found["attn_logit_softcapping"] = config["attn_logit_softcapping"]
        found["final_logit_softcapping"] = config["final_logit_softcapping"]
    if config["model_type"] == "qwen3_moe":
        found |= {
            "expert_count": config["num_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
        }
    return found


def _with_stacked_experts(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    found: dict[str, Any] = {}
    for name, values in tensors.items():
        expert = _EXPERT.fullmatch(name)
        if expert is None:
            found[name] = values
        else:
            found.setdefault(f"{expert['before']}.{expert['after']}", []).append(values)
    return {name: np.stack(values) if isinstance(values, list) else values for name, values in found.items()}


def _interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _llama3_factors(config: dict[str, Any]) -> np.ndarray:
    scaling = config["rope_scaling"]
    original = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors = []
    for i in range(0, config["head_dim"], 2):
        wavelength = 2 * math.pi * config["rope_theta"] ** (i / config["head_dim"])
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(scaling["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)
