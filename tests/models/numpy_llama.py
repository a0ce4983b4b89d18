"""A llama in numpy, whose linear layers may round their inputs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def numpy_logits(
    config: Mapping[str, Any],
    tensors: Mapping[str, Array],
    rounds: Mapping[str, Callable[[Array], Array]],
    tokens: Sequence[int],
) -> Array:
    """The logits after each token. Products of rounded inputs are summed in float64."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    eps = config.get("rms_norm_eps", 1e-6)
    theta = config["rope_parameters"]["rope_theta"]

    def linear(name: str, x: Array) -> Array:
        x = rounds[name](x) if name in rounds else x
        return (x.astype(np.float64) @ tensors[name].astype(np.float64).T).astype(np.float32)

    def norm(name: str, x: Array) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * tensors[name]

    angles = np.arange(len(tokens))[:, None] * theta ** (-np.arange(0, size, 2) / size)
    cos, sin = (
        np.concatenate((part, part), -1)[:, None].astype(np.float32) for part in (np.cos(angles), np.sin(angles))
    )

    def turned(x: Array) -> Array:
        first, second = np.split(x, 2, axis=-1)
        return x * cos + np.concatenate((-second, first), -1) * sin

    x = tensors["model.embed_tokens.weight"][list(tokens)]
    later = np.triu(np.ones((len(tokens), len(tokens)), bool), 1)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        normal = norm(f"{at}.input_layernorm.weight", x)
        q = turned(linear(f"{at}.self_attn.q_proj.weight", normal).reshape(-1, heads, size))
        k = turned(linear(f"{at}.self_attn.k_proj.weight", normal).reshape(-1, kv_heads, size))
        v = linear(f"{at}.self_attn.v_proj.weight", normal).reshape(-1, kv_heads, size)
        k, v = (np.repeat(part, heads // kv_heads, axis=1) for part in (k, v))
        scores = np.einsum("qnh,knh->nqk", q, k) / np.sqrt(size)
        scores = np.where(later, -np.inf, scores)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + linear(f"{at}.self_attn.o_proj.weight", np.einsum("nqk,knh->qnh", weights, v).reshape(len(x), -1))
        normal = norm(f"{at}.post_attention_layernorm.weight", x)
        gate = linear(f"{at}.mlp.gate_proj.weight", normal)
        up = linear(f"{at}.mlp.up_proj.weight", normal)
        x = x + linear(f"{at}.mlp.down_proj.weight", gate / (1 + np.exp(-gate)) * up)
    head = "lm_head.weight" if "lm_head.weight" in tensors else "model.embed_tokens.weight"
    return linear(head, norm("model.norm.weight", x))
