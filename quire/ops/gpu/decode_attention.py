"""Attention of decodes over pages: a list of work that a fixed number of programs share.

The time is that of reading keys and values, and contexts differ in length. So contexts are divided by position into
parts of PART positions, or of a multiple of it, and programs take parts from a list that is as long as the contexts
need. Few long contexts fill the device as many short ones do, and one compiled program serves any number of rows. The
parts of a row depend only on its own length.

Positions that several rows share are read once for all of them by `shared_attention`, before this kernel. The parts of
such a row are the shared ones, then its own. Where the summation order is fixed, packs of a few rows read the shared
positions instead: they are entries of the list (`decode_list`).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.attention.spec import AttentionSpec
from quire.ops.gpu.coded_softmax import CodedSoftmax, columns_of, in_float16, kept
from quire.ops.gpu.decode_list import MAX_PARTS, PART, decode_list
from quire.ops.gpu.parts import Parts, combine_parts
from quire.ops.gpu.shared_attention import SharedParts, shared_attention
from quire.ops.gpu.shared_attention import Tiling as SharedTiling
from quire.ops.gpu.tiles import (
    Block,
    Softmax,
    array,
    least_dot,
    load_masked,
    load_sinks,
    power_of_two,
    whole,
)
from quire.ops.pages import SHARED_STEP, PagedContext

NUM_PROGRAMS = 4224  # 32 for each SM of a large GPU; a few run at a time, and SMs that finish early take more


class Tiling(NamedTuple):
    block: int  # positions read at a time
    num_warps: int
    num_stages: int  # blocks on their way at a time


# The fastest of a dozen on an H200, whether contexts are alike or not, whole or in parts; and for codes, which are half
# the bytes and are widened by each warp.
TILING, OF_CODES = Tiling(32, 2, 3), Tiling(16, 1, 3)
# By the most rows times heads of keys: fewer are cut into smaller parts, as there is room for more programs.
OF_FEW = ((64, 64, TILING),)
OF_FEW_CODES = ((256, 64, Tiling(32, 1, 3)), (512, 128, OF_CODES))


def cut_of(is_coded: bool, rows_and_heads: int) -> tuple[int, Tiling]:
    """The positions of a part, and the tiling, of so many rows times heads of keys."""
    of_few, of_many = (OF_FEW_CODES, OF_CODES) if is_coded else (OF_FEW, TILING)
    return next(((part, tiling) for most, part, tiling in of_few if rows_and_heads <= most), (PART, of_many))


def decode_attention(q: jax.Array, context: PagedContext, **options: Any) -> jax.Array:
    """Attention of the first tokens of q [t, k, g, h], one of each tile; [t, k, g, h], of which the others are not
    written. The options are those of `decode_parts`."""
    return combine_parts(*decode_parts(q, context, **options), interpret=options.get("interpret", False))


def decode_parts(
    q: jax.Array,
    context: PagedContext,
    *,
    part: int | None = None,
    tiling: Tiling | None = None,
    shared_tiling: SharedTiling | None = None,
    in_packs: bool = False,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, Parts]:
    """Results [t, k, g, h] of the contexts that are one part; how many parts each has; and those of the others.
    `in_packs`: tokens that share positions read them together, with the bits that each has alone."""
    spec, pages, tiles, sinks = context.spec, context.pages, context.tiles, context.sinks
    heads, count = q.shape[1], len(tiles)
    own_part, own_tiling = cut_of(len(pages) > 2, count * heads)
    part, tiling = part or own_part, tiling or own_tiling
    done: SharedParts | None = None
    if tiles.shared is not None and spec.sees_all and not in_packs:
        done = shared_attention(q, context, MAX_PARTS, tiling=shared_tiling, interpret=interpret)
    packed = _rows_of(q, len(pages)) // power_of_two(q.shape[2]) if in_packs and spec.sees_all else 1  # tokens
    work = decode_list(spec, tiles, part, done, packed)
    own_sinks = [] if sinks is None else [sinks]
    operands = [context.page_table, *work.of_entries(), q, *pages, *own_sinks, *work.of_shared()]
    aliases = {}
    shapes = [array(q.shape, q.dtype), *Parts.shapes(MAX_PARTS, q[:count])]
    if done is not None:
        operands += done.parts
        aliases = {len(operands) - 3 + index: 1 + index for index in range(3)}
        shapes[1:] = [array(part.shape, part.dtype) for part in done.parts]
    constants = _Constants(tiling.block, part, len(pages), done is not None, work.num_packs, interpret)
    out, *parts = pl.pallas_call(
        partial(_read_parts, spec, constants),
        grid=(heads, max(1, min(count * MAX_PARTS, NUM_PROGRAMS // heads))),
        in_specs=[whole(operand) for operand in operands],
        out_specs=[whole(shape) for shape in shapes],
        out_shape=shapes,
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(num_warps=tiling.num_warps, num_stages=tiling.num_stages),
        interpret=interpret,
        name="decode_attention",
    )(*operands)
    return out, work.counts, Parts(*parts)


def _rows_of(q: Any, num_page_arrays: int) -> int:
    """Rows of a product with queries, padding included; codes of eight bits have them as columns."""
    return columns_of(q.shape[2]) if _in_halves(q, num_page_arrays) else least_dot(q.shape[2])


def _in_halves(q: Any, num_page_arrays: int) -> bool:
    """True if queries meet codes, and do so in float16."""
    return num_page_arrays > 2 and q.dtype != jnp.float32


class _Constants(NamedTuple):
    """The constants of a compiled kernel."""

    block: int
    part: int
    num_page_arrays: int
    follows: bool  # parts that another kernel has read
    num_packs: int
    is_interpreted: bool

    def is_aligned(self, spec: AttentionSpec) -> bool:
        """True if all parts begin with a block."""
        return spec.sees_all and self.part % self.block == 0 and SHARED_STEP % self.block == 0


class _Context(NamedTuple):
    """Positions of a row, from `low` to before `last`, in blocks. A block's positions outside that range are clamped to
    it: they have no weight, and their own places may hold anything."""

    table: Any
    slot: Any
    head: Any
    low: Any
    last: Any
    block: int
    page_size: int
    is_aligned: bool  # `low` is the first position of a block
    is_interpreted: bool

    def load_pages(self, index: Any) -> Any:
        """The page of a block, or those of its positions [s]. After the last block, they are those of the last."""
        if self.page_size % self.block == 0:
            index = jnp.minimum(index, jax.lax.div(self.last - 1, self.block))
            return self.table[self.slot, jax.lax.div(index, self.page_size // self.block)]
        return self.table[self.slot, jax.lax.div(self._positions(index), self.page_size)]

    def load(self, refs: Any, page: Any, index: Any, is_feature: Any) -> list[Any]:
        offsets = self._offsets(index)[:, None]
        page = page if page.ndim == 0 else page[:, None]
        size = refs[0].shape[-1]
        features = jnp.arange(len(is_feature))[None, :]
        where = page, offsets, self.head, features
        mask = None if size == len(is_feature) else jnp.broadcast_to(is_feature[None, :], (self.block, len(is_feature)))
        return [load_masked(ref, where, mask) for ref in refs]

    def load_scales(self, refs: Any, page: Any, index: Any) -> tuple[Any, ...]:
        return tuple(ref[page, self.head, self._offsets(index)] for ref in refs)

    def softmax(self, spec: AttentionSpec, q: jax.Array, refs: Any, is_feature: Any, empty: Softmax) -> Softmax:
        """Of queries over all positions. Codes meet queries that are in float16, or else in float32."""
        is_in_float16 = len(refs) > 2 and q.dtype == jnp.float16

        def read(index: jax.Array, state: Any) -> Any:
            so_far, page, scales = state
            next_page = self.load_pages(index + 1)
            keys, values = self.load(refs[:2], page, index, is_feature)
            next_scales = self.load_scales(refs[2:], next_page, index + 1)
            at = index * self.block + jnp.arange(self.block)
            seen = (at < self.last) if spec.sees_all else (at >= self.low) & (at < self.last)
            if is_in_float16:
                values = values if self.is_interpreted else kept(values, self.head)
                added = so_far.add(spec, q, Block(keys, values, *scales), seen)
            else:
                are_seen = jnp.broadcast_to(seen[None, :], (len(q), self.block))
                added = so_far.add(spec, q, Block(keys, values, *scales), are_seen)
            return added, next_page, next_scales

        first = self.low // self.block
        page = self.load_pages(first)
        state = CodedSoftmax.begin(empty) if is_in_float16 else empty, page, self.load_scales(refs[2:], page, first)
        softmax, *_ = jax.lax.fori_loop(first, (self.last + self.block - 1) // self.block, read, state)
        return softmax.ended() if is_in_float16 else softmax  # type: ignore[no-any-return]

    def _positions(self, index: Any) -> Any:
        return jnp.clip(index * self.block + jnp.arange(self.block), self.low, self.last - 1)

    def _offsets(self, index: Any) -> Any:
        """[s], within pages."""
        if self.page_size % self.block:
            return jax.lax.rem(self._positions(index), self.page_size)
        index = jnp.minimum(index, jax.lax.div(self.last - 1, self.block))
        start = index * self.block
        within = jnp.minimum(jnp.arange(self.block), self.last - 1 - start)
        within = within if self.is_aligned else jnp.maximum(within, self.low - start)
        return within + jax.lax.rem(index, self.page_size // self.block) * self.block


def _read_parts(
    spec: AttentionSpec,
    constants: _Constants,
    table_ref: Any,
    slots_ref: Any,
    ends_ref: Any,
    each_ref: Any,
    first_ref: Any,
    bounds_ref: Any,
    q_ref: Any,
    *others: Any,
) -> None:
    page_refs, beside = others[: constants.num_page_arrays], others[constants.num_page_arrays :]
    sinks, beside = beside[: spec.has_sinks], beside[spec.has_sinks :]
    shares = constants.follows or constants.num_packs > 0
    bases_ref, done_ref = beside[:2] if shares else (None, None)
    out_ref, outs, highest, totals = others[-4:]
    head, program, num_programs = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    _, _, group, size = q_ref.shape
    in_halves = _in_halves(q_ref, constants.num_page_arrays)
    queries, width = _rows_of(q_ref, constants.num_page_arrays), power_of_two(size)
    is_feature = jnp.arange(width) < size
    bounds = bounds_ref[...]  # of each entry's parts in the list

    def compute(turn: jax.Array, nothing: jax.Array) -> jax.Array:
        number = program + turn * num_programs
        entry = (bounds <= number).astype(jnp.int32).sum()
        before = jnp.where(bounds <= number, bounds, 0).max()
        done = 0 if done_ref is None else done_ref[entry]
        is_whole = (bounds_ref[entry] - before + done == 1) & (entry >= constants.num_packs)
        is_first = (number == before) & (done == 0) if constants.num_packs else number == before
        end, each = ends_ref[entry], each_ref[entry]
        begin = (first_ref[entry] + number - before) * each + (0 if bases_ref is None else bases_ref[entry])
        last = jnp.minimum(begin + each, end)
        token, query, is_query = entry, jnp.arange(queries), jnp.arange(queries) < group
        if constants.num_packs:
            token, query, is_query = _packed_rows(beside[2], entry, queries, group, outs.shape[1])
        real = is_query[:, None] & is_feature[None, :]
        at_query = token if token.ndim == 0 else token[:, None], head, query[:, None], jnp.arange(width)[None, :]
        q = plgpu.load(q_ref.at[at_query], mask=real, other=0.0)
        q = in_float16(q) if in_halves else q
        low = begin if spec.sees_all else jnp.maximum(begin, spec.first_seen(end - 1))
        flags = constants.is_aligned(spec), constants.is_interpreted
        context = _Context(table_ref, slots_ref[entry], head, low, last, constants.block, page_refs[0].shape[1], *flags)

        own_sinks = load_sinks(spec, sinks, head, query, is_first)
        softmax = context.softmax(spec, q, page_refs, is_feature, Softmax.begin(queries, width, own_sinks))
        plgpu.store(out_ref.at[at_query], softmax.result().astype(out_ref.dtype), mask=real & is_whole)
        at_part = done + number - before, token, head, query
        Parts(outs, highest, totals).store(spec, softmax, at_part, is_query & ~is_whole)
        return nothing

    count = (bounds.max() - program + num_programs - 1) // num_programs
    jax.lax.fori_loop(0, count, compute, jnp.int32(0))


def _packed_rows(members_ref: Any, entry: Any, queries: int, group: int, beyond: int) -> tuple[Any, Any, Any]:
    """The token and the query of each row of a product, and whether it has one. Padding has the token `beyond` all
    others: an interpreter of this kernel must not take it for one."""
    each = queries // members_ref.shape[1]
    row = jnp.arange(queries)
    token, query = members_ref[entry, jax.lax.div(row, each)], jax.lax.rem(row, each)
    return jnp.where(token < 0, beyond, token), query, (token >= 0) & (query < group)
