"""The choice of a model by its config, and refusals of configs that Quire cannot run."""

from typing import Any

import pytest

from quire.errors import InvalidCheckpoint, UnsupportedModel
from quire.models.checkpoint import leaves
from quire.models.registry import build_model
from tests.models.cases import CASES, WINDOW


def names(config: dict[str, Any]) -> set[str]:
    return {tensor.name for param in leaves(build_model(config).params()) for tensor in param.sources}


@pytest.mark.parametrize("model_type", ["mamba", None, 7, ["llama"]])
def test_an_unknown_architecture_is_refused_by_name(model_type: Any) -> None:
    with pytest.raises(UnsupportedModel, match=r"model_type = .*known are .*llama") as refusal:
        build_model({**CASES["llama"], "model_type": model_type})
    assert repr(model_type) in str(refusal.value)


@pytest.mark.parametrize(
    ("case", "field", "value"),
    [
        ("llama", "architectures", ["LlamaForSequenceClassification"]),
        ("llama", "compression_config", {"quant_method": "sparseml"}),
        ("llama", "hidden_act", "xielu"),
        ("llama", "is_encoder_decoder", True),
        ("llama", "partial_rotary_factor", 0.5),
        ("gpt2", "add_cross_attention", True),
        ("gpt2", "activation_function", "quick_gelu"),
        ("gemma2", "use_bidirectional_attention", True),
        ("gemma3", "attn_logit_softcapping", 50.0),
        ("gemma3", "hidden_activation", "tanh"),
        ("qwen2", "is_causal", False),
        ("qwen2", "layer_types", ["full_attention", "linear_attention"]),
        ("mistral", "layer_types", ["full_attention", "full_attention"]),
        ("phi3", "attention_bias", True),
        ("qwen3_next", "layer_types", ["linear_attention"] * 4),
        ("qwen3_next", "hidden_act", "gelu"),
        ("llama4", "layer_types", ["sliding_attention"] * 4),
        ("llama4", "attention_chunk_size", None),
        ("granitemoehybrid", "mamba_proj_bias", True),
        ("granitemoehybrid", "mamba_d_head", 16),
        ("granitemoehybrid", "time_step_limit", [0.0, 0.1]),
    ],
)
def test_an_unsupported_option_is_refused_by_field_and_value(case: str, field: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        build_model({**CASES[case], field: value})
    assert f"{field} = {value!r}" in str(refusal.value)
    assert CASES[case]["model_type"] in str(refusal.value)


@pytest.mark.parametrize(
    ("rope", "field", "value"),
    [
        ({"rope_type": "proportional"}, "rope_scaling.rope_type", "proportional"),
        ({"type": "mrope", "factor": 2.0}, "rope_scaling.type", "mrope"),
        ({"rope_type": "default", "mrope_section": [1, 1]}, "rope_scaling.mrope_section", [1, 1]),
        ({"rope_type": "linear", "factor": 2.0, "short_mscale": 1.2}, "rope_scaling.short_mscale", 1.2),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "rope_scaling.partial_rotary_factor", 0.5),
    ],
)
def test_an_unknown_rope_is_refused_by_field_and_value(rope: dict[str, Any], field: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        build_model({**CASES["llama"], "rope_scaling": rope})
    assert f"{field} = {value!r}" in str(refusal.value)


@pytest.mark.parametrize("layer", [4, -1])
def test_a_layer_of_experts_that_the_model_does_not_have_is_refused_by_its_number(layer: int) -> None:
    with pytest.raises(
        InvalidCheckpoint, match=rf"moe_layers = \[1, {layer}\]: there is no layer {layer}; the last one is 3"
    ):
        build_model({**CASES["llama4"], "moe_layers": [1, layer]})


def test_a_rope_that_scales_heads_which_are_normalised_after_it_is_refused() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    with pytest.raises(UnsupportedModel, match=r"llama4_text: rope_scaling = .*with use_qk_norm a rope must not scale"):
        build_model({**CASES["llama4"], "rope_scaling": rope})


def test_options_within_a_nested_text_config_are_refused_by_their_path() -> None:
    nested = {"model_type": "gemma3", "text_config": {**CASES["gemma3"], "use_bidirectional_attention": True}}
    with pytest.raises(UnsupportedModel, match=r"gemma3: text_config\.use_bidirectional_attention = True"):
        build_model(nested)


@pytest.mark.parametrize(
    ("case", "field", "value", "problem"),
    [
        ("llama", "hidden_size", None, "hidden_size is missing"),
        ("llama", "vocab_size", "96", "vocab_size = '96'"),
        ("llama", "num_hidden_layers", 0, "num_hidden_layers = 0"),
        ("llama", "num_hidden_layers", True, "num_hidden_layers = True"),
        ("llama", "num_key_value_heads", 3, "num_key_value_heads = 3: .* = 4"),
        ("llama", "hidden_size", 34, "num_attention_heads = 4: .* = 34"),
        ("llama", "head_dim", 7, "head_dim = 7"),
        ("llama", "rms_norm_eps", "small", "rms_norm_eps = 'small'"),
        ("llama", "tie_word_embeddings", "yes", "tie_word_embeddings = 'yes'"),
        ("llama", "rope_scaling", {"rope_type": "linear"}, r"rope_scaling\.factor is missing"),
        ("llama", "rope_scaling", "linear", "rope_scaling = 'linear'"),
        (
            "phi3-long",
            "rope_scaling",
            {"type": "su", "short_factor": [1.0], "long_factor": [1.0]},
            "3 items are needed",
        ),
        ("qwen2", "layer_types", ["full_attention"], "2 items are needed, there are 1"),
        ("qwen2", "layer_types", ["full_attention", "sliding_attention"], "use_sliding_window is false"),
        ("smollm3", "layer_types", ["full_attention", "sliding_attention"] * 2, "there are sliding layers, but no"),
        ("qwen3_moe", "num_experts_per_tok", 7, "num_experts_per_tok = 7: there are 6"),
        ("qwen3_next", "linear_num_key_heads", 3, "linear_num_key_heads = 3: .* = 4"),
        ("granitemoehybrid", "mamba_n_heads", 7, "mamba_n_heads = 7: .* = 64"),
        ("granitemoehybrid", "mamba_n_groups", 3, "mamba_n_groups = 3: .* = 8"),
        ("gpt2", "n_head", 5, "n_head = 5: .* = 32"),
    ],
)
def test_a_config_that_makes_no_sense_is_reported_by_field(case: str, field: str, value: Any, problem: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=problem):
        build_model({**CASES[case], field: value})


def test_the_text_part_of_a_nested_config_is_the_model() -> None:
    nested = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": CASES["gemma3"],
    }
    assert names(nested) == names(CASES["gemma3"])
    assert build_model(nested).layers == build_model(CASES["gemma3"]).layers


