"""The list of work of decodes over pages of eight bits."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.ops.attention.spec import AttentionSpec
from quire.ops.gpu.hopper.decode_items import PARTS, Items, items_of, part_of
from quire.ops.pages import PagedContext, Tiles

SPEC = AttentionSpec(8, 4, 128, 0.088)


def tiles_of(lengths: list[int]) -> Tiles:
    """Single tokens whose contexts are so long; 0 is padding."""
    return Tiles.single(jnp.arange(len(lengths)) + 3, jnp.asarray(lengths, jnp.int32) - 1)


@partial(jax.jit, static_argnums=(1, 2))
def compiled(tiles: Tiles, part: int, max_parts: int) -> Items:
    return items_of(tiles, part, max_parts)


def items_for(lengths: list[int], part: int = 64, max_parts: int = 16) -> Items:
    return jax.tree.map(np.asarray, compiled(tiles_of(lengths), part, max_parts))


def fields_of(lengths: list[int]) -> Any:
    items = items_for(lengths)
    return items.fields[: items.length[0]]


@st.composite
def some_lengths(draw: st.DrawFn) -> list[int]:
    """Of few numbers of tokens, since each is compiled."""
    count = draw(st.sampled_from([1, 2, 12]))
    return draw(st.lists(st.integers(0, 700), min_size=count, max_size=count))


@given(some_lengths(), st.sampled_from([64, 128]), st.sampled_from([1, 2, 16]))
def test_every_position_is_in_one_item(lengths: list[int], part: int, max_parts: int) -> None:
    items = items_for(lengths, part, max_parts)
    (count,) = items.length.tolist()
    listed = items.fields[:count].tolist()
    seen = {(token, position) for token, _, first, last, _ in listed for position in range(first, last)}
    assert seen == {(token, position) for token, length in enumerate(lengths) for position in range(length)}
    assert sum(last - first for _, _, first, last, _ in listed) == sum(lengths)
    assert all(slot == token + 3 for token, slot, *_ in listed)
    for token, length in enumerate(lengths):
        own = sorted((first, which) for its_token, _, first, _, which in listed if its_token == token)
        assert (
            len(own)
            == items.parts[token]
            == min(-(-length // (part * -(-length // (part * max_parts)) or 1)), max_parts)
        )
        assert [which for _, which in own] == ([-1] if len(own) == 1 else list(range(len(own))))


def test_the_longest_items_come_first() -> None:
    fields = fields_of([100, 0, 130, 64, 300, 7, 100])
    sizes = (fields[:, 3] - fields[:, 2]).tolist()
    assert sizes == sorted(sizes, reverse=True)
    assert sizes.count(64) == 1 + 2 + 1 + 4 + 1


def test_parts_of_a_context_do_not_depend_on_others() -> None:
    among = fields_of([9, 700, 300, 0])
    np.testing.assert_array_equal(among[among[:, 0] == 2][:, 2:], fields_of([300])[:, 2:])


def pages_like(dtype: str = "float8_e4m3fn", page_size: int = 32, heads: int = 8, size: int = 128) -> Any:
    codes, scales = jnp.zeros((2, page_size, heads, size), dtype), jnp.zeros((2, heads, page_size), jnp.bfloat16)
    return codes, codes, scales, scales


def queries_like(rows: int, dtype: str = "bfloat16", heads: int = 8, group: int = 4, size: int = 128) -> Any:
    return jnp.zeros((rows, heads, group, size), dtype)


def part_with(spec: AttentionSpec, q: jax.Array, pages: Any, rows: int | None = None) -> int | None:
    tiles = Tiles.single(jnp.arange(rows or len(q)), jnp.arange(rows or len(q)))
    return part_of(q, PagedContext(spec, pages, jnp.zeros((1, 1), jnp.int32), tiles))


def test_it_is_for_many_rows_over_codes() -> None:
    assert part_with(SPEC, queries_like(64), pages_like()) == PARTS[0][1]
    assert part_with(SPEC, queries_like(64), pages_like("int8")) == PARTS[0][1]
    assert part_with(SPEC, queries_like(64), pages_like(), rows=1) is None
    assert part_with(SPEC, queries_like(64), pages_like("bfloat16")[:2]) is None


@pytest.mark.parametrize(
    ("spec", "q", "pages"),
    [
        (AttentionSpec(8, 4, 128, 0.088, window=100), {}, {}),
        (AttentionSpec(8, 4, 128, 0.088, chunk=100), {}, {}),
        (AttentionSpec(8, 4, 128, 0.088, softcap=20.0), {}, {}),
        (AttentionSpec(8, 4, 128, 0.088, has_sinks=True), {}, {}),
        (SPEC, {"dtype": "float32"}, {}),
        (SPEC, {"dtype": "float16"}, {}),
        (SPEC, {"group": 9}, {}),
        (SPEC, {"size": 64}, {"size": 64}),
        (SPEC, {}, {"page_size": 24}),
        (SPEC, {}, {"page_size": 128}),
        (SPEC, {}, {"page_size": 4}),
    ],
)
def test_it_is_not_for_everything(spec: AttentionSpec, q: dict[str, Any], pages: dict[str, Any]) -> None:
    assert part_with(spec, queries_like(256, **q), pages_like(**pages)) is None
