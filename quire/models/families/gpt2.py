"""GPT-2: learned positions, layer norms, biases everywhere, and weights stored [in, out]."""

import math
from collections.abc import Sequence

from quire.models.fields import Fields
from quire.models.params import Array, Param, Tensor
from quire.models.parts.attention import Attention
from quire.models.parts.decoder import Decoder, DecoderLayer
from quire.models.parts.feed_forward import MLP, read_activation
from quire.models.parts.norm import LayerNorm
from quire.models.parts.projection import bias, join_qkv, split_qkv
from quire.models.parts.standard import Sizes, used_name, vocabulary
from quire.ops.attention.spec import AttentionSpec


def gpt2(fields: Fields) -> Decoder:
    embed = fields.integer("n_embd", 768)
    heads = fields.integer("n_head", 12)
    if embed % heads:
        raise fields.invalid("n_head", f"it does not divide n_embd = {embed}")
    sizes = Sizes(
        vocab=fields.integer("vocab_size"),
        embed=embed,
        layers=fields.integer("n_layer", 12),
        kv_heads=heads,
        group=1,
        head_dim=embed // heads,
    )
    mlp = fields.integer("n_inner", 4 * embed)
    positions = fields.integer("n_positions", 1024)
    eps = fields.number("layer_norm_epsilon", 1e-5)
    activation = read_activation(fields, "activation_function", "gelu_new")
    scale = sizes.head_dim**-0.5 if fields.flag("scale_attn_weights", True) else 1.0
    divided = fields.flag("scale_attn_by_inverse_layer_idx", False)
    tied = fields.flag("tie_word_embeddings", True)

    def layer(index: int) -> DecoderLayer:
        name = f"transformer.h.{index}"
        spec = sizes.attention(scale=scale / (index + 1) if divided else scale)
        return DecoderLayer(
            before_attention=LayerNorm(f"{name}.ln_1", embed, eps),
            attention=Attention(
                spec,
                qkv=_qkv(f"{name}.attn.c_attn.weight", spec, embed),
                qkv_bias=_qkv_bias(f"{name}.attn.c_attn.bias", spec),
                out=_transposed(
                    f"{name}.attn.c_proj.weight",
                    (embed, heads, 1, sizes.head_dim),
                    ("embed", "kv_heads", None, None),
                ),
                out_bias=bias(f"{name}.attn.c_proj.bias", embed, "embed"),
            ),
            before_feed_forward=LayerNorm(f"{name}.ln_2", embed, eps),
            feed_forward=MLP(
                activation,
                up=_transposed(f"{name}.mlp.c_fc.weight", (mlp, embed), ("mlp", "embed")),
                up_bias=bias(f"{name}.mlp.c_fc.bias", mlp, "mlp"),
                down=_transposed(f"{name}.mlp.c_proj.weight", (embed, mlp), ("embed", "mlp")),
                down_bias=bias(f"{name}.mlp.c_proj.bias", embed, "embed"),
            ),
        )

    return Decoder(
        embedding=vocabulary("transformer.wte.weight", sizes),
        position_embedding=Param(
            (positions, embed), (None, "embed"), (Tensor("transformer.wpe.weight", (positions, embed)),)
        ),
        blocks=tuple(layer(i) for i in range(sizes.layers)),
        norm=LayerNorm("transformer.ln_f", embed, eps),
        max_positions=positions,
        rename=lambda name: used_name(_full_name(name), tied),
        head=None if tied else vocabulary("lm_head.weight", sizes),
    )


def _full_name(name: str) -> str | None:
    """Some files leave the outer name out, and some hold the causal mask of each layer."""
    if name.endswith((".attn.bias", ".attn.masked_bias")):
        return None
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


def _transposed(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Param:
    """A weight [outputs, inputs] that is stored as [inputs, outputs]."""
    source = Tensor(name, (math.prod(shape[1:]), shape[0]))
    return Param(shape, axes, (source,), lambda tensors: tensors[0].T, num_contracted=len(shape) - 1, transposes=True)


def _qkv(name: str, spec: AttentionSpec, embed: int) -> Param:
    def join(tensors: Sequence[Array]) -> Array:
        return join_qkv(spec, split_qkv(spec, tensors[0].T))

    return Param(
        (spec.kv_heads, 3, spec.head_dim, embed),
        ("kv_heads", None, None, "embed"),
        (Tensor(name, (embed, 3 * embed)),),
        join,
        num_contracted=1,
        transposes=True,
    )


def _qkv_bias(name: str, spec: AttentionSpec) -> Param:
    def join(tensors: Sequence[Array]) -> Array:
        return join_qkv(spec, split_qkv(spec, tensors[0]))

    size = 3 * spec.kv_heads * spec.head_dim
    return Param((spec.kv_heads, 3, spec.head_dim), ("kv_heads", None, None), (Tensor(name, (size,)),), join)
