"""Epilogues of products of few rows, in the registers that hold the sums: see `few_row_kernel`.

What an epilogue reads besides the sums is loaded when the program begins, so that nothing waits for it at the end.
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
from jaxlib.mlir.dialects import arith, vector

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
from quire.ops.gpu.hopper.row_factors import blocks_of_squares, over_octets
from quire.ops.gpu.hopper.row_fragments import COLUMNS, by_place, load_bits, pair, rounded, single, store, widened, zero

TILE = 16  # outputs of a warp in each 64
LOG2_E = 1.4426950408889634


class AccumulatorIndex(NamedTuple):
    """The output and the row of each of a thread's sums."""

    rows: int  # of the product; sums of others are padding
    warp: Any
    lane: Any
    octet: Any
    quad: Any

    @classmethod
    def of(cls, rows: int) -> "AccumulatorIndex":
        own = Thread.own()
        return cls(rows, own.warp, own.lane, own.octet, own.quad)

    def output(self, tall: int, half: int) -> Any:
        """Among the outputs of the program."""
        return total(times(self.warp, TILE), self.octet, tall * WIDE + half * 8)

    def row(self, eight: int, which: int) -> Any:
        return total(times(self.quad, 2), eight * COLUMNS + which)

    def is_real(self, row: Any) -> Any | None:
        """None: every row is real."""
        return is_less(row, self.rows) if self.rows % COLUMNS else None

    def real_row(self, row: Any) -> Any:
        """The row, or the last real one for padding."""
        return arith.minui(row, number(self.rows - 1)) if self.rows % COLUMNS else row


# No named tuples: those with equal fields would be equal, and compiled kernels are cached by the epilogue.


@dataclass(frozen=True)
class Sum:
    """Sums, rounded."""

    dtype: Any
    pieces: ClassVar[int] = 1

    def results(self, x: Any, outputs: int) -> tuple[Any, ...]:
        return (_like((len(x), outputs), self.dtype),)

    def load(self, inputs: Sequence[Any], start: Any, shape: tuple[int, int], rows: int) -> tuple[jax.Array, ...]:
        return ()

    def places(self, results: Sequence[Any], start: Any, outputs: int) -> list[Any]:
        return [results[0].at[:, pl.ds(start, outputs)]]

    def store(
        self, index: AccumulatorIndex, pairs: Pairs, loaded: Sequence[Any], places: Sequence[Any], stride: int
    ) -> None:
        (out,) = places
        for (tall, eight, half), two in pairs.items():
            for which, value in enumerate(two):
                row = index.row(eight, which)
                where = total(times(row, stride), index.output(tall, half))
                store(index.is_real(row), out, where, value, self.dtype)


