"""The GPU's latent attention, interpreted, against the plain kernel; and the list of parts that it works through."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.ops.attention.spec import AttentionSpec
from quire.ops.attention.tiled_attention import tiled_attention
from quire.ops.gpu import kernels as gpu_kernels
from quire.ops.gpu.capability import GpuCapability
from quire.ops.gpu.kernels import GPU
from quire.ops.gpu.latent_attention import FEW, IN_LITTLE_MEMORY, MANY, SPLIT, Tiling, latent_attention, tiling_of
from quire.ops.gpu.latent_parts import ContextList, SplitPolicy, context_list, whole_contexts
from quire.ops.kernels import kernels_for
from quire.ops.pages import PagedContext
from tests.gpu.test_kernels import check, paged

SMALL = Tiling(16, 16, 4, 1)
# Queries, features of values, others, keys' heads: those of models, and such as powers of two are not.
SIZES = {"16 heads": (16, 32, 16, 1), "odd": (5, 20, 8, 1), "two heads of keys": (20, 48, 16, 2)}
TILINGS = {
    "heads in rows": SMALL,
    "slabs": SMALL._replace(slab=16),
    "slabs of more rows": SMALL._replace(slab=16, rows=32),
    "wide blocks": Tiling(64, 64, 4, 1),
}
CUTS = {"by load": SplitPolicy(16, 12), "whole": SplitPolicy(1000, 1), "few parts": SplitPolicy(32, 4)}


def spec_of(name: str) -> AttentionSpec:
    group, rank, others, heads = SIZES[name]
    return AttentionSpec(heads, group, rank + others, 0.2, value_dim=rank)


# Of contexts, each of several pages and blocks; more would take the interpreter longer.
POSITIONS = 320
plain_attention = jax.jit(tiled_attention)
compiled_list = jax.jit(context_list, static_argnums=(1, 2))


@cache
def compiled(tiling: Tiling, of_decodes: SplitPolicy, of_prefills: SplitPolicy) -> Any:
    def attend(q: jax.Array, context: PagedContext, out: jax.Array | None) -> jax.Array:
        cut = of_decodes if out is None else of_prefills  # there is a result already: that of the decodes
        return latent_attention(q, context, out, tiling=tiling, split=cut, interpret=True)

    return jax.jit(partial(gpu_kernels.latent_by, attend))


def compare(
    spec: AttentionSpec,
    places: list[tuple[int, int]],
    num_single: int,
    tiling: Tiling,
    cuts: tuple[SplitPolicy, SplitPolicy] = (SPLIT, SPLIT),
    **kind: Any,
) -> Any:
    """The result, which is that of the plain kernel."""
    width = -(-POSITIONS // kind["page_size"])
    q, (keys, _), table, tiles = paged(spec, kind["page_size"], kind["dtype"], places, num_single, width)
    lengths = [1] * num_single + [length for _, length in places[num_single:]]  # decodes without a context have a row
    tiles, tokens = replace(tiles, offsets=jnp.asarray(np.cumsum([0, *lengths[:-1]]), jnp.int32)), sum(lengths)
    context = PagedContext(spec, (keys, keys), table, tiles)
    expected = plain_attention(q, context)[:tokens, ..., : spec.value_dim]
    out = compiled(tiling, *cuts)(q, context)[:tokens]
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
def test_decodes_read_their_contexts_and_prefills_behind_them_theirs(
    name: str, tiling: str, cut: str, page_size: int, dtype: str
) -> None:
    """The shortest, some at the edges of blocks and pages, the longest, and rows without any."""
    longest = page_size * -(-POSITIONS // page_size)
    decodes = [*((start, 1) for start in (0, 14, 15, 16, 63, 64, 70, longest - 1)), (5, 0), (0, 0)]
    prefills = [(0, 32), (63, 20), (64, 1), (128, 0), (longest - 32, 32)]
    cuts = CUTS[cut], CUTS[cut]._replace(programs=100) if cut == "by load" else CUTS[cut]
    places = [*decodes, *prefills]
    out = compare(spec_of(name), places, len(decodes), TILINGS[tiling], cuts, page_size=page_size, dtype=dtype)
    assert (out[8:10] == 0).all()


def test_steps_without_decodes_or_without_contexts_are_computed() -> None:
    kind: dict[str, Any] = {"page_size": 16, "dtype": "float32"}
    compare(spec_of("odd"), [(0, 9), (40, 32)], 0, SMALL, **kind)
    cuts = SplitPolicy(16, 4), SPLIT
    compare(spec_of("odd"), [(0, 1), (100, 1)], 2, SMALL, cuts, **kind)
    out = compare(spec_of("odd"), [(0, 0), (0, 0)], 2, SMALL, cuts, **kind)
    assert (out == 0).all()


def cut_up(lengths: list[int], block: int, cut: SplitPolicy) -> ContextList:
    return jax.tree.map(np.asarray, compiled_list(jnp.asarray(lengths, jnp.int32), block, cut))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 3000), min_size=6, max_size=6),
    least=st.sampled_from([16, 100, 500]),
    programs=st.sampled_from([1, 3, 40]),
)
def test_parts_cover_each_context_once(lengths: list[int], least: int, programs: int) -> None:
    listed = cut_up(lengths, 16, SplitPolicy(least, programs))
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
    one = cut_up([64_000, 0, 0], 32, SplitPolicy(128, 264))
    assert 200 <= int(one.counts[0]) <= 264
    alike = cut_up([64_000] * 32, 32, SplitPolicy(128, 264))
    assert set(alike.counts.tolist()) == {8}
    many = cut_up([64_000] * 1000, 32, SplitPolicy(128, 264))
    assert int(many.counts.max()) == 1
    assert int(whole_contexts(jnp.asarray([5, 0], jnp.int32)).counts.sum()) == 1


def test_tilings_are_chosen_by_rows_and_memory() -> None:
    assert tiling_of(jnp.bfloat16, 16) == tiling_of(jnp.bfloat16, 16, IN_LITTLE_MEMORY) == FEW
    assert tiling_of(jnp.bfloat16, 128) == MANY
    assert tiling_of(jnp.bfloat16, 128, IN_LITTLE_MEMORY) == IN_LITTLE_MEMORY
    assert tiling_of(jnp.float32, 128).rows == 16
    capabilities = 7.5, 8.0, 8.6, 9.0, 12.0, None
    chosen = {computes: kernels_for("gpu", "bfloat16", gpu=GpuCapability.of(computes)) for computes in capabilities}
    little = {computes for computes, kernels in chosen.items() if kernels.attend_latent is not GPU.attend_latent}
    assert little == {7.5, 8.6, 12.0}
    assert chosen[7.5].attend_latent is gpu_kernels.plain_latent_attention
