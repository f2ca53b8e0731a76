"""Writes K and V of a token to the pool, as floats or in half precision.

Per layer the pool holds K as [blocks, kv_heads, head_dim, block_size] (a vector is 16 positions of one dimension) and V
as [blocks, kv_heads, block_size, head_dim] (a vector is 16 dimensions of one position).
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine_core.kernels.cpu_layout import GROUP
from engine_core.kernels.cpu_source.tile import Emit

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_FLOATS, _HALVES = ir.VectorType(ir.FloatType(), GROUP), ir.VectorType(ir.HalfType(), GROUP)
_LARGEST = 65504.0  # of half precision: what is larger becomes this, as infinity would make everything NaN


def pool_vector(half: bool) -> Any:
    """The type of 16 numbers of the pool."""
    return _HALVES if half else _FLOATS


def key_writer(half: bool) -> Any:
    """An intrinsic `write(source, target, step, dim)`: a float vector at `source`; its numbers `step` bytes apart."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        source, target, step, dim = values
        e = Emit(builder)
        with cgutils.for_range(builder, builder.sdiv(dim, e.const(GROUP)), intp=_I64) as loop:
            first = builder.mul(loop.index, e.const(GROUP))
            numbers = _load(e, source, first, half)
            for i in range(GROUP):
                place = builder.add(target, builder.mul(builder.add(first, e.const(i)), step))
                e.put(builder.extract_element(numbers, ir.Constant(_I32, i)), place, 0)
        return context.get_dummy_value()

    @intrinsic
    def write(typing_context, source, target, step, dim):  # type: ignore[no-untyped-def]
        return types.void(*[types.int64] * 4), codegen

    return write


def value_writer(half: bool) -> Any:
    """An intrinsic `write(source, target, dim)`: a float vector at `source`; its numbers side by side."""
    size = GROUP * (2 if half else 4)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        source, target, dim = values
        e = Emit(builder)
        with cgutils.for_range(builder, builder.sdiv(dim, e.const(GROUP)), intp=_I64) as loop:
            numbers = _load(e, source, builder.mul(loop.index, e.const(GROUP)), half)
            e.put(numbers, builder.add(target, builder.mul(loop.index, e.const(size))), 0)
        return context.get_dummy_value()

    @intrinsic
    def write(typing_context, source, target, dim):  # type: ignore[no-untyped-def]
        return types.void(*[types.int64] * 3), codegen

    return write


def _load(e: Emit, source: Any, first: Any, half: bool) -> Any:
    """16 floats from number `first` on, as the pool has them."""
    value = e.load(source, first, GROUP)
    if not half:
        return value
    for comparison, limit in ((">", _LARGEST), ("<", -_LARGEST)):
        bound = ir.Constant(_FLOATS, [limit] * GROUP)
        value = e.b.select(e.b.fcmp_ordered(comparison, value, bound), bound, value)
    return e.b.fptrunc(value, _HALVES)
