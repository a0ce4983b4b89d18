"""Models in the dtype of their weights."""

import jax
import jax.numpy as jnp
import pytest

from quire.models.checkpoint import load_weights, map_params
from quire.models.context import NoStates, PlatformOps, TokenContext
from quire.models.registry import build_model
from quire.ops.attention.heads import Heads
from quire.ops.attention.reference import whole_sequence
from quire.ops.attention.spec import AttentionSpec
from tests.models.cases import CASES
from tests.models.tiny import NamedTensors, prompt, relative_error, whole_logits

# Between them, every kind of block.
BLOCKS = (
    "llama-biases",
    "llama-dynamic",
    "gemma2",
    "gemma3",
    "phi3-long",
    "granite",
    "olmo2",
    "gpt2",
    "qwen3_moe",
    "qwen3_next",
    "granitemoehybrid",
    "glm4",
    "cohere2",
    "exaone4",
    "llama4",
)


@pytest.mark.parametrize("name", BLOCKS)
def test_everything_between_layers_has_the_dtype_of_the_weights(name: str) -> None:
    model = build_model(CASES[name])
    weights = map_params(lambda param: param.plain(jax.ShapeDtypeStruct(param.shape, jnp.bfloat16)), model.params())
    seen: set[jnp.dtype] = set()

    def attend(spec: AttentionSpec, heads: Heads, state: None) -> tuple[jax.Array, None]:
        q, k, v = heads.finished()
        assert q.shape == (5, spec.kv_heads, spec.group, spec.head_dim)
        assert k.shape == v.shape == (5, spec.kv_heads, spec.head_dim)
        seen.update((q.dtype, k.dtype, v.dtype))
        return whole_sequence(spec, heads, state)

    def run(weights: object) -> tuple[jax.Array, jax.Array]:
        tokens = jnp.arange(5)
        context = TokenContext(tokens, tokens, lengths=tokens + 1)
        hidden, _ = model.forward(weights, context, NoStates(), PlatformOps(attend))
        return hidden, model.logits(weights, hidden)

    hidden, logits = jax.eval_shape(run, weights)
    assert seen == {hidden.dtype} == {jnp.dtype("bfloat16")}
    assert (logits.shape, logits.dtype) == ((5, model.vocab_size), jnp.dtype("float32"))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_bfloat16_is_near_float32(name: str) -> None:
    model = build_model(CASES[name])
    tokens = prompt(12, model.vocab_size)
    exact, rounded = (
        whole_logits(model, load_weights(model, NamedTensors(model), dtype=dtype), tokens)
        for dtype in ("float32", "bfloat16")
    )
    assert 0 < relative_error(rounded, exact) < 0.1
