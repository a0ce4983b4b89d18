"""The division of layers into page groups, and the arrays that follow from it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from quire.executor.layer_state import LayerPlace, PagedStates, PageLayout, SlotPlace, page_layout
from quire.models.registry import build_model
from quire.ops.attention.spec import AttentionSpec
from quire.ops.layer_spec import LayerSpec, LayerState
from quire.ops.recurrence import RecurrentSpec
from quire.reach import ChunkReach, Reach
from tests.models.cases import CASES

FULL = AttentionSpec(kv_heads=2, group=1, head_dim=8, scale=1.0)


def windowed(window: int) -> AttentionSpec:
    return replace(FULL, window=window)


def chunked(size: int) -> AttentionSpec:
    return replace(FULL, chunk=size)


def layout_of(layers: Sequence[LayerSpec], max_sequence_tokens: int = 8192, **options: Any) -> PageLayout:
    return page_layout(layers, 16, max_sequence_tokens, "bfloat16", **options)


def gemma3(num_layers: int, window: int) -> list[AttentionSpec]:
    return [FULL if index % 6 == 5 else windowed(window) for index in range(num_layers)]


@pytest.mark.parametrize(
    ("layers", "longest", "arrays", "groups"),
    [
        ([FULL] * 30, 8192, 30, (None,)),
        ([windowed(4096)] * 32, 8192, 32, (4096,)),
        ([windowed(4096)] * 32, 4096, 32, (None,)),
        ([windowed(4096), FULL] * 13, 8192, 13, (None, 4096)),  # gemma 2
        ([windowed(4096), FULL] * 13, 4096, 26, (None,)),
        (gemma3(34, 1024), 8192, 5, (None, *[1024] * 6)),
        (gemma3(26, 512), 32768, 4, (None, *[512] * 6)),
        (gemma3(62, 1024), 32768, 10, (None, *[1024] * 6)),
        ([FULL, *[windowed(4000)] * 9], 4096, 10, (None,)),  # division would save less than it pads
        ([windowed(8), windowed(16)] * 4, 64, 4, (8, 16)),
        ([chunked(8192)] * 3 + [FULL], 32768, 1, (None, *[ChunkReach(8192)] * 3)),  # llama 4
        ([chunked(8192), FULL] * 2, 8192, 4, (None,)),
        ([chunked(8), windowed(16)] * 4, 64, 4, (ChunkReach(8), 16)),
        ([chunked(8), replace(chunked(8), head_dim=16)], 64, 2, (ChunkReach(8),)),
        ([chunked(8), replace(chunked(16), head_dim=16)], 64, 2, (None,)),  # neither reads what the other does
        ([FULL, replace(windowed(8), head_dim=16)], 64, 2, (None,)),
        ([windowed(16), replace(windowed(8), head_dim=16)], 64, 2, (16,)),
    ],
)
def test_layers_are_divided_so_that_the_longest_sequence_takes_the_fewest_bytes(
    layers: list[AttentionSpec], longest: int, arrays: int, groups: tuple[Reach, ...]
) -> None:
    layout = layout_of(layers, longest)
    assert (len(layout.specs), layout.groups) == (arrays, groups)


@pytest.mark.parametrize("layers", [gemma3(34, 1024), [windowed(8), FULL] * 3, [FULL] * 4])
def test_each_layer_has_a_place_of_its_own_in_a_group_that_keeps_what_it_sees(layers: list[AttentionSpec]) -> None:
    layout = layout_of(layers)
    assert max(Counter(layout.places).values()) == 1
    for spec, place in zip(layers, layout.places, strict=True):
        assert layout.groups[place.group] == spec.window
        assert 0 <= place.array < len(layout.specs)


def test_one_group_keeps_the_largest_window_that_any_layer_sees() -> None:
    assert layout_of([windowed(8), windowed(16)], max_groups=1).groups == (16,)
    assert layout_of([windowed(8), FULL], max_groups=1).groups == (None,)


def test_bytes_and_arrays_of_pages_follow_from_the_layers() -> None:
    layout = layout_of([windowed(64), FULL] * 3)
    assert layout.page_bytes == 3 * 2 * 16 * 2 * 8 * 2  # layers, keys and values, positions, heads, features, bytes
    pages = layout.empty(num_pages=5)
    assert sum(array.nbytes for array in jax.tree.leaves(pages)) == 5 * layout.page_bytes
    assert {array.shape for array in jax.tree.leaves(pages)} == {(5, 16, 2, 8)}
    assert {str(array.dtype) for array in jax.tree.leaves(pages)} == {"bfloat16"}


def test_layers_of_several_groups_read_and_write_one_array_through_their_own_tables() -> None:
    layout = layout_of([windowed(64), FULL])
    (array,) = layout.empty(num_pages=2)
    states = PagedStates(layout, [array], ["full", "window"])
    assert [states.get(layer).access for layer in (0, 1)] == ["window", "full"]
    written = jax.tree.map(lambda old: old + jnp.ones((), old.dtype), array)
    after = states.put(0, LayerState(written, None))
    assert after.get(1) == LayerState(written, "full")
    assert states.get(1).arrays is array


def test_latent_attention_keeps_one_vector_of_each_token() -> None:
    model = build_model(CASES["deepseek_v3"])
    layout = page_layout(model.layers, 4, 64, "float32")
    assert layout.kinds == [("latent attention", 3, 3 * (20 + 8) * 4, "token")]
    assert all(len(arrays) == 1 for arrays in layout.structure(2))


def test_recurrent_layers_have_rows_for_slots_and_leave_pages_to_the_others() -> None:
    recurrent = RecurrentSpec(key_heads=2, group=3, key_dim=4, value_dim=5, channels=23, taps=4, corrects=True)
    layout = layout_of([recurrent, FULL, recurrent, windowed(64)])
    alone = layout_of([FULL, windowed(64)])
    assert layout.places == (SlotPlace(0), LayerPlace(0, 0), SlotPlace(1), LayerPlace(1, 0))
    assert (layout.groups, layout.page_bytes) == (alone.groups, alone.page_bytes)
    (inputs, matrices), _ = layout.empty_slots(num_slots=6)
    assert (inputs.shape, str(inputs.dtype)) == ((7, 3, 2, 23), "bfloat16")
    assert (matrices.shape, str(matrices.dtype)) == ((7, 2, 3, 4, 5), "float32")
    assert layout.slot_bytes == 2 * (3 * 2 * 23 * 2 + 2 * 3 * 4 * 5 * 4)
    assert layout.kinds[-1] == ("recurrent", 2, layout.slot_bytes, "sequence")
