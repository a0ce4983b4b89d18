"""Decodes over pages of eight bits by the kernel for Hopper GPUs, against the plain ones; `tests/ops` has its list
of work.

Every page that is not read holds NaN, and so does the unused part of those that are.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.attention.spec import AttentionSpec
from quire.ops.attention.tiled_attention import tiled_attention
from quire.ops.gpu import kernels as gpu_kernels
from quire.ops.gpu.parts import combine_parts
from quire.ops.pages import CodedPages, PagedContext, Tiles
from tests.gpu.hopper import MARKS
from tests.gpu.test_kernels import WIDTH, check, in_codes, paged

pytestmark = MARKS
SPECS = {
    "8B": AttentionSpec(8, 4, 128, 0.088),
    "one head, groups of 8": AttentionSpec(1, 8, 128, 0.088),
    "groups of 7": AttentionSpec(4, 7, 128, 0.1),
    "no groups": AttentionSpec(5, 1, 128, 0.088),
}
MAX_PARTS = 16


def attended(spec: AttentionSpec, part: int, max_parts: int = MAX_PARTS) -> Any:
    from quire.ops.gpu.hopper.coded_decodes import coded_decodes

    def run(q: jax.Array, pages: CodedPages, table: jax.Array, tiles: Tiles) -> jax.Array:
        out, counts, parts = coded_decodes(q, PagedContext(spec, pages, table, tiles), part, max_parts)
        return combine_parts(out, counts, parts)

    return jax.jit(run)


@pytest.mark.parametrize("cache_dtype", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize(("name", "page_size"), [*((name, 32) for name in SPECS), ("8B", 8), ("8B", 16), ("8B", 64)])
def test_decodes_read_their_contexts(name: str, page_size: int, cache_dtype: str) -> None:
    spec, longest = SPECS[name], page_size * WIDTH - 1
    positions = [0, 1, 62, 63, 64, min(299, longest), longest, 17]
    places = [*((position, 1) for position in positions), (5, 0)]
    q, pages, table, tiles = paged(spec, page_size, "bfloat16", places, num_single=len(places))
    codes = in_codes(pages, cache_dtype)
    expected = tiled_attention(q, PagedContext(spec, codes, table, tiles))
    for part in (64, 192, 1024):
        out = attended(spec, part)(q, codes, table, tiles)
        check(out, expected, "bfloat16")
        assert not np.asarray(out[-1], np.float32).any()


def test_each_context_has_as_many_parts_as_there_are() -> None:
    spec = SPECS["8B"]
    q, pages, table, tiles = paged(spec, 32, "bfloat16", [(639, 1), (400, 1), (2, 1)], num_single=3)
    codes = in_codes(pages, "float8_e4m3fn")
    check(
        attended(spec, 64, 3)(q, codes, table, tiles),
        tiled_attention(q, PagedContext(spec, codes, table, tiles)),
        "bfloat16",
    )


def test_many_rows_share_the_workers() -> None:
    spec = SPECS["8B"]
    chance = np.random.default_rng(4)
    places = [(int(position), 1) for position in chance.integers(0, 640, 200)]
    q, pages, table, tiles = paged(spec, 32, "bfloat16", places, num_single=len(places))
    codes = in_codes(pages, "float8_e4m3fn")
    expected = np.asarray(tiled_attention(q, PagedContext(spec, codes, table, tiles)), np.float32)
    rows = gpu_kernels.attend_on_hopper(q, PagedContext(spec, codes, table, tiles))
    got = np.asarray(rows.values.reshape(q.shape), np.float32)
    near = (np.asarray(rows.codes, np.float32) * np.asarray(rows.scales)).reshape(q.shape)
    for row in range(len(places)):
        check(got[row], expected[row], "bfloat16")
        assert np.linalg.norm(near[row] - got[row]) < 0.05 * np.linalg.norm(got[row])


@pytest.mark.parametrize("name", ["8B", "one head, groups of 8"])
def test_a_step_may_be_all_padding(name: str) -> None:
    spec = SPECS[name]
    q, pages, table, tiles = paged(spec, 32, "bfloat16", [(5, 0)] * 130, num_single=130)
    out = attended(spec, 256)(q, in_codes(pages, "float8_e4m3fn"), table, tiles)
    assert not np.asarray(out, np.float32).any()


def test_prompts_may_follow_decodes() -> None:
    spec = SPECS["8B"]
    places = [*((position, 1) for position in range(10, 650, 10)), (100, 20), (0, 32)]
    q, pages, table, tiles = paged(spec, 32, "bfloat16", places, num_single=64)
    codes = in_codes(pages, "float8_e4m3fn")
    expected = np.asarray(tiled_attention(q, PagedContext(spec, codes, table, tiles)), np.float32)
    got = np.asarray(gpu_kernels.attend_on_hopper(q, PagedContext(spec, codes, table, tiles)), np.float32)
    check(got[: 64 + 52], expected[: 64 + 52], "bfloat16")


def test_values_may_be_of_very_different_sizes() -> None:
    spec = SPECS["8B"]
    q, (k, v), table, tiles = paged(spec, 32, "bfloat16", [(100, 1), (300, 1)], num_single=2)
    sizes = 10.0 ** jax.random.uniform(jax.random.key(3), (*v.shape[:2], 1, 1), minval=-6, maxval=6)
    codes = in_codes((k, (v * sizes).astype(v.dtype)), "float8_e4m3fn")
    expected = tiled_attention(q, PagedContext(spec, codes, table, tiles))
    out = attended(spec, 128)(q, codes, table, tiles)
    for row in range(2):
        check(out[row], expected[row], "bfloat16")


@pytest.mark.parametrize("factor", [1e-30, 1e-3, 1e3, 1e30])
def test_queries_may_be_of_any_size(factor: float) -> None:
    spec = SPECS["8B"]
    q, (k, v), table, tiles = paged(spec, 32, "bfloat16", [(100, 1), (300, 1)], num_single=2)
    codes = in_codes(((k / factor).astype(k.dtype), v), "float8_e4m3fn")
    q = (q * factor).astype(q.dtype)
    check(
        attended(spec, 128)(q, codes, table, tiles),
        tiled_attention(q, PagedContext(spec, codes, table, tiles)),
        "bfloat16",
    )


def test_a_row_does_not_depend_on_others() -> None:
    spec = SPECS["8B"]
    chance = np.random.default_rng(5)
    places = [(int(position), 1) for position in chance.integers(0, 640, 70)]
    q, pages, table, tiles = paged(spec, 32, "bfloat16", places, num_single=len(places))
    codes, run = in_codes(pages, "float8_e4m3fn"), attended(spec, 256)
    together = np.asarray(run(q, codes, table, tiles), np.float32)
    broken = q.at[1::2].set(jnp.nan)
    beside = np.asarray(run(broken, codes, table, tiles), np.float32)
    np.testing.assert_array_equal(beside[::2], together[::2])
    assert np.isnan(beside[1::2]).all()
    for row in (0, 7, 69):
        one = Tiles.single(tiles.slots[row : row + 1], tiles.starts[row : row + 1])
        np.testing.assert_array_equal(
            np.asarray(run(q[row : row + 1], codes, table, one), np.float32)[0], together[row]
        )


@pytest.mark.parametrize("what", [jnp.inf, -jnp.inf, jnp.nan])
def test_a_query_that_is_no_number_gives_none(what: float) -> None:
    spec = SPECS["8B"]
    q, pages, table, tiles = paged(spec, 32, "bfloat16", [(100, 1), (300, 1)], num_single=2)
    out = attended(spec, 64)(q.at[1, 2, 3, 4].set(what), in_codes(pages, "float8_e4m3fn"), table, tiles)
    is_number = np.isfinite(np.asarray(out, np.float32))
    assert not is_number[1, 2, 3].any()
    is_number[1, 2, 3] = True
    assert is_number.all()
