"""The ranges of numbers in configs.

They are wider than those of any model, and narrow enough that everything computed from them is finite and that the
description of a model takes little memory. A config is compared with the file's tensors after that.
"""

LARGEST_INTEGER = 2**31 - 1  # positions have 32 bits
LARGEST_NUMBER = 1e9
MAX_LAYER_EXPERTS = 2**16  # experts of all layers together

_LAYERS, _WIDTH, _HEADS, _ROWS = (1, 1000), (1, 2**20), (1, 2**16), (1, 2**24)
_TAPS = (2, 64)  # of a convolution over the last tokens
_EPSILON, _FACTOR = (0, 1), (1e-3, 1e6)
_MULTIPLIER = (1e-9, LARGEST_NUMBER)

# The least and the most, both allowed. Other integers are from 1 to LARGEST_INTEGER, other numbers have any sign and
# are at most LARGEST_NUMBER away from zero.
RANGES: dict[str, tuple[float, float]] = {
    "num_hidden_layers": _LAYERS,
    "n_layer": _LAYERS,
    "hidden_size": _WIDTH,
    "n_embd": _WIDTH,
    "intermediate_size": _ROWS,
    "intermediate_size_mlp": _ROWS,
    "moe_intermediate_size": _ROWS,
    "n_inner": _ROWS,
    "vocab_size": _ROWS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "n_head": _HEADS,
    "head_dim": _HEADS,
    "kv_lora_rank": _WIDTH,
    "q_lora_rank": _WIDTH,
    "qk_nope_head_dim": _HEADS,
    "qk_rope_head_dim": _HEADS,
    "v_head_dim": _HEADS,
    "num_experts": (1, 1024),
    "num_local_experts": (1, 1024),
    "n_routed_experts": (1, 1024),
    "n_shared_experts": (1, 64),
    "routed_scaling_factor": _MULTIPLIER,
    "shared_expert_intermediate_size": _ROWS,
    "shared_intermediate_size": _ROWS,
    "linear_num_key_heads": _HEADS,
    "linear_num_value_heads": _HEADS,
    "linear_key_head_dim": _HEADS,
    "linear_value_head_dim": _HEADS,
    "linear_conv_kernel_dim": _TAPS,
    "mamba_n_heads": _HEADS,
    "mamba_n_groups": _HEADS,
    "mamba_d_state": _HEADS,
    "mamba_expand": (1, 64),
    "mamba_d_conv": _TAPS,
    "rms_norm_eps": _EPSILON,
    "layer_norm_epsilon": _EPSILON,
    "layer_norm_eps": _EPSILON,
    "rope_theta": (2, 1e15),
    "rope_local_base_freq": (2, 1e15),
    "partial_rotary_factor": (1e-3, 1),
    "original_max_position_embeddings": (2, LARGEST_INTEGER),
    "factor": _FACTOR,
    "short_factor": _FACTOR,
    "long_factor": _FACTOR,
    "low_freq_factor": _FACTOR,
    "high_freq_factor": _FACTOR,
    "attention_factor": _FACTOR,
    "beta_fast": _FACTOR,
    "beta_slow": _FACTOR,
    "mscale": (0, 1e6),
    "mscale_all_dim": (0, 1e6),
    "query_pre_attn_scalar": _MULTIPLIER,
    "attn_logit_softcapping": _MULTIPLIER,
    "final_logit_softcapping": _MULTIPLIER,
    "attention_multiplier": _MULTIPLIER,
    "residual_multiplier": _MULTIPLIER,
    "embedding_multiplier": _MULTIPLIER,
    "logits_scaling": _MULTIPLIER,
    "logit_scale": _MULTIPLIER,
    "swiglu_alpha": _MULTIPLIER,
    "swiglu_limit": _MULTIPLIER,
}
