"""The ends of a product of few rows, in the registers in which its sums are: see `few_row_kernel`.

What a result is made of besides the sums is asked for when the program begins, so that nothing waits for it at the end.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from quire.ops.gpu.hopper.cluster_sums import Pairs, Sources
from quire.ops.gpu.hopper.code_fragments import (
    BY_COLUMN,
    BY_PRODUCT,
    BY_ROW,
    WIDE,
    Thread,
    assembly,
    empty,
    fragments,
    in_registers,
    is_less,
    number,
    times,
    total,
)
from quire.ops.gpu.hopper.memory_numbers import load_bits, rounded, store, widened
from quire.ops.gpu.hopper.row_factors import blocks_of_squares, over_octets
from quire.ops.gpu.hopper.row_fragments import COLUMNS, by_place, pair, zero

TILE = 16  # outputs of a warp, for each 64
LOG2_E = 1.4426950408889634


class Spots(NamedTuple):
    """The places of a thread's sums."""

    rows: int  # that there are
    warp: Any
    lane: Any
    octet: Any
    quad: Any

    @classmethod
    def of(cls, rows: int) -> "Spots":
        own = Thread.own()
        return cls(rows, own.warp, own.lane, own.octet, own.quad)

    def output(self, tall: int, half: int) -> Any:
        """Of those of the program."""
        return total(times(self.warp, TILE), self.octet, tall * WIDE + half * 8)

    def row(self, eight: int, which: int) -> Any:
        return total(times(self.quad, 2), eight * COLUMNS + which)

    def is_row(self, row: Any) -> Any | None:
        """None: all are there."""
        return is_less(row, self.rows) if self.rows % COLUMNS else None

    def known_row(self, row: Any) -> Any:
        """The same, or the last that is there."""
        return arith.minui(row, number(self.rows - 1)) if self.rows % COLUMNS else row


# Kinds are no tuples, which would be equal to those of other kinds: programs are kept by them.


@dataclass(frozen=True)
class Sum:
    """Sums, rounded."""

    dtype: Any
    pieces: ClassVar[int] = 1

    def results(self, x: Any, outputs: int) -> tuple[Any, ...]:
        return (_like((len(x), outputs), self.dtype),)

    def load(self, given: Sequence[Any], start: Any, shape: tuple[int, int], rows: int) -> tuple[jax.Array, ...]:
        return ()

    def places(self, results: Sequence[Any], start: Any, outputs: int) -> list[Any]:
        return [results[0].at[:, pl.ds(start, outputs)]]

    def store(self, spots: Spots, pairs: Pairs, loaded: Sequence[Any], places: Sequence[Any], stride: int) -> None:
        (out,) = places
        for (tall, eight, half), two in pairs.items():
            for which, one in enumerate(two):
                row = spots.row(eight, which)
                where = total(times(row, stride), spots.output(tall, half))
                store(spots.is_row(row), out, where, one, self.dtype)


