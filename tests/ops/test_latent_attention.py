"""The GPU's latent attention, interpreted, against the plain kernel; and the list of parts that it works through."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.ops.attention_spec import AttentionSpec
from quire.ops.gpu import kernels as gpu_kernels
from quire.ops.gpu.context_list import Cut, context_list, whole_contexts
from quire.ops.gpu.kernels import GPU
from quire.ops.gpu.latent_attention import FEW, IN_LITTLE_MEMORY, MANY, Tiling, latent_attention, tiling_of
from quire.ops.kernels import kernels_for
from quire.ops.tiled_attention import tiled_attention
from tests.gpu.test_kernels import WIDTH, check, paged

SMALL = Tiling(16, 16, 4, 1)
# Queries, features of values, others, keys' heads: those of models, and such as powers of two are not.
SIZES = {"16 heads": (16, 32, 16, 1), "odd": (5, 20, 8, 1), "two heads of keys": (20, 48, 16, 2)}
TILINGS = {
    "heads in rows": SMALL,
    "slabs": SMALL._replace(slab=16),
    "slabs of more rows": SMALL._replace(slab=16, rows=32),
    "wide blocks": Tiling(64, 64, 4, 1),
}
CUTS = {"by load": Cut(16, 12), "whole": Cut(1000, 1), "few parts": Cut(32, 4)}


def spec_of(name: str) -> AttentionSpec:
    group, rank, others, heads = SIZES[name]
    return AttentionSpec(heads, group, rank + others, 0.2, value_dim=rank)


def compare(
    spec: AttentionSpec, places: list[tuple[int, int]], num_single: int, how: dict[str, Any], **kind: Any
) -> Any:
    """The result, which is that of the plain kernel."""
    q, (keys, _), table, tiles = paged(spec, kind["page_size"], kind["dtype"], places, num_single)
    tokens = max(num_single, sum(length for _, length in places))
    expected = tiled_attention(spec, q, (keys, keys), table, tiles)[:tokens, ..., : spec.value_dim]
    attend = partial(latent_attention, interpret=True, **how)
    out = jax.jit(partial(gpu_kernels.latent_by, attend, spec))(q, (keys, keys), table, tiles, None)[:tokens]
    check(out, expected, kind["dtype"])
    return np.asarray(out, np.float32)


# Every size with every tiling; and in turns with every cut, page size and dtype, as each is compiled.
each_case = pytest.mark.parametrize(
    ("name", "tiling", "cut", "page_size", "dtype"),
    [
        (
            name,
            tiling,
            [*CUTS][(row + column) % 3],
            (16, 24, 64)[(row + column) % 3],
            ("bfloat16", "float32")[column % 2],
        )
        for row, name in enumerate(SIZES)
        for column, tiling in enumerate(TILINGS)
    ],
)


@each_case
def test_decodes_read_their_contexts(name: str, tiling: str, cut: str, page_size: int, dtype: str) -> None:
    """The shortest, some at the edges of blocks and pages, the longest, and rows without any."""
    lengths = (0, 14, 15, 16, 63, 64, page_size * WIDTH - 1)
    places = [*((start, 1) for start in lengths), (5, 0), (0, 0)]
    how = {"tiling": TILINGS[tiling], "cut": CUTS[cut]}
    out = compare(spec_of(name), places, len(places), how, page_size=page_size, dtype=dtype)
    assert (out[-2:] == 0).all()


@each_case
def test_tiles_of_prefills_read_their_contexts_and_leave_the_decodes_before_them(
    name: str, tiling: str, cut: str, page_size: int, dtype: str
) -> None:
    places = [(70, 1), (3, 1), (0, 32), (63, 20), (64, 1), (128, 0), (page_size * WIDTH - 32, 32)]
    parts = CUTS[cut]._replace(programs=100) if cut == "by load" else CUTS[cut]
    compare(spec_of(name), places, 2, {"tiling": TILINGS[tiling], "cut": parts}, page_size=page_size, dtype=dtype)


def test_steps_without_decodes_or_without_contexts_are_computed() -> None:
    compare(spec_of("odd"), [(0, 9), (40, 32)], 0, {"tiling": SMALL}, page_size=16, dtype="float32")
    out = compare(
        spec_of("odd"), [(0, 0), (0, 0)], 2, {"tiling": SMALL, "cut": Cut(16, 4)}, page_size=16, dtype="float32"
    )
    assert (out == 0).all()


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 3000), min_size=6, max_size=6),
    least=st.sampled_from([16, 100, 500]),
    programs=st.sampled_from([1, 3, 40]),
)
def test_parts_cover_each_context_once(lengths: list[int], least: int, programs: int) -> None:
    made = context_list(jnp.asarray(lengths, jnp.int32), 16, Cut(least, programs))
    listed = jax.tree.map(np.asarray, made)
    places: list[int] = []
    for run, length in enumerate(lengths):
        those = [at for at in range(len(listed.runs)) if listed.runs[at] == run and listed.ends[at] > listed.begins[at]]
        covered = [position for at in those for position in range(listed.begins[at], listed.ends[at])]
        assert covered == [*range(length)]
        assert all(listed.begins[at] % 16 == 0 for at in those)
        assert listed.counts[run] == len(those)
        if len(those) > 1:
            own = [int(listed.places[at]) for at in those]
            assert own == [*range(listed.first_places[run], listed.first_places[run] + len(own))]
            places += own
    assert len(set(places)) == len(places)
    assert not places or max(places) < listed.num_places


def test_few_contexts_are_cut_for_all_programs_and_many_for_none() -> None:
    one = context_list(jnp.asarray([64_000, 0, 0], jnp.int32), 32, Cut(128, 264))
    assert 200 <= int(one.counts[0]) <= 264
    alike = context_list(jnp.full(32, 64_000, jnp.int32), 32, Cut(128, 264))
    assert set(alike.counts.tolist()) == {8}
    many = context_list(jnp.full(1000, 64_000, jnp.int32), 32, Cut(128, 264))
    assert int(many.counts.max()) == 1
    assert int(whole_contexts(jnp.asarray([5, 0], jnp.int32)).counts.sum()) == 1


def test_tilings_are_chosen_by_rows_and_memory() -> None:
    assert tiling_of(jnp.bfloat16, 16) == tiling_of(jnp.bfloat16, 16, IN_LITTLE_MEMORY) == FEW
    assert tiling_of(jnp.bfloat16, 128) == MANY
    assert tiling_of(jnp.bfloat16, 128, IN_LITTLE_MEMORY) == IN_LITTLE_MEMORY
    assert tiling_of(jnp.float32, 128).rows == 16
    chosen = {
        computes: kernels_for("gpu", "bfloat16", computes=computes) for computes in (7.5, 8.0, 8.6, 9.0, 12.0, None)
    }
    little = {computes for computes, kernels in chosen.items() if kernels.attend_latent is not GPU.attend_latent}
    assert little == {7.5, 8.6, 12.0}
    assert chosen[7.5].attend_latent is gpu_kernels.plain_latent_attention
