"""Steps of a model with experts on a CPU: everything in float32, all but the experts in int8, and everything.

    python bench/int8_experts.py [--rows 1,8,32] [--prompt 512] [--rounds 5] [--layers 2]

Random weights with layers of the shape of qwen3-30b-a3b and a small vocabulary, without an engine and without a cache.
Rows see themselves alone: attention over a context is the same in all variants, and left out. A prompt has logits of
its last token. Every step has other tokens, which visit other experts. The variants take turns, so that whatever else
the machine does meets all of them; a ratio is the median of those of the rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from quality import with_float_experts

from quire.models.context import NoStates, PlatformOps, TokenContext
from quire.models.params import ParamTree
from quire.models.parts.decoder import Decoder
from quire.models.random_weights import random_weights
from quire.models.registry import build_model
from quire.ops.attention.heads import Heads
from quire.ops.attention.spec import AttentionSpec

VOCAB, STEPS = 4096, 8
Step = Callable[[ParamTree, jax.Array], jax.Array]


def build(layers: int) -> Decoder:
    return build_model(
        {
            "model_type": "qwen3_moe",
            "vocab_size": VOCAB,
            "hidden_size": 2048,
            "num_hidden_layers": layers,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "max_position_embeddings": 4096,
        }
    )


def only_itself(spec: AttentionSpec, heads: Heads, state: None) -> tuple[jax.Array, None]:
    """Attention of rows that see no other."""
    _, _, v = heads.finished()
    return jnp.repeat(v[:, :, None], spec.group, axis=2), state


def compiled(model: Decoder, is_prompt: bool) -> Step:
    @jax.jit
    def step(weights: ParamTree, tokens: jax.Array) -> jax.Array:
        positions = jnp.zeros_like(tokens)
        context = TokenContext(tokens, positions, lengths=positions + 1)
        hidden, _ = model.forward(weights, context, NoStates(), PlatformOps(only_itself))
        return model.logits(weights, hidden[-1:] if is_prompt else hidden)

    return step


def milliseconds(step: Step, weights: ParamTree, tokens: np.ndarray[Any, Any]) -> float:
    """Of one of the steps [steps, tokens]."""
    begun = time.perf_counter()
    for one in tokens:
        step(weights, one).block_until_ready()
    return (time.perf_counter() - begun) * 1000 / len(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,32", help="decodes of a step")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=2)
    given = parser.parse_args()
    model, how = build(given.layers), {"seed": 0, "dtype": "float32"}
    floats, int8 = (random_weights(model, quantize=kind, **how) for kind in ("none", "int8"))
    variants = {
        "float32": floats,
        "int8, float32 experts": with_float_experts(model, int8, floats),
        "int8": int8,
    }
    chance = np.random.default_rng(0)
    for count, is_prompt in [*((int(rows), False) for rows in given.rows.split(",")), (given.prompt, True)]:
        step = compiled(model, is_prompt)
        steps = 1 if is_prompt else STEPS
        found: dict[str, list[float]] = {name: [] for name in variants}
        for turn in range(given.rounds + 1):
            tokens = chance.integers(0, VOCAB, (steps, count), np.int32)
            for name, weights in variants.items():
                took = milliseconds(step, weights, tokens)
                if turn:  # the first compiles
                    found[name].append(took)
        title = f"{count} prompt tokens" if is_prompt else f"{count} decodes"
        for name, times in found.items():
            ratios = [before / after for before, after in zip(times, found["int8"], strict=True)]
            print(
                f"{title:<18} {name:<22} {statistics.median(times):8.1f} ms; int8 is {statistics.median(ratios):.2f} "
                f"times as fast ({min(ratios):.2f} to {max(ratios):.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