@dataclass(frozen=True)
class Gate:
    """silu(gates) * ups, of 64 outputs each: a thread has both at the same place."""

    dtype: Any
    pieces: ClassVar[int] = 2

    def results(self, x: Any, outputs: int) -> tuple[Any, ...]:
        return (_like((len(x), outputs // 2), self.dtype),)

    def load(self, given: Sequence[Any], start: Any, shape: tuple[int, int], rows: int) -> tuple[jax.Array, ...]:
        return ()

    def places(self, results: Sequence[Any], start: Any, outputs: int) -> list[Any]:
        return [results[0].at[:, pl.ds(start, outputs // 2)]]

    def store(self, spots: Spots, pairs: Pairs, loaded: Sequence[Any], places: Sequence[Any], stride: int) -> None:
        (out,) = places
        talls = 1 + max(tall for tall, _, _ in pairs)
        for (tall, eight, half), gates in pairs.items():
            if tall >= talls // 2:
                continue
            ups = pairs[tall + talls // 2, eight, half]
            for which, (gate, up) in enumerate(zip(gates, ups, strict=True)):
                row = spots.row(eight, which)
                where = total(times(row, stride), spots.output(tall, half))
                store(spots.is_row(row), out, where, arith.mulf(_silu(gate), up), self.dtype)


@dataclass(frozen=True)
class Add:
    """x and sums, rounded; that times the weight of a norm, and squares of it, of which that lacks a factor of each
    row (`row_factors`). Given: x, the weight."""

    dtype: Any
    weight_dtype: Any
    offset: float
    pieces: ClassVar[int] = 1

    def results(self, x: Any, outputs: int) -> tuple[Any, ...]:
        both = (_like((len(x), outputs), self.dtype),) * 2
        return *both, _like((blocks_of_squares(outputs), len(x)), jnp.float32)

    def load(self, given: Sequence[Any], start: Any, shape: tuple[int, int], rows: int) -> tuple[jax.Array, ...]:
        residual, weight = given
        outputs, _ = shape
        parts = residual.at[:, pl.ds(start, outputs)], weight.at[pl.ds(start, outputs)]
        found: tuple[jax.Array, ...] = self._loader(shape, rows, residual.shape[1])(*parts)
        return found

    def _loader(self, shape: tuple[int, int], rows: int, stride: int) -> Callable[..., Any]:
        """Bits of x [outputs, tokens] and of the weight [outputs]."""
        outputs, tokens = shape

        def load(_: Any, residual: Any, weight: Any) -> Any:
            spots, layouts = Spots.of(rows), (BY_PRODUCT.to_mgpu(), BY_ROW.to_mgpu())
            wide, tall_only = empty(layouts[0], shape), empty(layouts[1], (outputs,))
            for index, at in enumerate(np.ndindex(tall_only.shape)):
                one = llvm.mlir_undef(ir.VectorType.get((1,), ir.F32Type.get()))
                bits = load_bits(weight, spots.output(*divmod(index, 2)), self.weight_dtype)
                tall_only[at] = llvm.insertelement(one, bits, number(0))
            for (tall, eight, half), at in by_place(wide).items():
                known = [spots.known_row(spots.row(eight, which)) for which in range(2)]
                wheres = [total(times(row, stride), spots.output(tall, half)) for row in known]
                wide[at] = pair(*(load_bits(residual, where, self.dtype) for where in wheres))
            return fragments(wide, layouts[0]), fragments(tall_only, layouts[1])

        results = (
            plgpu.ShapeDtypeStruct((outputs, tokens), jnp.float32, BY_PRODUCT),
            plgpu.ShapeDtypeStruct((outputs,), jnp.float32, BY_ROW),
        )
        return in_registers((plgpu.RefType(), plgpu.RefType()), results, load)

    def places(self, results: Sequence[Any], start: Any, outputs: int) -> list[Any]:
        sums, normal, squares = results
        columns, parts = pl.ds(start, outputs), pl.ds(lax.div(start, TILE), outputs // TILE)
        return [sums.at[:, columns], normal.at[:, columns], squares.at[parts, :]]

    def store(self, spots: Spots, pairs: Pairs, loaded: Sequence[Any], places: Sequence[Any], stride: int) -> None:
        (wide, tall_only), (sums, normal, squares) = loaded, places
        residual = by_place(wide.registers)
        weights = [vector.extract(register, [], [0]) for register in tall_only.registers.flat]
        of_rows: dict[tuple[int, int, int], Any] = {}  # squares, by 64 outputs and row
        for (tall, eight, half), two in pairs.items():
            weight = arith.addf(widened(weights[2 * tall + half], self.weight_dtype), _known(self.offset))
            for which, one in enumerate(two):
                row = spots.row(eight, which)
                where = total(times(row, stride), spots.output(tall, half))
                bits = vector.extract(wide.registers[residual[tall, eight, half]], [], [which])
                _, whole = rounded(arith.addf(widened(bits, self.dtype), one), self.dtype)
                store(spots.is_row(row), sums, where, whole, self.dtype)
                store(spots.is_row(row), normal, where, arith.mulf(whole, weight), self.dtype)
                place = tall, eight, which
                of_rows[place] = arith.addf(of_rows.get(place, zero()), arith.mulf(whole, whole))
        for (tall, eight, which), of_row in of_rows.items():
            row, part = spots.row(eight, which), total(spots.warp, tall * (WIDE // TILE))
            where = total(times(part, spots.rows), row)
            is_there = arith.andi(is_less(spots.lane, 4), is_less(row, spots.rows))
            store(is_there, squares, where, over_octets(of_row), jnp.float32)


Epilogue = Sum | Gate | Add


def finish(
    epilogue: Epilogue, sources: Sources, rows: int, stride: int, *, has_factors: bool, num_loaded: int, num_places: int
) -> Callable[..., None]:
    """The results of sums [outputs, tokens] of each group, of the factors of their rows, if they have some, and of what
    is loaded. `parts` is shared memory for the sums of all groups of a program."""

    def put(_: Any, sums: Any, *given: Any) -> None:
        of_rows, loaded = given[:has_factors], given[has_factors : has_factors + num_loaded]
        parts, *places = given[has_factors + num_loaded :]
        pairs: Pairs = {
            place: [vector.extract(sums.registers[at], [], [which]) for which in range(2)]
            for place, at in by_place(sums.registers).items()
        }
        if sources.num_groups > 1:
            sources.exchange(parts, pairs)
        with utils.when(sources.is_own()) if sources.num_groups > 1 else nullcontext():
            if sources.num_groups > 1:
                pairs = sources.added(parts, pairs)
            for factors in of_rows:
                pairs = _scaled(pairs, factors.registers)
            epilogue.store(Spots.of(rows), pairs, loaded, places, stride)

    refs = (plgpu.RefType(),) * (1 + num_places)
    arrays = BY_PRODUCT, *(BY_COLUMN,) * has_factors, *(BY_PRODUCT, BY_ROW)[:num_loaded]
    return in_registers((*arrays, *refs), None, put)


def _scaled(pairs: Pairs, factors: Any) -> Pairs:
    of_rows = list(factors.flat)  # by eight rows
    return {
        place: [arith.mulf(one, vector.extract(of_rows[place[1]], [], [which])) for which, one in enumerate(two)]
        for place, two in pairs.items()
    }


def _silu(value: Any) -> Any:
    kind = ir.F32Type.get()
    power = assembly(kind, [arith.mulf(value, _known(-LOG2_E))], "ex2.approx.f32 $0, $1;", "=f,f", is_pure=True)
    given = [value, arith.addf(power, _known(1.0))]
    return assembly(kind, given, "div.full.f32 $0, $1, $2;", "=f,f,f", is_pure=True)


def _known(value: float) -> Any:
    return utils.c(value, ir.F32Type.get())


def _like(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]
