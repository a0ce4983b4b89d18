"""GGUF files against the checkpoints they were made of, and against transformers' own reading of them."""

from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest

from quire.files.model_files import locate
from quire.files.tensor_source import TensorSource
from quire.models.checkpoint import load_weights
from quire.models.registry import build_model
from tests.models.gguf_conversion import write_as_gguf
from tests.models.gguf_reference import transformers_model
from tests.models.tiny import NamedTensors, prompt, relative_error, whole_logits

VOCAB_SIZE = 96
ROUTERS = (".mlp.gate.weight", ".block_sparse_moe.gate.weight")  # which no file has quantised
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "eos_token_id": 3,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GEMMA = {"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 8}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True, "head_dim": 12},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-linear": {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    "llama-llama3": {
        "model_type": "llama",
        "rope_theta": 500_000.0,
        "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192},
    },
    "llama-other-factors": {
        "model_type": "llama",
        "rope_theta": 500_000.0,
        "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 100},
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen2-yarn": {
        "model_type": "qwen2",
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2},
    "mixtral-window": {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "sliding_window": 7,
        "rope_theta": 1e6,
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        "num_hidden_layers": 3,
        "head_dim": 16,
        "use_qk_norm": True,
        "attention_bias": True,
        "moe_intermediate_size": 32,
        "n_routed_experts": 12,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    },
    "glm4_moe-options": {
        "model_type": "glm4_moe",
        "moe_intermediate_size": 32,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "partial_rotary_factor": 1.0,
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        **LATENT,
        "q_lora_rank": None,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 16,
        },
    },
    "deepseek_v2-groups": {
        "model_type": "deepseek_v2",
        **LATENT,
        "q_lora_rank": 32,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **LATENT,
        "q_lora_rank": 32,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.8,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16,
        },
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 3,
        "intermediate_size": 32,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
        "attention_bias": True,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    },
    "gemma2": {
        "model_type": "gemma2",
        **GEMMA,
        "sliding_window": 7,
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 10.0,
    },
    "gemma3": {"model_type": "gemma3_text", **GEMMA, "num_hidden_layers": 7, "sliding_window": 7},
    "gemma3-linear": {
        "model_type": "gemma3_text",
        **GEMMA,
        "num_hidden_layers": 7,
        "sliding_window": 7,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
}
# Transformers reads the config of these files whole. It does not of the others: biases, rope scaling and factors,
# Qwen 3's head size, and what distinguishes Gemma models stay at the defaults of its config classes.
CONFIG_READ_BY_TRANSFORMERS = ("llama", "llama-tied", "qwen2")
# Experts are compared with the checkpoint that a file is made of only.
DENSE = [name for name, case in CASES.items() if "num_experts_per_tok" not in case]


def original(name: str) -> dict[str, Any]:
    return SIZES | CASES[name]


def write(name: str, path: Path, type_: str = "F32") -> Path:
    source = NamedTensors(build_model(original(name)))
    return write_as_gguf(path, original(name), {name: source.read(name) for name in source.tensors()}, type_)


class Rounded(NamedTensors):
    """The same, with matrices as a quantised file would hold them."""

    def read(self, name: str) -> np.ndarray[Any, Any]:
        values = super().read(name)
        kind = gguf.GGMLQuantizationType.Q8_0
        if values.ndim == 1 or name.endswith(ROUTERS):
            return values
        return gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)


def logits_of(config: dict[str, Any], source: TensorSource | None) -> np.ndarray[Any, Any]:
    model = build_model(config)
    assert source is not None
    weights = load_weights(model, source, dtype="float32")
    with jax.disable_jit():  # op by op, which all cases share: compiling each of them takes longer
        return whole_logits(model, weights, prompt(29, VOCAB_SIZE))


@pytest.mark.parametrize("name", CASES)
def test_a_model_written_as_gguf_computes_what_it_did(name: str, tmp_path: Path) -> None:
    config = original(name)
    model = build_model(config)
    files = locate(str(write(name, tmp_path / "m.gguf")))
    expected = logits_of(config, NamedTensors(model))
    assert relative_error(logits_of(files.config, files.open_weights()), expected) < 1e-5
    assert files.eos_token_ids == (3,)
    assert build_model(files.config).max_positions == model.max_positions


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "mixtral", "glm4_moe"])
def test_a_quantised_model_computes_what_its_rounded_weights_do(name: str, tmp_path: Path) -> None:
    config = original(name)
    files = locate(str(write(name, tmp_path / "m.gguf", "Q8_0")))
    expected = logits_of(config, Rounded(build_model(config)))
    assert relative_error(logits_of(files.config, files.open_weights()), expected) < 1e-5


def test_layers_that_guess_tokens_are_left_out(tmp_path: Path) -> None:
    config = original("glm4_moe")
    longer = config | {"num_hidden_layers": 4, "num_nextn_predict_layers": 1}
    source = NamedTensors(build_model(longer))
    arrays = {name: source.read(name) for name in source.tensors()}
    arrays["model.layers.3.enorm.weight"] = np.ones(32, np.float32)
    files = locate(str(write_as_gguf(tmp_path / "m.gguf", longer, arrays)))
    assert "model.layers.3.nextn.enorm.weight" in files.open_weights().tensors()
    expected = logits_of(config, NamedTensors(build_model(config)))
    assert relative_error(logits_of(files.config, files.open_weights()), expected) < 1e-5


@pytest.mark.parametrize("type_", ["F32", "Q8_0"])
def test_older_files_have_one_matrix_that_makes_keys_and_values_of_latents(tmp_path: Path, type_: str) -> None:
    config = original("deepseek_v2")
    source = NamedTensors(build_model(config))
    arrays = {name: source.read(name) for name in source.tensors()}
    files = locate(str(write_as_gguf(tmp_path / "m.gguf", config, arrays, type_, splits_latents=False)))
    expected = logits_of(config, source if type_ == "F32" else Rounded(build_model(config)))
    assert relative_error(logits_of(files.config, files.open_weights()), expected) < 1e-5


def transformers_logits(path: Path, config: dict[str, Any] | None) -> np.ndarray[Any, Any]:
    import torch

    with torch.no_grad():
        logits = transformers_model(path, config)(torch.tensor([prompt(29, VOCAB_SIZE)])).logits
    return np.asarray(logits[0])


@pytest.mark.parity
@pytest.mark.parametrize("name", CONFIG_READ_BY_TRANSFORMERS)
def test_transformers_reads_the_same_model_from_the_file(name: str, tmp_path: Path) -> None:
    files = locate(str(write(name, tmp_path / "m.gguf")))
    expected = transformers_logits(tmp_path / "m.gguf", None)
    assert relative_error(logits_of(files.config, files.open_weights()), expected) < 1e-4


@pytest.mark.parity
@pytest.mark.parametrize("name", DENSE)
def test_transformers_reads_the_same_weights_from_the_file(name: str, tmp_path: Path) -> None:
    files = locate(str(write(name, tmp_path / "m.gguf")))
    expected = transformers_logits(tmp_path / "m.gguf", original(name))
    assert relative_error(logits_of(files.config, files.open_weights()), expected) < 1e-4