def test_a_sparse_nested_config_takes_the_values_of_its_family() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 7}
    model = build_model({"model_type": "gemma3", "text_config": {**text, "max_position_embeddings": 512}})
    assert (model.vocab_size, model.max_positions) == (262_208, 512)
    assert [spec.window for spec in model.layers] == [4096] * 5 + [None] + [4096]
    assert {(spec.kv_heads, spec.group, spec.head_dim, spec.scale) for spec in model.layers} == {(4, 2, 256, 1 / 16)}


def test_layers_have_the_windows_their_config_gives_them() -> None:
    def windows(case: str) -> list[int | None]:
        return [spec.window for spec in build_model(CASES[case]).layers]

    assert windows("llama") == [None, None]
    assert windows("qwen2-window") == [None, WINDOW, WINDOW]
    assert windows("mistral") == [WINDOW, WINDOW]
    assert windows("mistral-full") == [None, None]
    assert windows("gemma2") == [WINDOW, None, WINDOW]
    assert windows("smollm3-window") == [None, WINDOW, None]


@pytest.mark.parametrize(
    ("case", "stored", "known"),
    [
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", None),
        ("llama", "lm_head.weight", "lm_head.weight"),
        ("llama-biases", "lm_head.weight", None),
        ("gpt2", "h.1.ln_1.weight", "transformer.h.1.ln_1.weight"),
        ("gpt2", "transformer.h.1.attn.c_attn.bias", "transformer.h.1.attn.c_attn.bias"),
        ("gpt2", "h.1.attn.bias", None),
        ("qwen3_next", "mtp.layers.0.input_layernorm.weight", None),
        ("gpt2", "transformer.h.1.attn.masked_bias", None),
        ("gemma3", "language_model.model.norm.weight", "model.norm.weight"),
        ("gemma3", "model.language_model.norm.weight", "model.norm.weight"),
        ("gemma3", "model.norm.weight", "model.norm.weight"),
        ("gemma3", "language_model.lm_head.weight", None),
        ("gemma3", "vision_tower.head.weight", None),
        ("gemma3", "model.multi_modal_projector.norm.weight", None),
    ],
)
def test_checkpoint_names_are_known_by_one_name(case: str, stored: str, known: str | None) -> None:
    assert build_model(CASES[case]).canonical_name(stored) == known


@pytest.mark.parametrize("name", CASES)
def test_the_names_a_model_declares_are_its_own_canonical_names(name: str) -> None:
    model = build_model(CASES[name])
    declared = names(CASES[name])
    assert {model.canonical_name(stored) for stored in declared} == declared
