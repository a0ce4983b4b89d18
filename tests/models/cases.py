"""Tiny configs, as Hugging Face files spell them: each family, and each mechanism within one."""

from typing import Any

VOCAB_SIZE = 96
WINDOW = 7
PROMPT_LENGTH = 29  # longer than the window, and no multiple of a page or a chunk
NUM_GENERATED = 64

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _config(model_type: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": model_type, **_SIZES, **fields}


_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LONGROPE = {
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.2, 2.5, 6.0],
}
_GPT2 = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}
_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
_RECURRENT = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 10,
    "mamba_d_head": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
    "shared_intermediate_size": 40,
}
_GEMMA3_TEXT = {
    **_config("gemma3_text", num_hidden_layers=4, head_dim=8, query_pre_attn_scalar=12, sliding_window=WINDOW),
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}

CASES: dict[str, dict[str, Any]] = {
    "llama": _config("llama", rope_parameters={"rope_type": "default", "rope_theta": 5000.0}),
    "llama-biases": _config(
        "llama",
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        head_dim=12,
        hidden_act="gelu",
        rms_norm_eps=1e-2,
        rope_theta=300.0,
    ),
    "llama-one-key": _config("llama", num_key_value_heads=1, hidden_act="relu"),
    "llama-linear": _config("llama", rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.5}),
    "llama-dynamic": _config("llama", max_position_embeddings=24, rope_scaling={"rope_type": "dynamic", "factor": 4.0}),
    "llama-llama3": _config("llama", rope_theta=500.0, rope_scaling=_LLAMA3_SCALING),
    "llama-yarn": _config(
        "llama",
        rope_theta=500.0,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ),
    "llama-yarn-mscale": _config(
        "llama",
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 200.0,
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "mscale": 0.7,
            "mscale_all_dim": 0.3,
            "truncate": False,
        },
    ),
    "llama-longrope": _config(
        "llama",
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 200.0,
            "short_factor": [1.0, 1.1, 1.3, 1.4],
            "long_factor": [1.2, 2.5, 6.0, 9.0],
            "original_max_position_embeddings": 40,  # reached while generating
        },
    ),
    "qwen2": _config("qwen2"),
    "qwen2-window": _config(
        "qwen2", num_hidden_layers=3, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": _config("qwen3", head_dim=12, tie_word_embeddings=True),
    "qwen3-window": _config(
        "qwen3",
        head_dim=8,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "mistral": _config("mistral", sliding_window=WINDOW, head_dim=10),
    "mistral-full": _config("mistral", sliding_window=None),
    "gemma2": _config(
        "gemma2",
        num_hidden_layers=3,
        head_dim=8,
        query_pre_attn_scalar=12,
        sliding_window=WINDOW,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma2-uncapped": _config(
        "gemma2",
        head_dim=8,
        attention_bias=True,
        sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention"],
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    ),
    "gemma3": _GEMMA3_TEXT,
    "gemma3-older-fields": _config(
        "gemma3_text",
        num_hidden_layers=3,
        head_dim=8,
        sliding_window=WINDOW,
        sliding_window_pattern=2,
        rope_theta=5000.0,
        rope_local_base_freq=100.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        final_logit_softcapping=4.0,
    ),
    "phi3": _config("phi3", sliding_window=WINDOW),
    "phi3-short": _config(
        "phi3",
        rope_scaling={"type": "longrope", **_LONGROPE},
        partial_rotary_factor=0.75,
        max_position_embeddings=256,
        original_max_position_embeddings=128,
    ),
    "phi3-long": _config(
        "phi3",
        rope_scaling={"type": "longrope", **_LONGROPE},
        partial_rotary_factor=0.75,
        original_max_position_embeddings=16,
    ),
    "granite": _config(
        "granite",
        attention_bias=True,
        mlp_bias=True,
        embedding_multiplier=3.0,
        logits_scaling=2.0,
        residual_multiplier=0.4,
        attention_multiplier=0.2,
    ),
    "olmo2": _config("olmo2"),
    "olmo2-biases": _config("olmo2", attention_bias=True, num_key_value_heads=4),
    "olmo3": _config(
        "olmo3",
        num_hidden_layers=3,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
        },
    ),
    "olmo3-older-fields": _config("olmo3", num_hidden_layers=4, attention_bias=True, sliding_window=WINDOW),
    "glm4": _config("glm4", head_dim=12, hidden_size=40, rms_norm_eps=1e-3),
    "glm4-options": _config(
        "glm4", head_dim=16, attention_bias=False, partial_rotary_factor=0.75, tie_word_embeddings=True
    ),
    "glm4_moe": _config(
        "glm4_moe",
        head_dim=12,
        num_hidden_layers=3,
        use_qk_norm=True,
        attention_bias=True,
        moe_intermediate_size=20,
        n_routed_experts=12,
        n_shared_experts=2,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    ),
    "glm4_moe-options": _config(
        "glm4_moe",
        head_dim=8,
        moe_intermediate_size=24,
        n_routed_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=False,
        first_k_dense_replace=0,
        partial_rotary_factor=1.0,
    ),
    "cohere2": _config("cohere2", num_hidden_layers=4, sliding_window=WINDOW, logit_scale=0.3),
    "cohere2-options": _config(
        "cohere2",
        attention_bias=True,
        sliding_window=WINDOW,
        sliding_window_pattern=2,
        tie_word_embeddings=False,
        layer_norm_eps=1e-2,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    ),
    "exaone4": _config("exaone4", num_hidden_layers=4, head_dim=10, sliding_window=WINDOW, sliding_window_pattern=2),
    "exaone4-full": _config(
        "exaone4", sliding_window=None, layer_types=["full_attention"] * 2, rope_theta=300.0, hidden_act="gelu"
    ),
    "smollm3": _config("smollm3", num_hidden_layers=4, no_rope_layer_interval=2),
    "smollm3-window": _config(
        "smollm3",
        num_hidden_layers=3,
        attention_bias=True,
        mlp_bias=True,
        no_rope_layers=[1, 0, 1],
        use_sliding_window=True,
        sliding_window=WINDOW,
        tie_word_embeddings=False,
    ),
    "gpt_oss": _config(
        "gpt_oss",
        num_hidden_layers=3,
        head_dim=12,
        num_local_experts=6,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
        rope_theta=300.0,
    ),
    "gpt_oss-options": _config(
        "gpt_oss",
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=3,
        attention_bias=False,
        swiglu_alpha=0.7,
        swiglu_limit=1.5,
        sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "gpt2": {"model_type": "gpt2", **_GPT2},
    "gpt2-options": {
        "model_type": "gpt2",
        **_GPT2,
        "n_inner": 40,
        "activation_function": "gelu",
        "scale_attn_by_inverse_layer_idx": True,
        "tie_word_embeddings": False,
    },
    "mixtral": _config("mixtral", num_local_experts=5, num_experts_per_tok=2, sliding_window=WINDOW),
    "qwen3_moe": _config("qwen3_moe", **_MOE, num_hidden_layers=3, norm_topk_prob=True, mlp_only_layers=[1]),
    "qwen3_next": _config(
        "qwen3_next",
        **_RECURRENT,
        num_hidden_layers=4,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=20,
    ),
    "qwen3_next-options": _config(
        "qwen3_next",
        **(_RECURRENT | {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 3}),
        num_hidden_layers=3,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        head_dim=8,
        partial_rotary_factor=0.5,
        attention_bias=True,
        num_experts=4,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
        norm_topk_prob=False,
        mlp_only_layers=[1],
    ),
    "granitemoehybrid": _config(
        "granitemoehybrid",
        **_MAMBA,
        num_hidden_layers=4,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        num_local_experts=5,
        num_experts_per_tok=2,
        embedding_multiplier=3.0,
        logits_scaling=2.0,
        residual_multiplier=0.6,
        attention_multiplier=0.2,
    ),
    "granitemoehybrid-options": _config(
        "granitemoehybrid",
        **(_MAMBA | {"mamba_n_groups": 2, "mamba_conv_bias": False, "mamba_d_conv": 3, "mamba_d_head": "auto"}),
        layer_types=["mamba", "attention"],
        num_local_experts=0,
        position_embedding_type="rope",
        tie_word_embeddings=True,
    ),
    "qwen3_moe-window": _config(
        "qwen3_moe",
        **_MOE,
        norm_topk_prob=False,
        decoder_sparse_step=2,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=WINDOW,
    ),
}
