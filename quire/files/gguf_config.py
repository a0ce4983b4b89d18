"""A Hugging Face config from the metadata of a GGUF file.

Every key that says how the model computes is used or refused: an unknown key could change every answer.
"""

import math
from collections.abc import Sequence
from typing import Any

from quire.errors import InvalidCheckpoint, UnsupportedModel, shown
from quire.files.gguf import GGUFHeader
from quire.files.gguf_architecture import ARCHITECTURES, MIXTRAL, GGUFArchitecture
from quire.files.gguf_experts import expert_fields, latent_fields
from quire.files.gguf_keys import MetadataKeys

ROPE_FACTORS = "rope_freqs.weight"  # what each rotary frequency is divided by; a config field in Hugging Face

_MAX_LAYERS = 1000  # more than any model has
_CLASS_NAMES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
# Gemma scales queries by its head size, save for the two largest models, which use the width per head. The metadata
# does not say which; the number of layers does.
_GEMMA_SCALED_BY_WIDTH = {("gemma2", 46), ("gemma3", 62)}


def architecture_of(header: GGUFHeader) -> GGUFArchitecture:
    name = header.architecture
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{header.path}: GGUF architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    has_experts = header.metadata.get("llama.expert_count", 0) != 0
    return MIXTRAL if name == "llama" and has_experts else ARCHITECTURES[name]


