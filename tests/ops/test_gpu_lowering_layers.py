"""The launches of a layer in codes on a Hopper GPU, by the number of its rows."""

import re
from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from quire.models.context import NoStates, PlatformOps, TokenContext
from quire.models.formats.channel_weights import Kind, channel_like
from quire.models.params import Param
from quire.models.registry import build_model
from quire.ops.attention.reference import whole_sequence
from quire.ops.kernels import gpu_form, kernels_for
from tests.gpu.hopper import ON_HOPPER
from tests.ops.test_gpu_lowering import on_an_h200

pytestmark = pytest.mark.skipif(not ON_HOPPER.mosaic, reason="this JAX has other kernels for it")
VOCABULARY = 512
MODEL = build_model(
    {
        "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 4096, "num_hidden_layers": 1,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336,
        "max_position_embeddings": 64,
    }
)  # fmt: skip
TRITON = "round_rows", "add_norm", "add_norm_round", "gate_round"


def like(kind: Kind, param: Param) -> Any:
    if param.num_contracted and param.shape[0] != VOCABULARY:
        return gpu_form(channel_like(param, kind), is_alone=True)
    return param.plain(jax.ShapeDtypeStruct(param.shape, jnp.bfloat16))


def launches(kind: Kind, rows: int, *, fixed_order: bool = False) -> tuple[int, Counter[str]]:
    """Kernels in Mosaic of a model of one layer, and those of Triton by name. Attention is plain."""
    weights = jax.tree.map(partial(like, kind), MODEL.params(), is_leaf=lambda node: isinstance(node, Param))

    def run(weights: Any, tokens: jax.Array) -> jax.Array:
        context = TokenContext(tokens, tokens, lengths=tokens + 1)
        return MODEL.forward(weights, context, NoStates(), PlatformOps(whole_sequence, products=products))[0]

    with on_an_h200():
        products = kernels_for("gpu", "bfloat16", gpu=ON_HOPPER, fixed_order=fixed_order).products
        traced = jax.jit(run).trace(weights, jax.ShapeDtypeStruct((rows,), jnp.int32))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    named = Counter(name for name in re.findall(r'name = "(\w+)"', text) if name in TRITON)
    return text.count("custom_call @mosaic_gpu"), named


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("rows", [1, 8])
def test_few_rows_have_a_launch_for_each_product_and_none_beside_them(kind: Kind, rows: int) -> None:
    assert launches(kind, rows) == (4, Counter())


def test_gates_of_more_rows_are_part_of_their_product() -> None:
    """Rows of the norms are rounded, those of attention, which is plain here, too, and beyond 64 those of gates."""
    rounded = {"add_norm_round": 2, "round_rows": 1}
    for rows in (16, 64):
        assert launches("fp8", rows) == (4, rounded)
    for rows in (200, 256):
        assert launches("fp8", rows) == (1, {**rounded, "round_rows": 2})
    for rows in (96, 160, 512):
        assert launches("fp8", rows) == (0, {**rounded, "gate_round": 1})


def test_reproducible_answers_have_none_of_them() -> None:
    for rows in (8, 64, 256):
        assert launches("fp8", rows, fixed_order=True)[0] == 0