@dataclass(frozen=True)
class Gate:
    """silu(gates) * ups, of 64 outputs each. A thread has a gate and its up at the same place."""

    dtype: Any
    pieces: ClassVar[int] = 2

    def results(self, x: Any, outputs: int) -> tuple[Any, ...]:
        return (_like((len(x), outputs // 2), self.dtype),)

    def load(self, inputs: Sequence[Any], start: Any, shape: tuple[int, int], rows: int) -> tuple[jax.Array, ...]:
        return ()

    def places(self, results: Sequence[Any], start: Any, outputs: int) -> list[Any]:
        return [results[0].at[:, pl.ds(start, outputs // 2)]]

    def store(
        self, index: AccumulatorIndex, pairs: Pairs, loaded: Sequence[Any], places: Sequence[Any], stride: int
    ) -> None:
        (out,) = places
        talls = 1 + max(tall for tall, _, _ in pairs)
        for (tall, eight, half), gates in pairs.items():
            if tall >= talls // 2:
                continue
            ups = pairs[tall + talls // 2, eight, half]
            for which, (gate, up) in enumerate(zip(gates, ups, strict=True)):
                row = index.row(eight, which)
                where = total(times(row, stride), index.output(tall, half))
                store(index.is_real(row), out, where, arith.mulf(_silu(gate), up), self.dtype)


@dataclass(frozen=True)
class Add:
    """x + sums, rounded; that times the weight of a norm; and its squares, from which the next product takes the norm's
    factor of each row (`row_factors`). Inputs: x, the weight."""

    dtype: Any
    weight_dtype: Any
    offset: float
    pieces: ClassVar[int] = 1

    def results(self, x: Any, outputs: int) -> tuple[Any, ...]:
        both = (_like((len(x), outputs), self.dtype),) * 2
        return *both, _like((blocks_of_squares(outputs), len(x)), jnp.float32)

    def load(self, inputs: Sequence[Any], start: Any, shape: tuple[int, int], rows: int) -> tuple[jax.Array, ...]:
        residual, weight = inputs
        outputs, _ = shape
        parts = residual.at[:, pl.ds(start, outputs)], weight.at[pl.ds(start, outputs)]
        loaded: tuple[jax.Array, ...] = self._loader(shape, rows, residual.shape[1])(*parts)
        return loaded

    def _loader(self, shape: tuple[int, int], rows: int, stride: int) -> Callable[..., Any]:
        """A function that loads the bits of x [outputs, tokens] and of the weight [outputs]."""
        outputs, tokens = shape

        def load(_: Any, residual: Any, weight: Any) -> Any:
            index, layouts = AccumulatorIndex.of(rows), (BY_PRODUCT.to_mgpu(), BY_ROW.to_mgpu())
            wide, tall_only = empty(layouts[0], shape), empty(layouts[1], (outputs,))
            for place, at in enumerate(np.ndindex(tall_only.shape)):
                tall_only[at] = single(load_bits(weight, index.output(*divmod(place, 2)), self.weight_dtype))
            for (tall, eight, half), at in by_place(wide).items():
                known = [index.real_row(index.row(eight, which)) for which in range(2)]
                wheres = [total(times(row, stride), index.output(tall, half)) for row in known]
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

    def store(
        self, index: AccumulatorIndex, pairs: Pairs, loaded: Sequence[Any], places: Sequence[Any], stride: int
    ) -> None:
        (wide, tall_only), (sums, normal, squares) = loaded, places
        residual = by_place(wide.registers)
        weights = [vector.extract(register, [], [0]) for register in tall_only.registers.flat]
        of_rows: dict[tuple[int, int, int], Any] = {}  # squares, by 64 outputs and row
        for (tall, eight, half), two in pairs.items():
            weight = arith.addf(widened(weights[2 * tall + half], self.weight_dtype), _constant(self.offset))
            for which, value in enumerate(two):
                row = index.row(eight, which)
                where = total(times(row, stride), index.output(tall, half))
                bits = vector.extract(wide.registers[residual[tall, eight, half]], [], [which])
                _, whole = rounded(arith.addf(widened(bits, self.dtype), value), self.dtype)
                store(index.is_real(row), sums, where, whole, self.dtype)
                store(index.is_real(row), normal, where, arith.mulf(whole, weight), self.dtype)
                place = tall, eight, which
                of_rows[place] = arith.addf(of_rows.get(place, zero()), arith.mulf(whole, whole))
        for (tall, eight, which), of_row in of_rows.items():
            row, part = index.row(eight, which), total(index.warp, tall * (WIDE // TILE))
            where = total(times(part, index.rows), row)
            is_there = arith.andi(is_less(index.lane, 4), is_less(row, index.rows))
            store(is_there, squares, where, over_octets(of_row), jnp.float32)


Epilogue = Sum | Gate | Add


def finish(
    epilogue: Epilogue, sources: Sources, rows: int, stride: int, *, has_factors: bool, num_loaded: int, num_places: int
) -> Callable[..., None]:
    """A function that stores an epilogue's results: of sums [outputs, tokens] of each group, the factors of rows, if
    any, what the epilogue has loaded, shared memory for the sums of all groups, and the places of results."""

    def put(_: Any, sums: Any, *others: Any) -> None:
        of_rows, loaded = others[:has_factors], others[has_factors : has_factors + num_loaded]
        parts, *places = others[has_factors + num_loaded :]
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
            epilogue.store(AccumulatorIndex.of(rows), pairs, loaded, places, stride)

    refs = (plgpu.RefType(),) * (1 + num_places)
    arrays = BY_PRODUCT, *(BY_COLUMN,) * has_factors, *(BY_PRODUCT, BY_ROW)[:num_loaded]
    return in_registers((*arrays, *refs), None, put)


def _scaled(pairs: Pairs, factors: Any) -> Pairs:
    of_rows = list(factors.flat)  # by eight rows
    return {
        place: [arith.mulf(value, vector.extract(of_rows[place[1]], [], [which])) for which, value in enumerate(two)]
        for place, two in pairs.items()
    }


def _silu(value: Any) -> Any:
    kind = ir.F32Type.get()
    power = assembly(kind, [arith.mulf(value, _constant(-LOG2_E))], "ex2.approx.f32 $0, $1;", "=f,f", is_pure=True)
    fraction = [value, arith.addf(power, _constant(1.0))]
    return assembly(kind, fraction, "div.full.f32 $0, $1, $2;", "=f,f,f", is_pure=True)


def _constant(value: float) -> Any:
    return utils.c(value, ir.F32Type.get())


def _like(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]
