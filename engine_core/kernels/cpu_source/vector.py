"""Vector loops over one row that numba's own loops do not turn into good code: exp, softmax, SiLU.

Lengths are multiples of 16 floats. Every row is summed in the same order, whatever else is done with it.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine_core.kernels.cpu_layout import BLOCK
from engine_core.kernels.cpu_memory import CACHE_LINE
from engine_core.kernels.cpu_source.tile import Emit

LANES = 16  # floats in a vector
SUMS = 4  # at once, as each has to wait for its last addition

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VF32, _VI32 = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_ZERO = ir.Constant(_VF32, [0.0] * LANES)
# exp(r) for |r| <= ln(2) / 2, by Chebyshev interpolation in double precision; relative error of exp under 1e-7, half a
# unit in the last place of a float.
_LN2_HIGH, _LN2_LOW = 0.693359375, math.log(2) - 0.693359375
_LOWEST, _HIGHEST = -87.0, 88.0
_DEGREE = 6
# Added to a small float, it leaves no bits behind the point, and in the lowest bits the exponent of 2 to that power.
_MAGIC = 1.5 * 2**23 + 127


def _coefficients() -> list[float]:
    half = math.log(2) / 2
    nodes = half * np.cos((2 * np.arange(_DEGREE + 1) + 1) * np.pi / (2 * _DEGREE + 2))
    return [float(c) for c in np.polynomial.polynomial.polyfit(nodes, np.exp(nodes), _DEGREE)]


def _constant(value: float) -> Any:
    return ir.Constant(_VF32, [value] * LANES)


def _exp(e: Emit, x: Any, sign: int = 1) -> Any:
    """exp of `sign` * x, 16 floats between the bounds; those beyond count as these. NaN stays NaN."""
    b = e.b
    low, high = sorted((sign * _LOWEST, sign * _HIGHEST))
    x = b.select(b.fcmp_ordered(">", _constant(low), x), _constant(low), x)  # one instruction, and a NaN is the second
    x = b.select(b.fcmp_ordered("<", _constant(high), x), _constant(high), x)
    shifted = e.multiply_add(x, _constant(sign / math.log(2)), _constant(_MAGIC))
    power = b.fsub(shifted, _constant(_MAGIC))
    r = e.multiply_add(power, _constant(-sign * _LN2_HIGH), x)
    r = e.multiply_add(power, _constant(-sign * _LN2_LOW), r)
    coefficients = [coefficient * sign**i for i, coefficient in enumerate(_coefficients())]
    value = _constant(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = e.multiply_add(value, r, _constant(coefficient))
    scale = b.shl(b.bitcast(shifted, _VI32), ir.Constant(_VI32, [23] * LANES))
    return b.fmul(value, b.bitcast(scale, _VF32))


def _across(e: Emit, vector: Any, combine: Any) -> Any:
    """One float from 16: halves combined until one is left."""
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        halves = [ir.Constant(ir.VectorType(_I32, lanes), [h * lanes + i for i in range(lanes)]) for h in (0, 1)]
        vector = combine(*(e.b.shuffle_vector(vector, vector, half) for half in halves))
    return e.b.extract_element(vector, ir.Constant(_I32, 0))


def larger(e: Emit, x: Any, y: Any) -> Any:
    """Of two floats or vectors; NaN is larger than any number."""
    first = e.b.or_(e.b.fcmp_ordered(">", x, y), e.b.fcmp_unordered("uno", x, x))
    return e.b.select(first, x, y)


@intrinsic  # type: ignore[untyped-decorator]
def row_max(typing_context: Any, row: Any, vectors: Any) -> Any:
    """`row_max(address, vectors)`: the largest of 16 * vectors floats; NaN if one of them is."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        row, vectors = values
        e = Emit(builder)
        best = cgutils.alloca_once_value(builder, _constant(-math.inf))
        with cgutils.for_range(builder, vectors, intp=_I64) as loop:
            value = e.load(row, builder.mul(loop.index, e.const(LANES)), LANES)
            builder.store(larger(e, value, builder.load(best)), best)

        return _across(e, builder.load(best), functools.partial(larger, e))

    return types.float32(types.int64, types.int64), codegen


def _visible(e: Emit, number: Any, begin: Any, end: Any) -> Any:
    """Which of the 16 floats of vector `number` are from `begin` on and before `end`."""
    b = e.b
    ids = b.add(e.broadcast(b.trunc(b.mul(number, e.const(LANES)), _I32), LANES), ir.Constant(_VI32, [*range(LANES)]))
    first, stop = (e.broadcast(b.trunc(bound, _I32), LANES) for bound in (begin, end))
    return b.and_(b.icmp_signed(">=", ids, first), b.icmp_signed("<", ids, stop))


