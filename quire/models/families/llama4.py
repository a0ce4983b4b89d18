"""Llama 4, its text part: layers that see a chunk, layers without rope, and experts beside a shared one."""

import numpy as np

from quire.models.families.gemma3 import text_name
from quire.models.families.smollm3 import read_rotated_layers
from quire.models.fields import Fields
from quire.models.params import Param, Tensor
from quire.models.parts.decoder import Decoder, DecoderLayer
from quire.models.parts.feed_forward import Activation, Experts, FeedForward, SharedExperts, read_activation
from quire.models.parts.norm import PlainHeadNorm, RMSNorm
from quire.models.parts.projection import router
from quire.models.parts.rope import Rope, read_rope
from quire.models.parts.routing import SigmoidRouter
from quire.models.parts.standard import Sizes, attention, decoder, experts, gated_mlp, read_expert_counts, read_sizes
from quire.models.parts.temperature import QueryTemperature
from quire.ops.gates import PlainGate

# Of the config class, which files may leave out.
_SIZES = {
    "vocab_size": 202_048,
    "hidden_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def llama4(fields: Fields) -> Decoder:
    sizes = read_sizes(fields, **_SIZES)
    mlp, dense_mlp = fields.integer("intermediate_size", 8192), fields.integer("intermediate_size_mlp", 16384)
    eps = fields.number("rms_norm_eps", 1e-5)
    biased = fields.flag("attention_bias", False)
    activation = read_activation(fields)
    count, chosen = read_expert_counts(fields, sizes, default_experts=16, default_chosen=1)
    rotates, moe_layers = read_rotated_layers(fields, sizes), _read_moe_layers(fields, sizes)
    chunks = _read_chunks(fields, sizes, rotates)
    rope = read_rope(fields, sizes.head_dim, default_theta=500_000.0)
    head_norm = _read_head_norm(fields, sizes, rope, eps)
    temperature = _read_temperature(fields)

    def feed_forward(index: int, name: str) -> FeedForward:
        if index not in moe_layers:
            return gated_mlp(name, sizes, dense_mlp, activation)
        choice = SigmoidRouter(chosen, router(f"{name}.router.weight", count, sizes.embed))
        return SharedExperts(
            _experts(f"{name}.experts", sizes, mlp, count, activation, choice),
            gated_mlp(f"{name}.shared_expert", sizes, mlp, activation),
        )

    def layer(index: int, name: str) -> DecoderLayer:
        return DecoderLayer(
            before_attention=RMSNorm(f"{name}.input_layernorm", sizes.embed, eps),
            attention=attention(
                f"{name}.self_attn",
                sizes,
                sizes.attention(chunk=chunks[index]),
                rope=rope if rotates[index] else temperature,
                qkv_bias=biased,
                out_bias=biased,
                q_norm=head_norm if rotates[index] else None,
                k_norm=head_norm if rotates[index] else None,
                rotates_pairs=True,
            ),
            before_feed_forward=RMSNorm(f"{name}.post_attention_layernorm", sizes.embed, eps),
            feed_forward=feed_forward(index, f"{name}.feed_forward"),
        )

    norm = RMSNorm("model.norm", sizes.embed, eps)
    return decoder(fields, sizes, layer, norm, max_positions=rope.max_positions, rename=text_name)


def _read_chunks(fields: Fields, sizes: Sizes, rotates: list[bool]) -> list[int | None]:
    """The chunk of each layer; by default layers with rope have one."""
    kinds = {"chunked_attention": True, "full_attention": False}
    is_chunked = rotates
    if "layer_types" in fields:
        types = fields.texts("layer_types", sizes.layers)
        if not set(types) <= set(kinds):
            raise fields.unsupported("layer_types", f"known types are {', '.join(kinds)}")
        is_chunked = [kinds[kind] for kind in types]
    if fields.is_null("attention_chunk_size"):
        raise fields.unsupported("attention_chunk_size", "a number of positions is needed")
    chunk = fields.integer("attention_chunk_size", 8192)
    return [chunk if one else None for one in is_chunked]


def _read_temperature(fields: Fields) -> QueryTemperature | None:
    """The temperature of layers without rope. Some files have a number of layers in place of true."""
    tuned = fields.get("attn_temperature_tuning")
    if type(tuned) is not int:
        tuned = fields.flag("attn_temperature_tuning", True)
    return QueryTemperature(fields.integer("floor_scale", 8192), fields.number("attn_scale", 0.1)) if tuned else None


def _read_moe_layers(fields: Fields, sizes: Sizes) -> set[int]:
    """The layers with experts."""
    if "moe_layers" in fields:
        found = set(fields.integers("moe_layers"))
        if outside := sorted(index for index in found if not 0 <= index < sizes.layers):
            raise fields.invalid("moe_layers", f"there is no layer {outside[0]}; the last one is {sizes.layers - 1}")
        return found
    step = fields.integer("interleave_moe_layer_step", 1)
    return set(range(step - 1, sizes.layers, step))


def _read_head_norm(fields: Fields, sizes: Sizes, rope: Rope, eps: float) -> PlainHeadNorm | None:
    """The norm of queries and keys. In checkpoints it comes after the rotation, which leaves the size of heads as it is
    if it scales none: then before it is the same."""
    if not fields.flag("use_qk_norm", True):
        return None
    if rope.feature_scale != 1.0:
        raise fields.unsupported("rope_scaling", "with use_qk_norm a rope must not scale heads")
    return PlainHeadNorm(sizes.head_dim, eps)


def _experts(name: str, sizes: Sizes, mlp: int, count: int, activation: Activation, choice: SigmoidRouter) -> Experts:
    """All experts of a layer are one tensor, of rows of inputs: gates come first among the outputs, then ups. Tools
    that quantise store each expert on its own, as other families do."""
    both, down = Tensor(f"{name}.gate_up_proj", (count, sizes.embed, 2 * mlp)), (count, mlp, sizes.embed)
    apart = experts(name, sizes, mlp, count, activation, choice)
    return Experts(
        PlainGate(activation),
        choice,
        gate_up=Param(
            (count, 1, 2, mlp, sizes.embed),
            ("experts", "mlp", None, None, "embed"),
            (both,),
            lambda tensors: np.swapaxes(tensors[0], 1, 2),
            transposes=True,
            apart=apart.gate_up,
        ),
        down=Param(
            (count, sizes.embed, mlp),
            ("experts", "embed", "mlp"),
            (Tensor(f"{name}.down_proj", down),),
            lambda tensors: np.swapaxes(tensors[0], 1, 2),
            transposes=True,
            apart=apart.down,
        ),
        scales_inputs=True,
    )