def config_from_gguf(header: GGUFHeader, rope_factors: Sequence[float] | None = None) -> dict[str, Any]:
    """The config.json this file would have had. `rope_factors` are the values of its tensor ROPE_FACTORS."""
    architecture = architecture_of(header)
    keys = MetadataKeys(header)
    num_layers = _num_layers(keys)
    hidden_size = keys.integer("embedding_length")
    num_heads = keys.integer("attention.head_count")
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "vocab_size": _vocab_size(header),
        "hidden_size": hidden_size,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        **_head_fields(keys, header.architecture, num_heads, hidden_size),
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.positive("rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    scaling = _rope_scaling(keys, config, rope_factors)
    if scaling is not None:
        config["rope_scaling"] = scaling
    if header.architecture in ("gemma2", "gemma3"):
        config |= _gemma_fields(keys, header.architecture, num_layers, hidden_size // num_heads, config["head_dim"])
    else:
        config |= _llama_like_fields(keys, header)
    if header.architecture == "gpt-oss":
        config["sliding_window"] = keys.integer("attention.sliding_window")
        config["layer_types"] = _layer_types(keys, num_layers, every=2)
    config |= expert_fields(keys, header, architecture)
    config["architectures"] = [_CLASS_NAMES[config["model_type"]]]
    for field, key in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        token_id = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[field] = token_id
    keys.refuse_the_rest()
    return config


def _head_fields(keys: MetadataKeys, name: str, num_heads: int, hidden_size: int) -> dict[str, Any]:
    """The numbers and sizes of heads, and how much of them is rotated."""
    if name == "deepseek2":
        return latent_fields(keys, num_heads)
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    keys.must_equal("attention.value_length", head_dim)
    fields = {"num_key_value_heads": keys.integer("attention.head_count_kv", num_heads), "head_dim": head_dim}
    if name == "glm4moe":
        return fields | {"partial_rotary_factor": keys.integer("rope.dimension_count", head_dim) / head_dim}
    keys.must_equal("rope.dimension_count", head_dim)
    return fields


def _num_layers(keys: MetadataKeys) -> int:
    """Layers that guess the tokens after the next come last, and are not used."""
    num_layers = keys.integer("block_count", at_most=_MAX_LAYERS)
    guessing = keys.whole("nextn_predict_layers", 0)
    if guessing >= num_layers:
        raise keys.refuse("nextn_predict_layers", guessing, f"less than block_count = {num_layers}")
    return num_layers - guessing


def _vocab_size(header: GGUFHeader) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise InvalidCheckpoint(f"{header.path}: no matrix token_embd.weight")
    return embedding.shape[0]


def _llama_like_fields(keys: MetadataKeys, header: GGUFHeader) -> dict[str, Any]:
    fields: dict[str, Any] = {"hidden_act": "silu"}
    if header.architecture != "qwen2":  # its biases come with the type
        fields["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    if header.architecture == "llama" and architecture_of(header) is not MIXTRAL:
        fields["mlp_bias"] = "blk.0.ffn_gate.bias" in header.tensors
        window = keys.get("attention.sliding_window")
        if window:  # Mistral files carry the architecture "llama"
            if fields["attention_bias"] or fields["mlp_bias"]:
                raise keys.refuse("attention.sliding_window", window, "models without biases")
            fields |= {"model_type": "mistral", "sliding_window": window}
    return fields


def _gemma_fields(keys: MetadataKeys, name: str, num_layers: int, width_per_head: int, head_dim: int) -> dict[str, Any]:
    scaled_by_width = (name, num_layers) in _GEMMA_SCALED_BY_WIDTH
    fields: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width_per_head if scaled_by_width else head_dim,
        "attention_bias": False,
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": _layer_types(keys, num_layers, every=2 if name == "gemma2" else 6),
        "attn_logit_softcapping": _optional(keys, "attn_logit_softcapping"),
        "final_logit_softcapping": _optional(keys, "final_logit_softcapping"),
    }
    if name == "gemma3":
        fields["rope_local_base_freq"] = keys.number("rope.freq_base_swa", 10_000.0)
    return fields


def _optional(keys: MetadataKeys, key: str) -> float | None:
    return None if keys.get(key) is None else keys.number(key)


def _layer_types(keys: MetadataKeys, num_layers: int, every: int) -> list[str]:
    """One layer in `every` attends to everything, unless the file says which layers have a window."""
    pattern = keys.get("attention.sliding_window_pattern")
    if pattern is None or (isinstance(pattern, int) and not isinstance(pattern, bool)):
        every = pattern if pattern is not None else every
        if every < 1:
            raise keys.refuse("attention.sliding_window_pattern", pattern, "a number above 0")
        windowed = [(layer + 1) % every != 0 for layer in range(num_layers)]
    elif isinstance(pattern, list) and len(pattern) == num_layers:
        windowed = [bool(item) for item in pattern]
    else:
        raise keys.refuse("attention.sliding_window_pattern", pattern, f"a number, or {num_layers} booleans")
    return ["sliding_attention" if item else "full_attention" for item in windowed]


def _rope_scaling(keys: MetadataKeys, config: dict[str, Any], factors: Sequence[float] | None) -> dict[str, Any] | None:
    kind = keys.get("rope.scaling.type")
    original = keys.get("rope.scaling.original_context_length")
    legacy = keys.get("rope.scale_linear")
    attention_factor = _optional(keys, "rope.scaling.attn_factor")
    betas = {
        name: keys.get(f"rope.scaling.{key}")
        for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow"))
    }
    if kind is None and legacy not in (None, 1.0):
        return {"rope_type": "linear", "factor": keys.positive("rope.scale_linear")}
    if kind in (None, "none"):
        keys.get("rope.scaling.factor")
        return None if factors is None else _scaling_from_factors(config, list(factors))
    if factors is not None:
        raise keys.refuse("rope.scaling.type", kind, f"'none' in a file that has {ROPE_FACTORS}")
    factor = keys.positive("rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise keys.refuse("rope.scaling.type", kind, "none, linear, yarn")
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    scaling["original_max_position_embeddings"] = original or config["max_position_embeddings"]
    scaling |= {name: value for name, value in betas.items() if value is not None}
    if config["model_type"] == "gpt_oss":
        scaling["truncate"] = False  # as its config says, which files do not
    if config["model_type"] == "deepseek_v2":  # in the files of others this key stands for something else
        mscale = 10 * keys.number("rope.scaling.yarn_log_multiplier", 0.0)
        scaling |= {"mscale": mscale, "mscale_all_dim": mscale}  # all models have the same number for both
    if attention_factor is not None:
        scaling["attention_factor"] = attention_factor * (1 + 0.1 * math.log(factor))
    return scaling


# Every published model with this scaling has these values; only `factor` differs.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _scaling_from_factors(config: dict[str, Any], factors: list[float]) -> dict[str, Any]:
    """llama3 scaling where the factors are its, and otherwise longrope, which divides by any list of factors."""
    if len(factors) != config["head_dim"] // 2:
        raise InvalidCheckpoint(
            f"{ROPE_FACTORS} has {len(factors)} values; a head of {config['head_dim']} has {config['head_dim'] // 2}"
        )
    if not all(0 < value < math.inf for value in factors):
        raise InvalidCheckpoint(f"{ROPE_FACTORS} holds {shown(factors)}; numbers above 0 are needed")
    factor = float(f"{max(factors):.7g}")
    expected = _llama3_factors(config["rope_theta"], config["head_dim"], factor)
    if all(math.isclose(found, want, rel_tol=1e-5) for found, want in zip(factors, expected, strict=True)):
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": config["max_position_embeddings"],
    }


def _llama3_factors(theta: float, head_dim: int, factor: float) -> list[float]:
    low, high, original = (
        _LLAMA3["low_freq_factor"],
        _LLAMA3["high_freq_factor"],
        _LLAMA3["original_max_position_embeddings"],
    )
    factors = []
    for pair in range(head_dim // 2):
        turns = original / (2 * math.pi * theta ** (2 * pair / head_dim))  # within the original context
        blend = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - blend) / factor + blend))
    return factors
