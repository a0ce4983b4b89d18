"""Latent attention on a GPU against the plain kernel, with the sizes of DeepSeek's models; interpreted elsewhere.

Every page that is not read holds NaN, and so does the unused part of those that are.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.attention.spec import AttentionSpec
from quire.ops.attention.tiled_attention import tiled_attention
from quire.ops.gpu import kernels as gpu_kernels
from quire.ops.gpu.latent_attention import SPLIT, latent_attention
from quire.ops.gpu.latent_parts import SplitPolicy
from quire.ops.pages import PagedContext, Tiles
from tests.gpu.test_kernels import INTERPRET, WIDTH, check, paged

pytestmark = pytest.mark.gpu
SPECS = {heads: AttentionSpec(1, heads, 576, 0.07, value_dim=512) for heads in (16, 128)}
each_case = pytest.mark.parametrize(
    ("heads", "dtype", "page_size"),
    [(16, "bfloat16", 32), (16, "float32", 16), (16, "float16", 64), (128, "bfloat16", 32), (128, "float32", 24)],
)


@each_case
def test_decodes_read_their_contexts(heads: int, dtype: str, page_size: int) -> None:
    spec = SPECS[heads]
    places = [*((position, 1) for position in (0, 1, 63, 64, page_size * WIDTH - 1, 17)), (5, 0)]
    q, (keys, _), table, tiles = paged(spec, page_size, dtype, places, num_single=len(places))
    context = PagedContext(spec, (keys, keys), table, tiles)
    expected = tiled_attention(q, context)[..., :512]
    for cut in (SplitPolicy(16, 12),) if INTERPRET else (SplitPolicy(16, 12), SplitPolicy(32, 264), SPLIT):
        run = jax.jit(partial(latent_attention, split=cut, interpret=INTERPRET))
        check(run(q, context), expected, dtype)


@each_case
def test_tiles_of_prefills_read_their_contexts_and_leave_the_decodes_before_them(
    heads: int, dtype: str, page_size: int
) -> None:
    spec = SPECS[heads]
    places = [(70, 1), (3, 1), (0, 32), (63, 20), (64, 1), (128, 0), (page_size * WIDTH - 32, 32)]
    if INTERPRET:
        places = places[:2] + places[3:6]
    q, (keys, _), table, tiles = paged(spec, page_size, dtype, places, num_single=2)
    tokens = sum(length for _, length in places)
    context = PagedContext(spec, (keys, keys), table, tiles)
    expected = tiled_attention(q, context)[:tokens, ..., :512]
    attend = partial(latent_attention, interpret=INTERPRET)
    for cut in (SplitPolicy(64, 40),) if INTERPRET else (SplitPolicy(64, 40), SPLIT, SplitPolicy(64, 1)):
        run = jax.jit(partial(gpu_kernels.latent_by, partial(attend, split=cut)))
        check(run(q, context)[:tokens], expected, dtype)


@pytest.mark.skipif(INTERPRET, reason="that much is not interpreted")
@pytest.mark.parametrize("heads", SPECS)
def test_few_long_contexts_are_read_by_many_programs(heads: int) -> None:
    """And one context more, of another length, cuts them in another way."""
    spec, page_size = SPECS[heads], 32
    chance = np.random.default_rng(0)
    count, lengths = 1600, np.asarray([51_000, 7_777, 1])
    keys = jnp.asarray(chance.normal(size=(count * 2, page_size, 1, 576)), "bfloat16")
    table = jnp.asarray(chance.integers(1, count * 2, (3, count)), "int32")
    q = jax.random.normal(jax.random.key(0), (3, 1, heads, 576), "bfloat16")
    for rows in (1, 2, 3):
        tiles = Tiles.single(jnp.arange(rows), jnp.asarray(lengths[:rows] - 1, "int32"))
        context = PagedContext(spec, (keys, keys), table, tiles)
        expected = tiled_attention(q[:rows], context)[..., :512]
        check(gpu_kernels.GPU.attend_latent(q[:rows], context), expected, "bfloat16")
