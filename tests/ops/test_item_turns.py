"""The turns of workers, step by step as Python, against a plain list of work."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.gpu.hopper.item_turns import ItemTurns, fetch_blocks


class Item(NamedTuple):
    name: Any
    num_blocks: Any
    head: Any


@pytest.mark.parametrize(("count", "heads", "workers"), [(0, 2, 3), (1, 1, 4), (5, 2, 3), (7, 1, 2)])
def test_workers_fetch_each_block_of_all_items_once(count: int, heads: int, workers: int) -> None:
    blocks = np.random.default_rng(count).integers(1, 4, count)
    padding = [[100 + index, 1] for index in range(3)]
    items = jnp.asarray([*enumerate(blocks), *padding], jnp.int32)
    found = []
    for worker in range(workers):
        work = ItemTurns(Item, worker, items, jnp.int32(count * heads), heads, workers)
        begun: list[Any] = []
        fetched: list[Any] = []

        def begin(turn: Any, item: Item, begun: list[Any] = begun) -> None:
            begun.append((int(turn), int(item.name), int(item.head)))

        def fetch(before: Any, pages: tuple[Any, ...], item: Item, fetched: list[Any] = fetched) -> None:
            assert (before, int(pages[0])) == (len(fetched), int(item.name))
            fetched.append((int(item.name), int(item.head), int(pages[1])))

        with jax.disable_jit():
            fetch_blocks(work, lambda item, block: (item.name, block), begin, fetch)
        assert [turn for turn, *_ in begun] == [*range(len(begun))]
        each = [(name, head, block) for _, name, head in begun for block in range(blocks[name])]
        assert fetched == each
        found += fetched
    assert sorted(found) == [
        (name, head, block) for name in range(count) for head in range(heads) for block in range(blocks[name])
    ]
