"""Norms, rotation and the writing of keys and values, in one launch: XLA would need six."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.attention.heads import Heads, joined
from quire.ops.attention.spread import run_of, signs
from quire.ops.gpu.tiles import array, power_of_two, product, whole
from quire.ops.pages import CodedPages, KVWriteTargets, Pages, coded, has_spread_keys
from quire.ops.weights.rounded_rows import ScaledSums

MOST_TOKENS = 8  # of a program
LEAST_TO_SPREAD = 16  # of a program, where keys are spread: rows of a product
MANY_TOKENS = 512  # from here on a program has all heads of a key: there are enough, and they share the angles


def place_heads(
    heads: Heads, pages: Pages, targets: KVWriteTargets, *, block: int | None = None, interpret: bool = False
) -> tuple[jax.Array, Pages]:
    """As `place` of step_attention. With a `block`, which is the number of tokens of a program, programs are
    alike whatever the number of tokens."""
    inputs, arrays = operands_of(heads)
    qkv = arrays[0]
    tokens, kv_heads, parts, size = qkv.shape
    together = parts if tokens >= MANY_TOKENS and block is None else 1
    least = LEAST_TO_SPREAD if has_spread_keys(pages[0].dtype) else 1
    block = max(least, block or min(MOST_TOKENS, power_of_two(tokens)))
    of_block = pl.BlockSpec((block,), lambda index, head, part: (index,))
    operands = [*targets, *arrays, *pages]
    shapes = [(tokens, kv_heads, parts - 2, size), *(array.shape for array in pages)]
    dtypes = [heads.qkv.dtype, *(array.dtype for array in pages)]
    out_shapes = [array(*of) for of in zip(shapes, dtypes, strict=True)]
    first = len(operands) - len(pages)
    q, *written = pl.pallas_call(
        partial(_place, inputs, together, len(pages)),
        grid=(-(-tokens // block), kv_heads, parts // together),
        in_specs=[of_block, of_block, *map(whole, operands[2:])],
        out_specs=[whole(shape) for shape in out_shapes],
        out_shape=out_shapes,
        input_output_aliases={first + index: 1 + index for index in range(len(pages))},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="place_heads",
    )(*operands)
    return q, CodedPages(*written) if isinstance(pages, CodedPages) else (written[0], written[1])


class HeadKernelInputs(NamedTuple):
    """The arrays of heads that a kernel is given, and the constants of norms."""

    q_norm: tuple[float, float] | None
    k_norm: tuple[float, float] | None
    has_scales: bool  # of sums of codes
    rotates: bool

    def reader(
        self, refs: list[Any], block: int, dtype: Any, every: int = 1
    ) -> tuple["HeadReader", tuple[Any | None, Any | None]]:
        """A reader of the heads of a program, and the norms of queries and of keys. Takes its arrays from the front of
        `refs`."""
        qkv_ref = refs.pop(0)
        scale_refs: list[Any] = [refs.pop(0) for _ in range(2 * self.has_scales)]
        rotation_refs: list[Any] = [refs.pop(0) for _ in range(2 * self.rotates)]
        q_norm, k_norm = ((norm, refs.pop(0)) if norm is not None else None for norm in (self.q_norm, self.k_norm))
        return HeadReader(qkv_ref, block, dtype, scale_refs, rotation_refs, every), (q_norm, k_norm)


def operands_of(heads: Heads) -> tuple[HeadKernelInputs, list[jax.Array]]:
    """The arrays of heads, that of all heads first."""
    if any(norm is not None and norm.weight.ndim > 1 for norm in (heads.q_norm, heads.k_norm)):
        heads = joined(*heads.finished())  # a norm over all heads, which no program sees together
    sums = heads.qkv
    arrays = [sums]
    if isinstance(sums, ScaledSums):
        arrays = [sums.sums, sums.rows[:, 0], sums.columns.reshape(sums.sums.shape[1:])]
    norms = [norm for norm in (heads.q_norm, heads.k_norm) if norm is not None]
    q_norm, k_norm = (None if norm is None else (norm.eps, norm.offset) for norm in (heads.q_norm, heads.k_norm))
    inputs = HeadKernelInputs(q_norm, k_norm, isinstance(sums, ScaledSums), heads.rotation is not None)
    return inputs, [*arrays, *(heads.rotation or ()), *(norm.weight for norm in norms)]


def _place(
    inputs: HeadKernelInputs,
    together: int,
    num_page_arrays: int,
    pages_ref: Any,
    offsets_ref: Any,
    qkv_ref: Any,
    *refs: Any,
) -> None:
    q_ref, *page_refs = refs[-1 - num_page_arrays :]
    heads, norm_refs = inputs.reader([qkv_ref, *refs], pages_ref.shape[0], q_ref.dtype)
    writer = PageWriter(heads, pages_ref, offsets_ref, page_refs)
    parts = qkv_ref.shape[2]
    token, head, feature, real = heads.token, heads.head, heads.feature, heads.real
    size = qkv_ref.shape[3]
    spread = partial(_spread, size, signs(run_of(size), q_ref.dtype) if has_spread_keys(page_refs[0].dtype) else None)
    if together == 1:
        part = pl.program_id(2)
        is_query, is_key = part < parts - 2, part == parts - 2
        x = heads.load(part, heads.features, real)
        out = heads.finished(x, part, [(norm_refs[0], is_query), (norm_refs[1], is_key)])
        out = spread(out)
        plgpu.store(q_ref.at[token, head, part, feature], out.astype(q_ref.dtype), mask=real & is_query)
        if num_page_arrays == 2:
            writer.store(0, out, is_key)
            writer.store(1, x, part == parts - 1)
            return

        @pl.when(part >= parts - 2)
        def _() -> None:
            writer.store_either(jnp.where(is_key, out.astype(jnp.float32), x.astype(jnp.float32)), is_key)

        return
    for query in range(parts - 2):
        part = jnp.int32(query)
        out = spread(heads.finished(heads.load(part, heads.features, real), part, [(norm_refs[0], True)]))
        plgpu.store(q_ref.at[token, head, part, feature], out.astype(q_ref.dtype), mask=real)
    key = jnp.int32(parts - 2)
    writer.store(0, spread(heads.finished(heads.load(key, heads.features, real), key, [(norm_refs[1], True)])), True)
    writer.store(1, heads.load(jnp.int32(parts - 1), heads.features, real), True)


class HeadReader:
    """Reads the queries, the key and the value of one key head, for the tokens of a program."""

    def __init__(
        self, qkv_ref: Any, block: int, dtype: Any, scale_refs: list[Any], rotation_refs: list[Any], every: int = 1
    ) -> None:
        """`scale_refs`: of rows and columns, if `qkv_ref` has sums of codes. `rotation_refs`: cosines and sines, if
        heads are rotated. Of tokens a program has one of `every` so many."""
        tokens, _, self.parts, self._size = qkv_ref.shape
        self._qkv_ref, self._dtype = qkv_ref, dtype
        self.head = pl.program_id(1)
        self.tokens = tokens_here = (pl.program_id(0) * block + jnp.arange(block)) * every
        self.is_token = tokens_here < tokens
        self.token = tokens_here[:, None]
        self.features = jnp.arange(power_of_two(self._size))
        self.feature = self.features[None, :]
        self.real = (self.token < tokens) & (self.feature < self._size)
        self._rotates = bool(rotation_refs)
        if self._rotates:
            self._half = half = rotation_refs[0].shape[1]
            self._partners = _partners(self.features, half)
            self._rotated = (self.token < tokens) & (self.feature < 2 * half)
            self._cos, self._sin = _load_rotation(rotation_refs, self.token, self.feature, self._rotated)
        self._column_ref = None
        if scale_refs:
            row_ref, self._column_ref = scale_refs
            self._row_scales = plgpu.load(row_ref.at[tokens_here], mask=self.is_token, other=0.0)[:, None]

    def load(self, part: Any, features: jax.Array, mask: jax.Array) -> jax.Array:
        """These features of a head as the projection gives them, with the scales of its sums."""
        other = 0 if self._qkv_ref.dtype == jnp.int32 else 0.0
        sums: jax.Array = plgpu.load(
            self._qkv_ref.at[self.token, self.head, part, features[None, :]], mask=mask, other=other
        )
        if self._column_ref is None:
            return sums
        columns = _load_row(self._column_ref, (self.head, part), features, self._size)
        return (sums.astype(jnp.float32) * self._row_scales * columns).astype(self._dtype)

    def finished(self, x: jax.Array, part: Any, norms: list[tuple[Any, Any]]) -> jax.Array:
        """A head with its norm and rotation applied; `norms` are (norm, whether it applies)."""
        mean = (x.astype(jnp.float32) * x.astype(jnp.float32)).sum(axis=1, keepdims=True) / self._size
        out = _normal(x, self.features, self._size, mean, norms)
        if not self._rotates:
            return out
        partners = self.load(part, self._partners, self._rotated)
        other = _normal(partners, self._partners, self._size, mean, norms)
        signed = jnp.where(self.feature < self._half, -other.astype(jnp.float32), other)
        return (out * self._cos + signed * self._sin).astype(out.dtype)


class PageWriter:
    """Writes the key and the value of a key head, for the tokens of a program."""

    def __init__(self, heads: HeadReader, pages_ref: Any, offsets_ref: Any, page_refs: list[Any]) -> None:
        """`page_refs`: of keys and values, and of their scales if they are codes."""
        self._heads, self._refs = heads, page_refs
        self._pages, self._offsets = (plgpu.load(ref, mask=heads.is_token, other=0) for ref in (pages_ref, offsets_ref))
        self.is_real = self._pages > 0

    def store(self, kind: int, x: jax.Array, applies: Any) -> None:
        """Keys (0) or values (1) of the tokens, if it `applies`."""
        heads, codes_ref = self._heads, self._refs[kind]
        where = self._pages[:, None], self._offsets[:, None], heads.head, heads.feature
        if len(self._refs) == 2:
            plgpu.store(codes_ref.at[where], x.astype(codes_ref.dtype), mask=heads.real & applies)
            return
        self._store_codes(kind, *coded(x, codes_ref.dtype), applies)

    def store_either(self, x: jax.Array, is_key: Any) -> None:
        """Codes of keys, or else of values."""
        codes_and_scales = coded(x, self._refs[0].dtype)
        self._store_codes(0, *codes_and_scales, is_key)
        self._store_codes(1, *codes_and_scales, ~is_key)

    def _store_codes(self, kind: int, codes: jax.Array, scales: jax.Array, applies: Any) -> None:
        heads = self._heads
        where = self._pages[:, None], self._offsets[:, None], heads.head, heads.feature
        plgpu.store(self._refs[kind].at[where], codes, mask=heads.real & applies)
        scale_ref = self._refs[2 + kind].at[self._pages, heads.head, self._offsets]
        plgpu.store(scale_ref, scales, mask=heads.is_token & applies)


def _spread(size: int, matrix: jax.Array | None, heads: jax.Array) -> jax.Array:
    """Finished queries or keys [t, h], spread by the matrix if there is one."""
    if matrix is None:
        return heads
    return product(heads.reshape(-1, len(matrix)), matrix, 0).reshape(heads.shape) * (1.0 / math.sqrt(run_of(size)))


def _load_row(ref: Any, where: tuple[Any, ...], features: jax.Array, size: int) -> jax.Array:
    """Numbers [1, h] of these features. They are loaded as a vector: which thread has what is for the heads to say."""
    row: jax.Array = plgpu.load(ref.at[(*where, features)], mask=features < size, other=0.0)
    return row[None, :]


def _partners(features: jax.Array, half: int) -> jax.Array:
    """The feature that each turns with. Of a remainder, Triton knows that neighbours stay neighbours."""
    if len(features) == 2 * half:
        return jax.lax.rem(features + half, 2 * half)
    return jnp.where(features < half, features + half, jnp.maximum(features - half, 0))


def _load_rotation(refs: list[Any], token: jax.Array, feature: jax.Array, rotated: jax.Array) -> list[jax.Array]:
    """Cosines and sines of the angles by which features turn."""
    half = refs[0].shape[1]
    angle = jnp.where(feature < half, feature, feature - half)
    return [
        plgpu.load(ref.at[token, angle], mask=rotated, other=other) for ref, other in zip(refs, (1.0, 0.0), strict=True)
    ]


def _normal(
    values: jax.Array, features: jax.Array, size: int, mean: jax.Array, norms: list[tuple[Any, Any]]
) -> jax.Array:
    """Values of a head whose squares have this mean, under the norms that apply."""
    out = values
    for norm, applies in norms:
        if norm is not None:
            (eps, offset), ref = norm
            weight = _load_row(ref, (), features, size).astype(jnp.float32)
            scaled = values.astype(jnp.float32) * jax.lax.rsqrt(mean + eps) * (weight + offset)
            out = jnp.where(applies, scaled.astype(out.dtype), out)
    return out
