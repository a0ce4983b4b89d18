"""gpt-oss: attention sinks, windows in every second layer, experts with biases and a clamped gate."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from quire.models.fields import Fields
from quire.models.params import Array, Param, Tensor
from quire.models.parts.decoder import Decoder, DecoderLayer
from quire.models.parts.feed_forward import Experts
from quire.models.parts.norm import RMSNorm
from quire.models.parts.projection import experts_down, experts_gate_up, router
from quire.models.parts.rope import read_rope
from quire.models.parts.routing import BiasedRouter
from quire.models.parts.standard import Sizes, attention, decoder, read_expert_counts, read_layer_types, read_sizes
from quire.ops.gates import ClampedGate

# Of configs that name no rope.
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def gpt_oss(fields: Fields) -> Decoder:
    sizes = read_sizes(fields, num_key_value_heads=8, head_dim=64)
    mlp = fields.integer("intermediate_size")
    eps = fields.number("rms_norm_eps", 1e-5)
    biased = fields.flag("attention_bias", True)
    fields.only("hidden_act", "silu")
    gate = ClampedGate(fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0))
    count, chosen = read_expert_counts(fields, sizes, default_experts=128, default_chosen=4)
    is_mxfp4 = fields.within("quantization_config").get("quant_method") == "mxfp4"
    has_rope = fields.get("rope_scaling") or fields.get("rope_parameters")
    parameters = None if has_rope else Fields(_YARN, fields.family, "rope_parameters.")
    rope = read_rope(fields, sizes.head_dim, default_theta=150_000.0, parameters=parameters)
    window = fields.integer("sliding_window", 128)
    slides = read_layer_types(fields, sizes, lambda index: index % 2 == 0)

    def layer(index: int, name: str) -> DecoderLayer:
        return DecoderLayer(
            before_attention=RMSNorm(f"{name}.input_layernorm", sizes.embed, eps),
            attention=attention(
                f"{name}.self_attn",
                sizes,
                sizes.attention(window=window if slides[index] else None, has_sinks=True),
                rope=rope,
                qkv_bias=biased,
                out_bias=biased,
            ),
            before_feed_forward=RMSNorm(f"{name}.post_attention_layernorm", sizes.embed, eps),
            feed_forward=_experts(
                f"{name}.mlp.experts",
                sizes,
                mlp,
                gate,
                BiasedRouter(
                    chosen,
                    router(f"{name}.mlp.router.weight", count, sizes.embed),
                    Param((count,), (None,), (Tensor(f"{name}.mlp.router.bias", (count,)),)),
                ),
                is_mxfp4=is_mxfp4,
            ),
        )

    return decoder(fields, sizes, layer, RMSNorm("model.norm", sizes.embed, eps), max_positions=rope.max_positions)


def _experts(name: str, sizes: Sizes, mlp: int, gate: ClampedGate, router: BiasedRouter, *, is_mxfp4: bool) -> Experts:
    """All experts of a layer are one tensor. A gate and its up are neighbours among the outputs. GGUF files have gates
    and ups apart, and each expert by itself."""
    count, embed = router.weight.shape
    gate_up_bias = Tensor(f"{name}.gate_up_proj_bias", (count, 2 * mlp))
    down_bias = Tensor(f"{name}.down_proj_bias", (count, embed))

    names = [f"{name}.{index}" for index in range(count)]
    pairs = [(f"{one}.gate_proj.weight", f"{one}.up_proj.weight") for one in names]
    biases = tuple(Tensor(f"{name}.{part}_proj_bias", (count, mlp)) for part in ("gate", "up"))

    def apart(rows: Array) -> Array:
        """[e, 1, 2, m, ...] of rows [e, 2 m, ...]."""
        return np.moveaxis(rows.reshape(count, 1, mlp, 2, *rows.shape[2:]), 3, 2)

    def matrices(tensors: Sequence[Array], outputs: int) -> Array:
        """[e, outputs, inputs]; codes and scales of four bits are rows of outputs already, others of inputs."""
        return tensors[0].reshape(count, outputs, -1) if is_mxfp4 else np.swapaxes(tensors[0], 1, 2)

    def stored(part: str, outputs: int, inputs: int) -> tuple[Tensor]:
        shape = (count * outputs, inputs) if is_mxfp4 else (count, inputs, outputs)
        return (Tensor(f"{name}.{part}", shape),)

    return Experts(
        gate,
        router,
        gate_up=Param(
            (count, 1, 2, mlp, embed),
            ("experts", "mlp", None, None, "embed"),
            stored("gate_up_proj", 2 * mlp, embed),
            lambda tensors: apart(matrices(tensors, 2 * mlp)),
            transposes=not is_mxfp4,
            apart=experts_gate_up(pairs, (mlp, embed)),
        ),
        down=Param(
            (count, embed, mlp),
            ("experts", "embed", "mlp"),
            stored("down_proj", embed, mlp),
            lambda tensors: matrices(tensors, embed),
            transposes=not is_mxfp4,
            apart=experts_down([f"{one}.down_proj.weight" for one in names], (embed, mlp)),
        ),
        gate_up_bias=Param(
            (count, 1, 2, mlp),
            (None, "mlp", None, None),
            (gate_up_bias,),
            lambda tensors: apart(tensors[0]),
            apart=Param((count, 1, 2, mlp), (None, "mlp", None, None), biases, partial(np.stack, axis=1)),
        ),
        down_bias=Param((count, embed), (None, "embed"), (down_bias,)),
    )
