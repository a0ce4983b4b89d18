"""A checkpoint of random four-bit weights, as AWQ writes them, to time steps of it: the shapes of a Llama.

    python bench/random_four_bits.py FOLDER [--shapes llama-3.1-8b]
    python bench/bare_steps.py FOLDER --rows 1,8,32,64 --tokens 0

All layers have the same numbers, so that it is written soon. They take several gigabytes.
"""

import argparse
import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from quire.files.shapes import SHAPES

GROUP, CODES = 128, 8  # inputs with the same scale; codes of a word
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}

Tensors = dict[str, np.ndarray]


def matrix(name: str, inputs: int, outputs: int, random: np.random.Generator) -> Tensors:
    def words(rows: int) -> np.ndarray:
        return random.integers(-(2**31), 2**31, (rows, outputs // CODES), np.int32)

    groups = inputs // GROUP
    scales = np.full((groups, outputs), 0.2 * inputs**-0.5, np.float16)  # of codes about 4.6 from their middle
    return {f"{name}.qweight": words(inputs), f"{name}.qzeros": words(groups), f"{name}.scales": scales}


def layer(config: dict, random: np.random.Generator) -> Tensors:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads, pairs = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    ones = np.ones(hidden, ml_dtypes.bfloat16)
    tensors = {"input_layernorm.weight": ones, "post_attention_layernorm.weight": ones}
    for name, inputs, outputs in (
        ("self_attn.q_proj", hidden, heads),
        ("self_attn.k_proj", hidden, pairs),
        ("self_attn.v_proj", hidden, pairs),
        ("self_attn.o_proj", heads, hidden),
        ("mlp.gate_proj", hidden, inner),
        ("mlp.up_proj", hidden, inner),
        ("mlp.down_proj", inner, hidden),
    ):
        tensors |= matrix(name, inputs, outputs, random)
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shapes", default="llama-3.1-8b")
    given = parser.parse_args()
    config = {**SHAPES[given.shapes], "quantization_config": AWQ}
    random = np.random.default_rng(0)
    given.folder.mkdir(parents=True, exist_ok=True)
    (given.folder / "config.json").write_text(json.dumps(config))
    ends = random.standard_normal((config["vocab_size"], config["hidden_size"]), np.float32)
    ends = (ends * config["hidden_size"] ** -0.5).astype(ml_dtypes.bfloat16)
    ones = np.ones(config["hidden_size"], ml_dtypes.bfloat16)
    files = {"ends": {"model.embed_tokens.weight": ends, "lm_head.weight": ends, "model.norm.weight": ones}}
    tensors = layer(config, random)
    for number in range(config["num_hidden_layers"]):
        files[f"layer{number}"] = {f"model.layers.{number}.{name}": tensor for name, tensor in tensors.items()}
    for name, parts in files.items():
        save_file(parts, given.folder / f"model-{name}.safetensors")
    index = {tensor: f"model-{name}.safetensors" for name, parts in files.items() for tensor in parts}
    (given.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


if __name__ == "__main__":
    main()
