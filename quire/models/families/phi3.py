"""Phi-3 and Phi-4: llama with fused projections, and a rope with frequencies for short and for long sequences."""

from collections.abc import Sequence

from quire.models.fields import Fields
from quire.models.params import Array, Param, Tensor
from quire.models.parts.attention import Attention
from quire.models.parts.decoder import Decoder, DecoderLayer
from quire.models.parts.feed_forward import read_activation
from quire.models.parts.norm import RMSNorm
from quire.models.parts.projection import attention_out, join_qkv, split_qkv
from quire.models.parts.rope import read_rope
from quire.models.parts.standard import Sizes, decoder, fused_gated_mlp, read_sizes
from quire.ops.attention.spec import AttentionSpec


def phi3(fields: Fields) -> Decoder:
    fields.only("attention_bias", False)
    sizes = read_sizes(fields)
    mlp = fields.integer("intermediate_size")
    eps = fields.number("rms_norm_eps", 1e-5)
    activation = read_activation(fields)
    spec = sizes.attention(window=fields.optional_integer("sliding_window"))
    rope = read_rope(fields, sizes.head_dim, partial=True, renamed={"su": "longrope", "yarn": "longrope"})

    def layer(index: int, name: str) -> DecoderLayer:
        return DecoderLayer(
            before_attention=RMSNorm(f"{name}.input_layernorm", sizes.embed, eps),
            attention=Attention(
                spec,
                qkv=_qkv(f"{name}.self_attn.qkv_proj.weight", spec, sizes),
                out=attention_out(f"{name}.self_attn", spec, sizes.embed),
                rope=rope,
            ),
            before_feed_forward=RMSNorm(f"{name}.post_attention_layernorm", sizes.embed, eps),
            feed_forward=fused_gated_mlp(f"{name}.mlp", sizes, mlp, activation),
        )

    return decoder(fields, sizes, layer, RMSNorm("model.norm", sizes.embed, eps), max_positions=rope.max_positions)


def _qkv(name: str, spec: AttentionSpec, sizes: Sizes) -> Param:
    parts = spec.group + 2

    def join(tensors: Sequence[Array]) -> Array:
        return join_qkv(spec, split_qkv(spec, tensors[0]))

    return Param(
        (spec.kv_heads, parts, spec.head_dim, sizes.embed),
        ("kv_heads", None, None, "embed"),
        (Tensor(name, (spec.kv_heads * parts * spec.head_dim, sizes.embed)),),
        join,
        num_contracted=1,
    )
