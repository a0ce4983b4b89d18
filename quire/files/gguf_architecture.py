"""The names and layouts that each GGUF architecture has for the tensors of Hugging Face checkpoints."""

from dataclasses import dataclass, field

_DECODER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SECOND_NORM = {"post_attention_norm": "post_attention_layernorm"}
_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_MIXTRAL_EXPERTS = {
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_ROUTER = {"ffn_gate_inp": "mlp.gate"}
_SHARED_EXPERTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
# Whole names, because their ends differ too.
_GPT_OSS = {
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_exps.bias": "mlp.experts.gate_proj_bias",
    "ffn_up_exps.bias": "mlp.experts.up_proj_bias",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
_ROUTER_BIAS = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_LATENT_ATTENTION = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
_KINDS = ("weight", "bias")
_OUTSIDE_LAYERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GUESSES = "nextn."  # parts of layers behind the last one


@dataclass(frozen=True)
class GGUFArchitecture:
    model_type: str
    layer_names: dict[str, str]
    # Tensors with a matrix for each expert, which Hugging Face checkpoints store one by one: its number is put in.
    expert_names: dict[str, str] = field(default_factory=dict)
    whole_names: dict[str, str] = field(default_factory=dict)  # within a layer
    # llama.cpp rotates neighbouring pairs of a head, Hugging Face its two halves; the converter reorders the rows.
    interleaves_heads: bool = False
    # The converter stores 1 + w for the norms of models that multiply by (1 + w).
    adds_one_to_norms: bool = False

    def hugging_face_name(self, name: str) -> str | None:
        """The Hugging Face name of a tensor of this architecture; None where it has none."""
        stem, _, kind = name.rpartition(".")
        if stem in _OUTSIDE_LAYERS and kind in _KINDS:
            return f"{_OUTSIDE_LAYERS[stem]}.{kind}"
        layer, part, kind = _place(name)
        if layer is None or kind not in _KINDS:
            return None
        whole = self.whole_names.get(f"{part}.{kind}")
        if whole is not None:
            return f"model.layers.{layer}.{whole}"
        own = part if part.startswith(_GUESSES) else self.layer_names.get(part)
        return None if own is None else f"model.layers.{layer}.{own}.{kind}"

    def expert_name(self, name: str, expert: int) -> str | None:
        """The Hugging Face name of one expert's matrix of a tensor; None if it is not a tensor of such."""
        layer, part, kind = _place(name)
        if layer is None or kind != "weight" or part not in self.expert_names:
            return None
        return f"model.layers.{layer}.{self.expert_names[part].format(expert)}.weight"


def _place(name: str) -> tuple[str | None, str, str]:
    """The number of a tensor's layer, None outside of them; its part of the layer; and its kind."""
    stem, _, kind = name.rpartition(".")
    prefix, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    return (layer if prefix == "blk" and layer.isdecimal() else None), part, kind


ARCHITECTURES = {
    "llama": GGUFArchitecture("llama", _DECODER, interleaves_heads=True),
    "qwen2": GGUFArchitecture("qwen2", _DECODER),
    "qwen3": GGUFArchitecture("qwen3", _DECODER | _HEAD_NORMS),
    "qwen3moe": GGUFArchitecture("qwen3_moe", _DECODER | _HEAD_NORMS | _ROUTER, _EXPERTS),
    "gemma2": GGUFArchitecture("gemma2", _DECODER | _SANDWICH, adds_one_to_norms=True),
    "gemma3": GGUFArchitecture("gemma3_text", _DECODER | _SANDWICH | _HEAD_NORMS, adds_one_to_norms=True),
    "glm4moe": GGUFArchitecture(
        "glm4_moe",
        _DECODER | _HEAD_NORMS | _ROUTER | _SHARED_EXPERTS | _SECOND_NORM,
        _EXPERTS,
        _ROUTER_BIAS,
    ),
    # The type is `deepseek_v3` where scores of experts are sigmoids.
    "deepseek2": GGUFArchitecture(
        "deepseek_v2", _DECODER | _LATENT_ATTENTION | _ROUTER | _SHARED_EXPERTS, _EXPERTS, _ROUTER_BIAS
    ),
    "gpt-oss": GGUFArchitecture(
        "gpt_oss", _DECODER | _SECOND_NORM | {"ffn_gate_inp": "mlp.router"}, _EXPERTS, _GPT_OSS
    ),
}
# Of the architecture "llama" with experts.
MIXTRAL = GGUFArchitecture(
    "mixtral", _DECODER | {"ffn_gate_inp": "block_sparse_moe.gate"}, _MIXTRAL_EXPERTS, interleaves_heads=True
)
