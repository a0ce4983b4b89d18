"""Mixtral: mistral with experts in place of the feed-forward block."""

from quire.models.fields import Fields
from quire.models.parts.decoder import Decoder, DecoderLayer
from quire.models.parts.feed_forward import Experts, read_activation
from quire.models.parts.norm import RMSNorm
from quire.models.parts.projection import experts_down, experts_gate_up, router
from quire.models.parts.rope import read_rope
from quire.models.parts.routing import SoftmaxRouter
from quire.models.parts.standard import attention, decoder, read_expert_counts, read_sizes
from quire.ops.gates import PlainGate


def mixtral(fields: Fields) -> Decoder:
    sizes = read_sizes(fields, num_key_value_heads=8)
    mlp = fields.integer("intermediate_size")
    eps = fields.number("rms_norm_eps", 1e-5)
    activation = read_activation(fields)
    num_experts, chosen = read_expert_counts(fields, sizes, default_experts=8, default_chosen=2)
    spec = sizes.attention(window=fields.optional_integer("sliding_window"))
    rope = read_rope(fields, sizes.head_dim, default_theta=1_000_000.0)

    def layer(index: int, name: str) -> DecoderLayer:
        experts = [f"{name}.block_sparse_moe.experts.{expert}" for expert in range(num_experts)]
        return DecoderLayer(
            before_attention=RMSNorm(f"{name}.input_layernorm", sizes.embed, eps),
            attention=attention(f"{name}.self_attn", sizes, spec, rope=rope),
            before_feed_forward=RMSNorm(f"{name}.post_attention_layernorm", sizes.embed, eps),
            feed_forward=Experts(
                PlainGate(activation),
                SoftmaxRouter(chosen, True, router(f"{name}.block_sparse_moe.gate.weight", num_experts, sizes.embed)),
                gate_up=experts_gate_up([(f"{e}.w1.weight", f"{e}.w3.weight") for e in experts], (mlp, sizes.embed)),
                down=experts_down([f"{e}.w2.weight" for e in experts], (sizes.embed, mlp)),
            ),
        )

    return decoder(fields, sizes, layer, RMSNorm("model.norm", sizes.embed, eps), max_positions=rope.max_positions)
