"""The list of work of prefills over pages of eight bits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.ops.attention.spec import AttentionSpec
from quire.ops.gpu.hopper.prefill_items import GROUPS, LEAST_TOKENS, WIDE, fits, prefill_items, tokens_of_group
from quire.ops.pages import TILE, CodedPages, PagedContext, Tiles

SPEC = AttentionSpec(8, 4, 128, 0.088)
compiled = jax.jit(prefill_items, static_argnums=1)


@pytest.mark.parametrize("queries", range(1, 9))
def test_a_group_has_room_for_its_rows_and_items_divide_tiles(queries: int) -> None:
    tokens = tokens_of_group(queries)
    assert tokens * queries <= WIDE
    assert TILE % (GROUPS * tokens) == 0
    assert tokens * queries % 8 == 0


@given(
    st.lists(st.tuples(st.integers(0, 900), st.integers(0, TILE)), min_size=7, max_size=7), st.sampled_from([16, 32])
)
def test_every_token_is_in_one_item(places: list[tuple[int, int]], tokens: int) -> None:
    starts, lengths = np.asarray(places, np.int32).T
    offsets = np.cumsum(lengths, dtype=np.int32) - lengths
    tiles = Tiles(*map(jnp.asarray, (np.arange(7, dtype=np.int32) + 3, starts, lengths, offsets)), num_single=0)
    fields, count = map(np.asarray, compiled(tiles, tokens))
    listed = fields[: count[0]].tolist()
    assert all(1 <= length <= tokens for *_, length in listed)
    assert not fields[count[0] :, 3].any()
    found = [(slot, start + index, token + index) for slot, start, token, length in listed for index in range(length)]
    expected = [
        (number + 3, start + index, offset + index)
        for number, (start, length, offset) in enumerate(zip(starts, lengths, offsets, strict=True))
        for index in range(length)
    ]
    assert sorted(found) == sorted(expected)
    ends = [start + length for _, start, _, length in listed]
    assert ends == sorted(ends, reverse=True)


def fits_with(
    spec: AttentionSpec = SPEC, *, dtype: str = "bfloat16", tokens: int = 4096, page_size: int = 16, codes: Any = "int8"
) -> bool:
    q = jax.ShapeDtypeStruct((tokens, spec.kv_heads, spec.group, spec.head_dim), dtype)
    k = jax.ShapeDtypeStruct((9, page_size, spec.kv_heads, spec.head_dim), codes)
    pages: Any = CodedPages(k, k, None, None) if codes != "bfloat16" else (k, k)
    unused: Any = None
    return fits(q, PagedContext(spec, pages, unused, unused))


def test_what_it_is_for() -> None:
    assert fits_with()
    assert fits_with(codes="float8_e4m3fn")
    assert fits_with(tokens=LEAST_TOKENS)
    assert all(fits_with(page_size=size) for size in (8, 16, 32, 64))


@pytest.mark.parametrize(
    "case",
    [
        {"codes": "bfloat16"},
        {"dtype": "float16"},
        {"tokens": LEAST_TOKENS - 1},
        {"page_size": 4},
        {"page_size": 24},
        {"page_size": 128},
        {"spec": AttentionSpec(8, 4, 64, 0.1)},
        {"spec": AttentionSpec(8, 9, 128, 0.1)},
        {"spec": AttentionSpec(8, 4, 128, 0.1, window=100)},
        {"spec": AttentionSpec(8, 4, 128, 0.1, softcap=30.0)},
        {"spec": AttentionSpec(8, 4, 128, 0.1, has_sinks=True)},
    ],
    ids=str,
)
def test_what_it_is_not_for(case: dict[str, Any]) -> None:
    assert not fits_with(**case)
