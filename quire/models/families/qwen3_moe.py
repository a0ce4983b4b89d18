"""Qwen3 MoE: qwen3 with experts in most layers."""

from quire.models.fields import Fields
from quire.models.parts.decoder import Decoder, DecoderLayer
from quire.models.parts.feed_forward import FeedForward, read_activation
from quire.models.parts.norm import RMSNorm
from quire.models.parts.projection import router
from quire.models.parts.rope import read_rope
from quire.models.parts.routing import SoftmaxRouter
from quire.models.parts.standard import attention, decoder, experts, gated_mlp, read_expert_counts, read_sizes


def qwen3_moe(fields: Fields) -> Decoder:
    sizes = read_sizes(fields, num_key_value_heads=4)
    eps = fields.number("rms_norm_eps", 1e-6)
    biased = fields.flag("attention_bias", False)
    activation = read_activation(fields)
    num_experts, chosen = read_expert_counts(fields, sizes, default_experts=128, default_chosen=8)
    normalised = fields.flag("norm_topk_prob", False)
    sparse_step = fields.integer("decoder_sparse_step", 1)
    dense_layers = fields.integers("mlp_only_layers") if "mlp_only_layers" in fields else []
    window = fields.integer("sliding_window", 4096) if fields.flag("use_sliding_window", False) else None
    rope = read_rope(fields, sizes.head_dim)

    def feed_forward(index: int, name: str) -> FeedForward:
        if index in dense_layers or (index + 1) % sparse_step:
            return gated_mlp(name, sizes, fields.integer("intermediate_size"), activation)
        mlp = fields.integer("moe_intermediate_size")
        choice = SoftmaxRouter(chosen, normalised, router(f"{name}.gate.weight", num_experts, sizes.embed))
        return experts(f"{name}.experts", sizes, mlp, num_experts, activation, choice)

    def layer(index: int, name: str) -> DecoderLayer:
        return DecoderLayer(
            before_attention=RMSNorm(f"{name}.input_layernorm", sizes.embed, eps),
            attention=attention(
                f"{name}.self_attn",
                sizes,
                sizes.attention(window=window),
                rope=rope,
                qkv_bias=biased,
                out_bias=biased,
                q_norm=RMSNorm(f"{name}.self_attn.q_norm", sizes.head_dim, eps),
                k_norm=RMSNorm(f"{name}.self_attn.k_norm", sizes.head_dim, eps),
            ),
            before_feed_forward=RMSNorm(f"{name}.post_attention_layernorm", sizes.embed, eps),
            feed_forward=feed_forward(index, f"{name}.mlp"),
        )

    return decoder(fields, sizes, layer, RMSNorm("model.norm", sizes.embed, eps), max_positions=rope.max_positions)