@intrinsic  # type: ignore[untyped-decorator]
def visible_max(typing_context: Any, row: Any, vectors: Any, begin: Any, end: Any) -> Any:
    """`visible_max(address, vectors, begin, end)`: the largest of the floats from `begin` to `end`, if 16 * vectors
    reach so far; -inf if there are none. A NaN does not count."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        row, vectors, begin, end = values
        e = Emit(builder)
        lowest = _constant(-math.inf)
        best = cgutils.alloca_once_value(builder, lowest)

        def larger(x: Any, y: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", x, y), x, y)

        with cgutils.for_range(builder, vectors, intp=_I64) as loop:
            value = e.load(row, builder.mul(loop.index, e.const(LANES)), LANES)
            value = builder.select(_visible(e, loop.index, begin, end), value, lowest)
            builder.store(larger(value, builder.load(best)), best)

        return _across(e, builder.load(best), larger)

    return types.float32(*[types.int64] * 4), codegen


@intrinsic  # type: ignore[untyped-decorator]
def exp_row(typing_context: Any, row: Any, vectors: Any, begin: Any, end: Any, subtract: Any) -> Any:
    """`exp_row(address, vectors, begin, end, subtract)`: replaces x by exp(x - subtract) from `begin` to `end`, by 0
    elsewhere in 16 * vectors floats, and returns the sum.

    x - subtract is at most 0; below -87, where the result would be a denormal, it is 0.
    """

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        row, vectors, begin, end, subtract = values
        e = Emit(builder)
        largest = e.broadcast(subtract, LANES)
        total = cgutils.alloca_once_value(builder, _ZERO)
        with cgutils.for_range(builder, vectors, intp=_I64) as loop:
            at = builder.mul(loop.index, e.const(LANES))
            x = builder.fsub(e.load(row, at, LANES), largest)
            counts = builder.fcmp_unordered(">=", x, _constant(_LOWEST))
            value = builder.select(builder.and_(counts, _visible(e, loop.index, begin, end)), _exp(e, x), _ZERO)
            e.store(value, row, at)
            builder.store(builder.fadd(builder.load(total), value), total)
        return _across(e, builder.load(total), builder.fadd)

    return types.float32(*[types.int64] * 4, types.float32), codegen


@intrinsic  # type: ignore[untyped-decorator]
def square_sum(typing_context: Any, row: Any, vectors: Any) -> Any:
    """`square_sum(address, vectors)`: the sum of the squares of 16 * vectors floats."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        row, vectors = values
        e = Emit(builder)
        totals = [cgutils.alloca_once_value(builder, _ZERO) for _ in range(SUMS)]
        whole = builder.and_(vectors, e.const(-SUMS))
        for begin, end, count in ((e.const(0), whole, SUMS), (whole, vectors, 1)):
            with cgutils.for_range_slice(builder, begin, end, e.const(count), intp=_I64) as (first, _):
                for i, total in enumerate(totals[:count]):
                    value = e.load(row, builder.mul(builder.add(first, e.const(i)), e.const(LANES)), LANES)
                    builder.store(e.multiply_add(value, value, builder.load(total)), total)
        return _across(e, functools.reduce(builder.fadd, map(builder.load, totals)), builder.fadd)

    return types.float32(types.int64, types.int64), codegen


def silu_product(e: Emit, gate: Any, up: Any) -> Any:
    """gate / (1 + exp(-gate)) * up, 16 floats each."""
    sigmoid_inverse = e.b.fadd(_constant(1.0), _exp(e, gate, -1))
    return e.b.fmul(e.b.fdiv(gate, sigmoid_inverse), up)


