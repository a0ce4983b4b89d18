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
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
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
    splits_latents: bool = True,
) -> Path:
    """Matrices become `type_`, or what `others` has for their names; everything else is float32, routers too.

    Experts of a layer are one tensor, whose name is that of each without its number. Older files have one matrix that
    makes keys and values of latents."""
    model_type = config["model_type"]
    architecture = ARCHITECTURES[model_type]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    stored: dict[str, tuple[np.ndarray, str]] = {}
    tensors = _with_stacked_experts(tensors)
    if splits_latents and "kv_lora_rank" in config:
        tensors = _with_split_latents(tensors, config)
    if model_type == "gpt_oss":
        tensors = _with_gates_apart(tensors)
    for name, values in tensors.items():
        if model_type in ("llama", "mixtral") and ("q_proj" in name or "k_proj" in name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            values = _interleaved(values, heads)
        if model_type.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new_name is not None, name
        is_plain = values.ndim == 1 or new_name.endswith(("ffn_gate_inp.weight", "exps.bias"))
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
    return write_gguf(
        path, gguf.MODEL_ARCH_NAMES[architecture], _metadata(config, scaling, splits_latents), stored, more=more
    )


def _metadata(config: dict[str, Any], scaling: dict[str, Any], splits_latents: bool) -> dict[str, Any]:
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
    for beta in ("beta_fast", "beta_slow"):
        if beta in scaling:
            found[f"rope.scaling.yarn_{beta}"] = scaling[beta]
    if "original_max_position_embeddings" in scaling and scaling["rope_type"] == "yarn":
        found["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
    if config.get("sliding_window"):
        found["attention.sliding_window"] = config["sliding_window"]
    if config["model_type"] == "gemma2":
        found["attn_logit_softcapping"] = config["attn_logit_softcapping"]
        found["final_logit_softcapping"] = config["final_logit_softcapping"]
    if "kv_lora_rank" in config:
        found |= _latent_metadata(config, splits_latents)
    return found | _expert_metadata(config)


def _latent_metadata(config: dict[str, Any], splits: bool) -> dict[str, Any]:
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    width, value = config["qk_nope_head_dim"] + rotated, config["v_head_dim"]
    found = {
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": rotated,
        "attention.head_count_kv": 1 if splits else config["num_attention_heads"],
        "attention.key_length": rank + rotated if splits else width,
        "attention.value_length": rank if splits else value,
    }
    if splits:
        found |= {"attention.key_length_mla": width, "attention.value_length_mla": value}
    if config["q_lora_rank"] is not None:
        found["attention.q_lora_rank"] = config["q_lora_rank"]
    if "rope_scaling" in config:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * config["rope_scaling"]["mscale_all_dim"]
    return found


def _expert_metadata(config: dict[str, Any]) -> dict[str, Any]:
    if "num_experts_per_tok" not in config:
        return {}
    names = {
        "num_experts": "expert_count",
        "num_local_experts": "expert_count",
        "n_routed_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "n_group": "expert_group_count",
        "topk_group": "expert_group_used_count",
        "n_shared_experts": "expert_shared_count",
        "first_k_dense_replace": "leading_dense_block_count",
        "routed_scaling_factor": "expert_weights_scale",
        "num_nextn_predict_layers": "nextn_predict_layers",
    }
    found = {key: config[name] for name, key in names.items() if name in config}
    if config["model_type"] == "glm4_moe":
        found["rope.dimension_count"] = int(config["head_dim"] * config.get("partial_rotary_factor", 0.5))
        found |= {"expert_gating_func": 2, "expert_weights_norm": config["norm_topk_prob"]}
    if config["model_type"] == "gpt_oss":
        found["expert_feed_forward_length"] = config["intermediate_size"]
    if config["model_type"] == "deepseek_v3":
        found |= {"expert_gating_func": 2, "expert_weights_norm": True}
    return found


def _with_gates_apart(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Gates and ups are neighbours along the last axis; matrices are rows of inputs."""
    found = {}
    for name, values in tensors.items():
        stem, _, part = name.rpartition(".experts.")
        kind = "bias" if part.endswith("_bias") else "weight"
        if not stem:
            found[name.replace(".sinks", ".sinks.weight")] = values
        elif part.startswith("down"):
            found[f"{stem}.experts.down_proj.{kind}"] = values if kind == "bias" else values.swapaxes(1, 2)
        else:
            for index, one in enumerate(("gate", "up")):
                own = values[..., index::2]
                found[f"{stem}.experts.{one}_proj.{kind}"] = own if kind == "bias" else own.swapaxes(1, 2)
    return found


def _with_split_latents(tensors: Mapping[str, np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
    found = {}
    for name, values in tensors.items():
        if ".kv_b_proj." not in name:
            found[name] = values
            continue
        heads = values.reshape(config["num_attention_heads"], -1, config["kv_lora_rank"])
        keys, rest = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
        found[name.replace("kv_b_proj", "k_b_proj")] = keys.swapaxes(1, 2)
        found[name.replace("kv_b_proj", "v_b_proj")] = rest
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
