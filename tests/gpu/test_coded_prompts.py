"""Attention of a long new prompt in codes of e4m3 by cuDNN, against that of the numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.attention.heads import joined
from quire.ops.attention.spec import AttentionSpec
from quire.ops.gpu import kernels as gpu_kernels
from quire.ops.gpu.hopper import coded_prompts
from quire.ops.pages import CodedPages, KVWriteTargets
from tests.gpu.hopper import IS_HOPPER, ON_HOPPER

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (IS_HOPPER and ON_HOPPER.prompt_in_codes), reason="JAX 0.11 has it for GPUs of compute capability 9.0"
    ),
]
CODE = jnp.float8_e4m3fn
PAGE_SIZE = 16
SPEC = AttentionSpec(8, 4, 128, 128**-0.5, read_in=CODE)


@pytest.mark.parametrize(("tokens", "real"), [(8192, 8192), (4096, 3000)])
def test_it_is_near_attention_among_numbers(tokens: int, real: int) -> None:
    """Nearer than a few codes that are off by half of their last bit make it, in each row."""
    chance = np.random.default_rng(0)
    q, k, v = (jnp.asarray(chance.normal(size=(tokens, 8, *parts, 128)), jnp.bfloat16) for parts in ((4,), (), ()))
    k = k + jnp.asarray(3 * chance.normal(size=(8, 128)), jnp.bfloat16)  # what keys have in common
    at = jnp.arange(tokens)
    targets = KVWriteTargets(jnp.where(at < real, 1 + at // PAGE_SIZE, 0), at % PAGE_SIZE)
    codes = jnp.zeros((tokens // PAGE_SIZE + 1, PAGE_SIZE, 8, 128), CODE)
    scales = jnp.zeros((len(codes), 8, PAGE_SIZE), jnp.bfloat16)
    found = gpu_kernels.prompt_in_codes(SPEC, joined(q, k, v), CodedPages(codes, codes, scales, scales), targets)
    assert found is not None
    rows, _ = found
    right = jax.nn.dot_product_attention(
        q.reshape(1, tokens, 32, 128), k[None], v[None], scale=SPEC.scale, is_causal=True, implementation="cudnn"
    )
    expected = np.asarray(right, np.float32).reshape(tokens, -1)[:real]
    got = np.asarray(rows.values, np.float32)[:real]
    off = np.linalg.norm(got - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert off.mean() < 0.08
    assert off.max() < 0.2


def test_a_prompt_without_a_kernel_is_declined() -> None:
    assert not coded_prompts.fits(SPEC, (jnp.zeros(1), jnp.zeros(1)), 8192)