def _combine_rows(operation: str) -> Any:
    """The code of an intrinsic `combine(x, y, out, vectors)`: `operation` of the builder on each number."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x, y, out, vectors = values
        e = Emit(builder)
        with cgutils.for_range(builder, vectors, intp=_I64) as loop:
            at = builder.mul(loop.index, e.const(LANES))
            e.store(getattr(builder, operation)(e.load(x, at, LANES), e.load(y, at, LANES)), out, at)
        return context.get_dummy_value()

    return codegen


@intrinsic  # type: ignore[untyped-decorator]
def add_rows(typing_context: Any, x: Any, y: Any, out: Any, vectors: Any) -> Any:
    """`add_rows(x, y, out, vectors)`: out = x + y, which may be the same memory."""
    return types.void(*[types.int64] * 4), _combine_rows("fadd")


@intrinsic  # type: ignore[untyped-decorator]
def multiply_rows(typing_context: Any, x: Any, y: Any, out: Any, vectors: Any) -> Any:
    """`multiply_rows(x, y, out, vectors)`: out = x * y, which may be the same memory."""
    return types.void(*[types.int64] * 4), _combine_rows("fmul")


@intrinsic  # type: ignore[untyped-decorator]
def copy_row(typing_context: Any, x: Any, out: Any, vectors: Any) -> Any:
    """`copy_row(x, out, vectors)`: out = x."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x, out, vectors = values
        e = Emit(builder)
        with cgutils.for_range(builder, vectors, intp=_I64) as loop:
            at = builder.mul(loop.index, e.const(LANES))
            e.store(e.load(x, at, LANES), out, at)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic  # type: ignore[untyped-decorator]
def dequantize_row(typing_context: Any, x: Any, blocks: Any, out: Any) -> Any:
    """`dequantize_row(x, blocks, out)`: floats of blocks of a scale in half precision and 32 int8."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x, blocks, out = values
        e = Emit(builder)
        with cgutils.for_range(builder, blocks, intp=_I64) as loop:
            block = builder.add(x, builder.mul(loop.index, e.const(BLOCK + 2)))
            scale = e.broadcast(builder.fpext(e.at(block, 0, ir.HalfType()), _F32), LANES)
            for half in range(BLOCK // LANES):
                integers = e.at(block, 2 + half * LANES, ir.VectorType(ir.IntType(8), LANES))
                at = builder.add(builder.mul(loop.index, e.const(BLOCK)), e.const(half * LANES))
                e.store(builder.fmul(builder.sitofp(integers, _VF32), scale), out, at)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic  # type: ignore[untyped-decorator]
def expect_row(typing_context: Any, row: Any, lines: Any) -> Any:
    """`expect_row(address, lines)`: have as many cache lines come, to be written to later. Any address will do."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        row, lines = values
        e = Emit(builder)
        with cgutils.for_range(builder, lines, intp=_I64) as loop:
            e.prefetch(builder.add(row, builder.mul(loop.index, e.const(CACHE_LINE))), 0, write=True)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def scale_row(typing_context: Any, x: Any, scale: Any, weight: Any, out: Any, vectors: Any) -> Any:
    """`scale_row(x, scale, weight, out, vectors)`: out = x * scale * weight, which may be the same memory."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x, scale, weight, out, vectors = values
        e = Emit(builder)
        factor = e.broadcast(scale, LANES)
        with cgutils.for_range(builder, vectors, intp=_I64) as loop:
            at = builder.mul(loop.index, e.const(LANES))
            e.store(builder.fmul(builder.fmul(e.load(x, at, LANES), factor), e.load(weight, at, LANES)), out, at)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, *[types.int64] * 3), codegen


@intrinsic  # type: ignore[untyped-decorator]
def rotate_head(typing_context: Any, source: Any, target: Any, cos: Any, sin: Any, half: Any) -> Any:
    """`rotate_head(source, target, cos, sin, half)`: turn the two halves of a head against one another.

    `half` is a multiple of 8; source and target may be the same memory.
    """

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        source, target, cos, sin, half = values
        e, lanes = Emit(builder), LANES // 2
        with cgutils.for_range(builder, builder.sdiv(half, e.const(lanes)), intp=_I64) as loop:
            at = builder.mul(loop.index, e.const(lanes))
            behind = builder.add(at, half)
            a, b = e.load(source, at, lanes), e.load(source, behind, lanes)
            c, s = e.load(cos, at, lanes), e.load(sin, at, lanes)
            e.store(builder.fsub(builder.fmul(a, c), builder.fmul(b, s)), target, at)
            e.store(builder.fadd(builder.fmul(b, c), builder.fmul(a, s)), target, behind)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@intrinsic  # type: ignore[untyped-decorator]
def silu_multiply(typing_context: Any, gate: Any, up: Any, out: Any, vectors: Any) -> Any:
    """`silu_multiply(gate, up, out, vectors)`: out = SiLU(gate) * up."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        gate, up, out, vectors = values
        e = Emit(builder)
        with cgutils.for_range(builder, vectors, intp=_I64) as loop:
            at = builder.mul(loop.index, e.const(LANES))
            e.store(silu_product(e, e.load(gate, at, LANES), e.load(up, at, LANES)), out, at)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen
