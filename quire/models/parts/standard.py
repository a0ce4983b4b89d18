"""Parts that most families share, with the checkpoint names of `LlamaForCausalLM`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quire.models.field_ranges import MAX_LAYER_EXPERTS
from quire.models.fields import Fields
from quire.models.params import Param, Tensor
from quire.models.parts.attention import Attention
from quire.models.parts.decoder import Decoder, DecoderLayer
from quire.models.parts.feed_forward import Activation, Experts, GatedMLP
from quire.models.parts.norm import HeadNorms, Norm
from quire.models.parts.projection import (
    attention_out,
    bias,
    experts_down,
    experts_gate_up,
    gate_up,
    separate_qkv,
    separate_qkv_bias,
)
from quire.models.parts.rope import Rope
from quire.models.parts.routing import Router
from quire.models.parts.temperature import QueryTemperature
from quire.ops.attention.spec import AttentionSpec
from quire.ops.gates import PlainGate

HEAD_NAME = "lm_head.weight"


@dataclass(frozen=True)
class Sizes:
    """`group` query heads share each of `kv_heads` keys and values."""

    vocab: int
    embed: int
    layers: int
    kv_heads: int
    group: int
    head_dim: int

    def attention(
        self,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        has_sinks: bool = False,
        chunk: int | None = None,
    ) -> AttentionSpec:
        scale = self.head_dim**-0.5 if scale is None else scale
        return AttentionSpec(self.kv_heads, self.group, self.head_dim, scale, window, softcap, has_sinks, chunk=chunk)


def read_sizes(fields: Fields, **defaults: int) -> Sizes:
    """`defaults` are the values of the family's config class for fields that files may leave out."""
    embed = fields.integer("hidden_size", defaults.get("hidden_size"))
    heads = fields.integer("num_attention_heads", defaults.get("num_attention_heads"))
    kv_heads = fields.integer("num_key_value_heads", defaults.get("num_key_value_heads", heads))
    if heads % kv_heads:
        raise fields.invalid("num_key_value_heads", f"it does not divide num_attention_heads = {heads}")
    head_dim = fields.optional_integer("head_dim", defaults.get("head_dim"))
    if head_dim is None:
        if embed % heads:
            raise fields.invalid("num_attention_heads", f"it does not divide hidden_size = {embed}")
        head_dim = embed // heads
    return Sizes(
        vocab=fields.integer("vocab_size", defaults.get("vocab_size")),
        embed=embed,
        layers=fields.integer("num_hidden_layers", defaults.get("num_hidden_layers")),
        kv_heads=kv_heads,
        group=heads // kv_heads,
        head_dim=head_dim,
    )


def read_layer_types(fields: Fields, sizes: Sizes, default: Callable[[int], bool]) -> list[bool]:
    """For each layer, True if it has a sliding window; `default` answers for configs that do not list their layers."""
    if "layer_types" not in fields:
        return [default(i) for i in range(sizes.layers)]
    kinds = {"sliding_attention": True, "full_attention": False}
    types = fields.texts("layer_types", sizes.layers)
    if not set(types) <= set(kinds):
        raise fields.unsupported("layer_types", f"known types are {', '.join(kinds)}")
    return [kinds[kind] for kind in types]


def read_recurrent_layers(fields: Fields, sizes: Sizes, default: Callable[[int], bool]) -> list[bool]:
    """For each layer, True if it is recurrent; `default` answers for configs that do not list their layers."""
    if "layer_types" not in fields:
        found = [default(index) for index in range(sizes.layers)]
    else:
        kinds = {"linear_attention": True, "mamba": True, "full_attention": False, "attention": False}
        types = fields.texts("layer_types", sizes.layers)
        if not set(types) <= set(kinds):
            raise fields.unsupported("layer_types", f"known types are {', '.join(kinds)}")
        found = [kinds[kind] for kind in types]
    if all(found):
        raise fields.unsupported("layer_types", "at least one layer must have attention")
    return found


def read_windows(fields: Fields, sizes: Sizes) -> list[int | None]:
    """The window of each layer, for configs with `use_sliding_window`: the first `max_window_layers` have none."""
    windowed = fields.flag("use_sliding_window", False)
    full = fields.whole("max_window_layers", 28)
    slides = read_layer_types(fields, sizes, lambda index: windowed and index >= full)
    if any(slides) and not windowed:
        raise fields.invalid("layer_types", "there are sliding layers, but use_sliding_window is false")
    window = fields.integer("sliding_window", 4096)
    return [window if slides[index] else None for index in range(sizes.layers)]


def read_expert_counts(fields: Fields, sizes: Sizes, default_experts: int, default_chosen: int) -> tuple[int, int]:
    """The number of experts, under any of its names, and how many of them each token visits."""
    name = next((one for one in ("num_experts", "n_routed_experts") if one in fields), "num_local_experts")
    num_experts = fields.integer(name, default_experts)
    if num_experts * sizes.layers > MAX_LAYER_EXPERTS:
        most = f"{sizes.layers} layers may have {MAX_LAYER_EXPERTS} experts together"
        raise fields.invalid(name, most, num_experts)
    chosen = fields.integer("num_experts_per_tok", default_chosen)
    if chosen > num_experts:
        raise fields.invalid("num_experts_per_tok", f"there are {num_experts} experts")
    return num_experts, chosen


