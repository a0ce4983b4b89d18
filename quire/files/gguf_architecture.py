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
_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_KINDS = ("weight", "bias")
_OUTSIDE_LAYERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True)
class GGUFArchitecture:
    model_type: str
    layer_names: dict[str, str]
    # Tensors with a matrix for each expert, which Hugging Face checkpoints store one by one: its number is put in.
    expert_names: dict[str, str] = field(default_factory=dict)
    # llama.cpp rotates neighbouring pairs of a head, Hugging Face its two halves; the converter reorders the rows.
    interleaves_heads: bool = False
    # The converter stores 1 + w for the norms of models that multiply by (1 + w).
    adds_one_to_norms: bool = False

    def hugging_face_name(self, name: str) -> str | None:
        """The Hugging Face name of a tensor of this architecture; None where it has none."""
        stem, _, kind = name.rpartition(".")
        if stem in _OUTSIDE_LAYERS and kind in _KINDS:
            return f"{_OUTSIDE_LAYERS[stem]}.{kind}"
        return _name_in_layer(name, self.layer_names)

    def expert_name(self, name: str, expert: int) -> str | None:
        """The Hugging Face name of one expert's matrix of a tensor; None if it is not a tensor of experts."""
        template = _name_in_layer(name, self.expert_names)
        return None if template is None else template.format(expert)


def _name_in_layer(name: str, names: dict[str, str]) -> str | None:
    stem, _, kind = name.rpartition(".")
    prefix, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if kind not in _KINDS or prefix != "blk" or not layer.isdecimal() or part not in names:
        return None
    return f"model.layers.{layer}.{names[part]}.{kind}"


ARCHITECTURES = {
    "llama": GGUFArchitecture("llama", _DECODER, interleaves_heads=True),
    "qwen2": GGUFArchitecture("qwen2", _DECODER),
    "qwen3": GGUFArchitecture("qwen3", _DECODER | _HEAD_NORMS),
    "qwen3moe": GGUFArchitecture("qwen3_moe", _DECODER | _HEAD_NORMS | {"ffn_gate_inp": "mlp.gate"}, _EXPERTS),
    "gemma2": GGUFArchitecture("gemma2", _DECODER | _SANDWICH, adds_one_to_norms=True),
    "gemma3": GGUFArchitecture("gemma3_text", _DECODER | _SANDWICH | _HEAD_NORMS, adds_one_to_norms=True),
}
