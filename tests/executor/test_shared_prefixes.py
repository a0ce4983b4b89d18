"""Decodes whose page tables begin alike are found, and no token depends on it."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.executor import shared_prefixes
from quire.executor.launch import Launch, Packer, num_shared_tiles
from quire.executor.programs import compiler, ladder
from quire.executor.programs.catalog import Catalog
from quire.executor.programs.ladder import StepShape
from quire.executor.programs.programs import Programs
from quire.executor.shared_prefixes import MIN_SAVED, PageTables, SharedTiles
from quire.ops.attention.step_attention import PLAIN
from quire.ops.attention.tiled_attention import tiled_attention
from quire.ops.pages import SHARED_STEP, TILE, PagedContext
from quire.request import Request, SamplingParams
from tests.executor.rig import FEW_SHAPES, Rig, config_of, quickly_compiled

PAGE_SIZE, TABLE_SIZE = 32, 300


def tables_of(lists: list[list[int]], groups: int = 1) -> tuple[PageTables, np.ndarray[Any, Any]]:
    """Slots with these pages, and so many positions computed; in several page groups, of which the first counts not."""
    tables = PageTables(len(lists), TABLE_SIZE, PAGE_SIZE, range(1, groups) if groups > 1 else (0,))
    for slot, pages in enumerate(lists):
        tables.start(slot, [[page + 1000 * group for page in pages] for group in range(groups)])
    return tables, np.array([len(pages) * PAGE_SIZE for pages in lists], np.int32)


def found_in(lists: list[list[int]], groups: int = 1) -> SharedTiles | None:
    tables, starts = tables_of(lists, groups)
    return tables.find(np.arange(len(lists), dtype=np.int32), starts)


def saved_by(found: SharedTiles) -> int:
    """Positions that are not read; a tile costs as much as two rows."""
    rows = (found.tokens >= 0).sum(axis=1)
    return int(((rows - 2) * found.lengths).sum())


def own(count: int, first: int) -> list[int]:
    return list(range(first, first + count))


def check(found: SharedTiles, lists: list[list[int]]) -> None:
    """Every row is in one tile at most, and begins with the pages of the tile's slot."""
    rows = [row for row in found.tokens.reshape(-1).tolist() if row >= 0]
    assert len(set(rows)) == len(rows)
    assert set(rows) == set(np.flatnonzero(found.tile_of >= 0).tolist())
    for tile, (tokens, slot, length) in enumerate(zip(found.tokens, found.slots, found.lengths, strict=True)):
        assert length > 0
        assert length % SHARED_STEP == length % PAGE_SIZE == 0
        for row in tokens[tokens >= 0].tolist():
            assert found.tile_of[row] == tile
            assert len(lists[row]) * PAGE_SIZE >= length
            assert lists[row][: length // PAGE_SIZE] == lists[slot][: length // PAGE_SIZE]


@pytest.mark.parametrize("groups", [1, 3])
def test_rows_that_begin_alike_are_tiles_of_what_they_share(groups: int) -> None:
    common, other = own(128, 1), own(65, 200)
    lists = [[*common, 300 + row] for row in range(40)] + [[*other, 400 + row] for row in range(20)] + [own(129, 500)]
    lists = [lists[index] for index in np.random.default_rng(0).permutation(len(lists))]
    found = found_in(lists, groups)
    assert found is not None
    check(found, lists)
    assert sorted(zip(found.lengths.tolist(), (found.tokens >= 0).sum(axis=1).tolist(), strict=True)) == [
        (64 * PAGE_SIZE, 20),  # the last page of 65 does not make a multiple
        (128 * PAGE_SIZE, 8),
        (128 * PAGE_SIZE, TILE),
    ]


def test_a_group_is_divided_where_its_parts_share_more() -> None:
    """All begin with four pages; most of them share many more."""
    lists = [[*own(4, 1), *own(160, 100), 900 + row] for row in range(32)]
    lists += [[*own(4, 1), *own(128, 1000 * (row + 1))] for row in range(20)]
    found = found_in(lists)
    assert found is not None
    check(found, lists)
    assert found.lengths.tolist() == [164 * PAGE_SIZE]
    assert found.tile_of.tolist() == [0] * 32 + [-1] * 20


def test_each_row_may_share_more_than_the_one_before_it() -> None:
    lists = [[*own(4 * row, 1), *own(2, 10_000 + 10 * row)] for row in range(1, 70)]
    found = found_in(lists)
    assert found is not None
    check(found, lists)


@pytest.mark.parametrize(
    "lists",
    [
        [own(128, 1 + 200 * row) for row in range(64)],
        [[*own(128, 1), 300], [*own(128, 1), 301], [*own(128, 1), 302]],
        [[*own(4, 1), 300 + row] for row in range(64)],
        [[1, *own(128, 300 * (row + 1))] for row in range(64)],
        [],
    ],
    ids=["none", "few rows", "few positions", "less than a step", "no rows"],
)
def test_nothing_is_shared_where_it_saves_little(lists: list[list[int]]) -> None:
    assert found_in(lists) is None


@given(data=st.data())
def test_any_tables_give_tiles_that_share_their_pages(data: st.DataObject) -> None:
    """Tables are a tree, and page numbers are drawn again, so that equal ones stand in different places, too."""
    lists: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        begin = data.draw(st.sampled_from([*lists, []])) if lists else []
        count = data.draw(st.integers(0, len(begin)))
        lists.append([*begin[:count], *own(data.draw(st.integers(0, 200 - count)), data.draw(st.integers(1, 300)))])
    if (found := found_in(lists)) is not None:
        check(found, lists)
        assert saved_by(found) >= MIN_SAVED


def test_positions_that_are_not_computed_are_not_shared() -> None:
    tables, starts = tables_of([own(200, 1)] * 32)
    starts[5] = 70 * PAGE_SIZE + 3
    starts[7] = 5
    found = tables.find(np.arange(32, dtype=np.int32), starts)
    assert found is not None
    assert all(starts[row] >= found.lengths[tile] for row, tile in enumerate(found.tile_of) if tile >= 0)


def test_a_slot_that_begins_anew_is_seen() -> None:
    tables, starts = tables_of([own(200, 1)] * 32)
    slots = np.arange(32, dtype=np.int32)
    before = tables.find(slots, starts)
    assert before is not None
    assert tables.find(slots, starts + 1) is before
    tables.start(3, [own(128, 200)])
    tables.append(4, [own(1, 900)])
    after = tables.find(slots, starts)
    assert after is not None
    assert (after.tile_of < 0).tolist() == [slot == 3 for slot in range(32)]
    fewer = tables.find(slots[4:], starts[4:])
    assert fewer is not None
    assert fewer.slots.tolist() == [4]


def attend(q: jax.Array, context: PagedContext) -> jax.Array:
    """Plain, over page tables of which the first pages are those that the tiles say are shared."""
    pages, page_table, tiles = context.pages, context.page_table, context.tiles
    if tiles.shared is None:
        return tiled_attention(q, context)
    shared, count = tiles.shared, tiles.num_single
    at = jnp.maximum(shared.tile_of, 0)
    lengths = jnp.where(shared.tile_of >= 0, shared.lengths[at], 0)
    is_shared = jnp.arange(page_table.shape[1]) * pages[0].shape[1] < lengths[:, None]
    own_tables = jnp.where(is_shared, page_table[shared.slots[at]], page_table[tiles.slots[:count]])
    slots = jnp.concatenate((len(page_table) + jnp.arange(count), tiles.slots[count:]))
    tables = jnp.concatenate((page_table, own_tables))
    return tiled_attention(q, replace(context, page_table=tables, tiles=replace(tiles, slots=slots)))


def test_answers_are_the_same_whether_pages_are_read_together_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone and beside prompts, sampled in all ways; every program that reads shared pages runs."""
    used: set[StepShape | tuple[str, int]] = set()
    launches: list[tuple[bool, bool]] = []
    get, with_shared = Programs.get, Packer.with_shared

    def seen(self: Programs, key: Any) -> Any:
        used.add(key)
        return get(self, key)

    def noted(self: Packer, launch: Launch) -> Launch:
        after = with_shared(self, launch)
        launches.append((launch.num_prefills > 0, after.shared is not None))
        return after

    monkeypatch.setattr(Programs, "get", seen)
    monkeypatch.setattr(Packer, "with_shared", noted)
    monkeypatch.setattr(compiler, "kernels_for", lambda *_: PLAIN._replace(attend=attend))
    for name, value in {"SHARED_STEP": 8, "MIN_SAVED": 1, "MIN_ROWS": 2, "TILE_COST": 1}.items():
        monkeypatch.setattr(shared_prefixes, name, value)
    monkeypatch.setattr(ladder, "SHARED_TOKENS", 16)
    kinds = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=5)]
    answers = []
    with quickly_compiled():
        for groups in ((), (0,)):
            rig = Rig(
                config_of("llama", num_hidden_layers=1),
                replace(FEW_SHAPES, burst=4, specialised=True, shared_groups=groups),
            )
            runs = []
            for kind in kinds:
                requests = [Request(1 + n, (*range(1, 26), 40 + n), 3 + 2 * n, sampling=kind, seed=n) for n in range(8)]
                runs += [rig.run(requests, max_burst=burst).tokens() for burst in (1, 4)]
            answers.append(runs)
            rig.executor.close()
    assert answers[0] == answers[1]
    assert {("shared", 4), StepShape(16)} <= used
    assert {(False, True), (True, True)} <= set(launches)


def test_with_one_order_of_sums_all_programs_of_decodes_read_shared_pages_together() -> None:
    shapes = replace(FEW_SHAPES, specialised=True, shared_groups=(0,), fixed_order=True)
    made = Catalog(shapes).keys
    steps = [key for key in made if isinstance(key, StepShape)]
    assert steps
    assert all(num_shared_tiles(shape, shapes) > 0 for shape in steps if not shape.scores)
    assert not any(shapes.ladder.shares(shape) for shape in steps if shape.scores)
    assert not any(key[0] == "shared" for key in made if not isinstance(key, StepShape))
