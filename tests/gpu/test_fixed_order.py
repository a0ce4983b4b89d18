"""Kernels with one order of sums: a row has the same bits whatever is beside it, on a GPU and interpreted."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.attention.heads import HeadNorm, Heads, Rotation
from quire.ops.attention.spec import AttentionSpec
from quire.ops.gpu import fixed_order
from quire.ops.gpu.add_norm import norm
from quire.ops.gpu.decode_attention import OF_CODES, TILING, decode_attention
from quire.ops.gpu.fixed_order import PLACED_TOKENS, tiling_of
from quire.ops.gpu.place_heads import place_heads
from quire.ops.gpu.prefill_attention import prefill_attention
from quire.ops.norms import rms_norm
from quire.ops.pages import TILE, KVWriteTargets, PagedContext, Tiles
from tests.gpu.test_kernels import CACHE_DTYPES, INTERPRET, check, in_codes

pytestmark = pytest.mark.gpu

PAGE_SIZE, LENGTH, FIRST = 32, 150, 41  # positions of a prompt, and the first of those that are compared
SPECS = {
    "all": AttentionSpec(2, 4, 64, 0.125),
    "window": AttentionSpec(1, 4, 64, 0.125, window=40),
    "odd groups, cap": AttentionSpec(1, 3, 80, 0.1, softcap=20.0),
}


def paged(spec: AttentionSpec, dtype: str) -> tuple[jax.Array, Any, jax.Array]:
    """Queries of all positions of a prompt, its pages, and two page tables that begin with them."""
    width = -(-LENGTH // PAGE_SIZE)
    keys = jax.random.split(jax.random.key(0), 3)
    shape = width + 1, PAGE_SIZE, spec.kv_heads, spec.head_dim
    pages = tuple(jax.random.normal(key, shape, dtype) for key in keys[:2])
    table = jnp.tile(jnp.arange(1, width + 1, dtype=jnp.int32), (2, 1))
    q = jax.random.normal(keys[2], (LENGTH, spec.kv_heads, spec.group, spec.head_dim), dtype)
    return q, pages, table


def in_tiles(
    spec: AttentionSpec, q: jax.Array, pages: Any, table: jax.Array, first: int, each: int, tokens: int
) -> np.ndarray[Any, Any]:
    """The results from `first` on, in chunks of `each`, in a step of so many tokens that has the prompt's first
    positions behind them."""
    starts = [at for begin in range(first, LENGTH, each) for at in range(begin, min(begin + each, LENGTH), TILE)]
    ends = [
        min(begin + each, LENGTH)
        for begin in range(first, LENGTH, each)
        for _ in range(begin, min(begin + each, LENGTH), TILE)
    ]
    lengths = [min(TILE, end - at) for at, end in zip(starts, ends, strict=True)]
    own = sum(lengths)
    others = list(range(0, min(first, tokens - own), TILE))
    lengths += [min(TILE, first - at, tokens - own - at) for at in others]
    rows = jnp.concatenate([q[first:], q[: sum(lengths) - own]])
    rows = jnp.pad(rows, ((0, tokens - len(rows)), (0, 0), (0, 0), (0, 0)))
    offsets = np.cumsum(lengths) - lengths
    given = [
        jnp.asarray(one, jnp.int32)
        for one in ([0] * len(starts) + [1] * len(others), starts + others, lengths, offsets)
    ]
    how: Any = {"tiling": tiling_of(q.dtype), "max_parts": 1, "masks_all": True, "interpret": INTERPRET}
    out = jax.jit(partial(prefill_attention, **how))(
        rows, PagedContext(spec, pages, table, Tiles(*given, num_single=0))
    )
    return np.asarray(out[:own].astype(jnp.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", SPECS)
def test_a_position_of_a_prompt_has_the_same_bits_however_it_is_cut(name: str, dtype: str) -> None:
    spec = SPECS[name]
    q, *given = paged(spec, dtype)
    whole = in_tiles(spec, q, *given, 0, LENGTH, 2048)[FIRST:]
    for each, tokens in ((LENGTH, 128), (TILE, 256), (1, 128), (7, 2048)):
        assert np.array_equal(in_tiles(spec, q, *given, FIRST, each, tokens), whole)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_a_position_over_codes_has_the_same_bits_however_it_is_cut(cache_dtype: str) -> None:
    """Also where values of positions behind it are larger."""
    spec = SPECS["all"]
    q, (k, v), table = paged(spec, "bfloat16")
    sizes = jnp.exp(jax.random.uniform(jax.random.key(3), (*v.shape[:2], 1, 1), minval=-3, maxval=3))
    given = in_codes((k, (v * sizes).astype(v.dtype)), cache_dtype), table
    whole = in_tiles(spec, q, *given, 0, LENGTH, 256)[FIRST:]
    for each, tokens in ((LENGTH, 128), (7, 256)):
        assert np.array_equal(in_tiles(spec, q, *given, FIRST, each, tokens), whole)


@pytest.mark.parametrize(("name", "cache_dtype"), [*((name, None) for name in SPECS), ("all", "float8_e4m3fn")])
def test_a_decode_has_the_same_bits_beside_any_number_of_others(name: str, cache_dtype: str | None) -> None:
    spec = SPECS[name]
    q, pages, table = paged(spec, "bfloat16")
    pages = pages if cache_dtype is None else in_codes(pages, cache_dtype)
    how: Any = {"part": 64, "tiling": TILING if cache_dtype is None else OF_CODES, "interpret": INTERPRET}
    found = []
    for count in (8, 64):
        rows = jnp.tile(q[-1:], (count, 1, 1, 1))
        starts = jnp.asarray([LENGTH - 1, *np.arange(1, count) % LENGTH], jnp.int32)
        ones = jnp.ones(count, jnp.int32)
        tiles = Tiles(0 * ones, starts, ones, jnp.arange(count, dtype=jnp.int32), count)
        out = jax.jit(partial(decode_attention, **how))(rows, PagedContext(spec, pages, table, tiles))
        found.append(np.asarray(out[0].astype(jnp.float32)))
    assert np.array_equal(*found)


@pytest.mark.parametrize("size", [64, 128])
def test_heads_have_the_same_bits_beside_any_number_of_others(size: int) -> None:
    rng = np.random.default_rng(0)
    most = 600
    angles = rng.uniform(0, 7, (most, size // 2))
    weight = HeadNorm(jnp.asarray(rng.normal(size=size), "bfloat16"), 1e-6)
    qkv = jnp.asarray(rng.normal(size=(most, 2, 4, size)), "bfloat16")
    found = []
    for tokens in (PLACED_TOKENS, 48, most):
        rotation = Rotation(*(jnp.asarray(turn(angles[:tokens]), jnp.float32) for turn in (np.cos, np.sin)))
        places = np.arange(PAGE_SIZE, PAGE_SIZE + tokens)
        targets = KVWriteTargets(jnp.asarray(places // PAGE_SIZE), jnp.asarray(places % PAGE_SIZE))
        pages = tuple(jnp.zeros((32, PAGE_SIZE, 2, size), "bfloat16") for _ in range(2))
        run = jax.jit(partial(place_heads, block=PLACED_TOKENS, interpret=INTERPRET))
        q, written = run(Heads(qkv[:tokens], rotation, weight, weight), pages, targets)
        parts = (q[:PLACED_TOKENS], *(one[1, :PLACED_TOKENS] for one in written))
        found.append([np.asarray(part.astype(jnp.float32)) for part in parts])
    for others in found[1:]:
        assert all(np.array_equal(one, other) for one, other in zip(found[0], others, strict=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("size", [576, 4096])
def test_a_norm_is_that_of_the_plain_function_and_does_not_depend_on_the_rows(size: int, dtype: str) -> None:
    chance = np.random.default_rng(0)
    x, weight = jnp.asarray(chance.normal(size=(33, size)), dtype), jnp.asarray(chance.normal(size=size), dtype)
    normal = norm(x, weight, 1e-5, 1.0, interpret=INTERPRET)
    check(normal, rms_norm(x, weight, 1e-5, 1.0), dtype)
    assert np.array_equal(np.asarray(norm(x[5:8], weight, 1e-5, 1.0, interpret=INTERPRET)), np.asarray(normal[5:8]))


@pytest.mark.parametrize("cache_dtype", [None, "float8_e4m3fn"])
def test_decodes_are_cut_alike_whatever_their_number(cache_dtype: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS["all"]
    q, pages, table = paged(spec, "bfloat16")
    pages = pages if cache_dtype is None else in_codes(pages, cache_dtype)
    given: list[Any] = []

    def noted(q: jax.Array, context: PagedContext, **how: Any) -> jax.Array:
        given.append(how)
        return q

    monkeypatch.setattr(fixed_order, "decode_attention", noted)
    for count in (8, 512):
        ones = jnp.ones(count, jnp.int32)
        tiles = Tiles(0 * ones, ones, ones, jnp.arange(count, dtype=jnp.int32), count)
        fixed_order.attend.__wrapped__(jnp.tile(q[-1:], (count, 1, 1, 1)), PagedContext(spec, pages, table, tiles))
    assert given[0] == given[1]
    assert None not in [given[0].get(name) for name in ("part", "tiling")]