def attention(
    name: str,
    sizes: Sizes,
    spec: AttentionSpec,
    *,
    rope: Rope | QueryTemperature | None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    q_norm: HeadNorms | None = None,
    k_norm: HeadNorms | None = None,
    rotates_pairs: bool = False,
    is_gated: bool = False,
) -> Attention:
    """`rotates_pairs`: the checkpoint's rope turns neighbouring features, not those half a head apart. `is_gated`: in
    `q_proj` each query is followed by its gate."""
    num_paired = rope.num_rotated if rotates_pairs and isinstance(rope, Rope) else 0
    sinks = Tensor(f"{name}.sinks", (spec.kv_heads * spec.group,))
    stored = replace(spec, group=2 * spec.group) if is_gated else spec
    return Attention(
        spec,
        qkv=separate_qkv(name, stored, sizes.embed, num_paired),
        out=attention_out(name, spec, sizes.embed),
        qkv_bias=separate_qkv_bias(name, stored, num_paired) if qkv_bias else None,
        out_bias=bias(f"{name}.o_proj.bias", sizes.embed, "embed") if out_bias else None,
        rope=rope,
        q_norm=q_norm,
        k_norm=k_norm,
        sinks=Param((spec.kv_heads, spec.group), ("kv_heads", None), (sinks,)) if spec.has_sinks else None,
        is_gated=is_gated,
    )


def gated_mlp(name: str, sizes: Sizes, mlp: int, activation: Activation, *, biased: bool = False) -> GatedMLP:
    gate_up_bias = down_bias = None
    if biased:
        sources = tuple(Tensor(f"{name}.{part}_proj.bias", (mlp,)) for part in ("gate", "up"))
        gate_up_bias = Param((1, 2, mlp), ("mlp", None, None), sources, np.stack)
        down_bias = bias(f"{name}.down_proj.bias", sizes.embed, "embed")
    return GatedMLP(
        activation,
        gate_up=gate_up(f"{name}.gate_proj.weight", f"{name}.up_proj.weight", (mlp, sizes.embed)),
        down=mlp_down(f"{name}.down_proj.weight", sizes, mlp),
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )


def fused_gated_mlp(name: str, sizes: Sizes, mlp: int, activation: Activation) -> GatedMLP:
    """Gate and up are one tensor, `gate_up_proj`."""
    both = Tensor(f"{name}.gate_up_proj.weight", (2 * mlp, sizes.embed))
    return GatedMLP(
        activation,
        gate_up=Param((1, 2, mlp, sizes.embed), ("mlp", None, None, "embed"), (both,), num_contracted=1),
        down=mlp_down(f"{name}.down_proj.weight", sizes, mlp),
    )


def experts(name: str, sizes: Sizes, mlp: int, count: int, activation: Activation, router: Router) -> Experts:
    names = [f"{name}.{index}" for index in range(count)]
    return Experts(
        PlainGate(activation),
        router,
        gate_up=experts_gate_up(
            [(f"{one}.gate_proj.weight", f"{one}.up_proj.weight") for one in names], (mlp, sizes.embed)
        ),
        down=experts_down([f"{one}.down_proj.weight" for one in names], (sizes.embed, mlp)),
    )


def mlp_down(name: str, sizes: Sizes, mlp: int) -> Param:
    shape = (sizes.embed, mlp)
    return Param(shape, ("embed", "mlp"), (Tensor(name, shape),), num_contracted=1)


def decoder(
    fields: Fields,
    sizes: Sizes,
    layer: Callable[[int, str], DecoderLayer],
    norm: Norm,
    *,
    max_positions: int,
    tied: bool = False,
    rename: Callable[[str], str | None] = lambda name: name,
    **scalars: Any,
) -> Decoder:
    """`layer` makes a layer from its index and name. `tied` is the default of the family's config class."""
    tied = fields.flag("tie_word_embeddings", tied)
    return Decoder(
        embedding=vocabulary("model.embed_tokens.weight", sizes),
        blocks=tuple(layer(index, f"model.layers.{index}") for index in range(sizes.layers)),
        norm=norm,
        max_positions=max_positions,
        rename=lambda name: used_name(rename(name), tied),
        head=None if tied else vocabulary(HEAD_NAME, sizes),
        **scalars,
    )


def vocabulary(name: str, sizes: Sizes) -> Param:
    shape = (sizes.vocab, sizes.embed)
    return Param(shape, ("vocab", "embed"), (Tensor(name, shape),), num_contracted=1)


def used_name(name: str | None, tied: bool) -> str | None:
    """None for a tensor that some checkpoints store although it follows from the config or from other tensors."""
    if name is None or name.endswith(".rotary_emb.inv_freq") or (tied and name == HEAD_NAME):
        return None
    return name
