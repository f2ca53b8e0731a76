"""Writes K and V of a token to the pool, whose layout is that of a `PoolFormat`."""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine_core.kernels.cpu_layout import BLOCK, GROUP, KEY_LINES, KEY_OFFSET, X_BLOCK_BYTES, PoolFormat
from engine_core.kernels.cpu_source.rounding import SCALE, quantize_blocks, quantize_head
from engine_core.kernels.cpu_source.tile import Emit

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_FLOATS, _HALVES = ir.VectorType(_F32, GROUP), ir.VectorType(ir.HalfType(), GROUP)
_BYTES, _INTEGERS = ir.VectorType(ir.IntType(8), GROUP), ir.VectorType(_I32, GROUP)
_LARGEST = 65504.0  # of half precision: what is larger becomes this, as infinity would make everything NaN
_RAISE = KEY_OFFSET * 0x01010101 - 2**32  # the highest bit of four bytes: to turn it over is to add the offset


def pool_floats(e: Emit, form: PoolFormat, address: Any) -> Any:
    """16 numbers of V, or of K if that is no int8, as floats; those of int8 still lack their scale."""
    if form.scaled:
        return e.b.sitofp(e.b.sext(e.at(address, 0, _BYTES), _INTEGERS), _FLOATS)
    value = e.at(address, 0, _pool_vector(form))
    return value if form.bits == 32 else e.b.fpext(value, _FLOATS)


def key_writer(form: PoolFormat) -> Any:
    """An intrinsic `write(source, target, step, dim, scratch)`: a float vector at `source` to lines `step` bytes apart,
    the first at `target`. `scratch` has room for it as blocks of rounded inputs, one after the other."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        (_write_rounded_key if form.scaled else _write_key)(Emit(builder), form, *values)
        return context.get_dummy_value()

    @intrinsic
    def write(typing_context, source, target, step, dim, scratch):  # type: ignore[no-untyped-def]
        return types.void(*[types.int64] * 5), codegen

    return write


def value_writer(form: PoolFormat) -> Any:
    """An intrinsic `write(source, target, scale, dim)`: a float vector at `source`; its numbers side by side, and if it
    has a scale, that."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        source, target, scale, dim = values
        e = Emit(builder)
        vectors = builder.sdiv(dim, e.const(GROUP))
        if form.scaled:
            quantize_head(e, source, target, scale, vectors)
            return context.get_dummy_value()
        with cgutils.for_range(builder, vectors, intp=_I64) as loop:
            numbers = _load(e, form, source, builder.mul(loop.index, e.const(GROUP)))
            e.put(numbers, builder.add(target, builder.mul(loop.index, e.const(GROUP * form.item))), 0)
        return context.get_dummy_value()

    @intrinsic
    def write(typing_context, source, target, scale, dim):  # type: ignore[no-untyped-def]
        return types.void(*[types.int64] * 4), codegen

    return write


def _write_key(e: Emit, form: PoolFormat, source: Any, target: Any, step: Any, dim: Any, scratch: Any) -> None:
    b = e.b
    with cgutils.for_range(b, b.sdiv(dim, e.const(GROUP)), intp=_I64) as loop:
        first = b.mul(loop.index, e.const(GROUP))
        numbers = _load(e, form, source, first)
        for i in range(GROUP):
            place = b.add(target, b.mul(b.add(first, e.const(i)), step))
            e.put(b.extract_element(numbers, ir.Constant(_I32, i)), place, 0)


def _write_rounded_key(e: Emit, form: PoolFormat, source: Any, target: Any, step: Any, dim: Any, scratch: Any) -> None:
    b = e.b
    blocks = b.sdiv(dim, e.const(BLOCK))
    quantize_blocks(e, source, scratch, e.const(X_BLOCK_BYTES), blocks, e.const(0))
    with cgutils.for_range(b, blocks, intp=_I64) as loop:
        block = b.add(scratch, b.mul(loop.index, e.const(X_BLOCK_BYTES)))
        line = b.add(target, b.mul(b.mul(loop.index, e.const(KEY_LINES)), step))
        for i in range(KEY_LINES - 1):
            e.put(b.xor(e.at(block, i * form.cell, _I32), ir.Constant(_I32, _RAISE)), line, 0)
            line = b.add(line, step)
        e.put(e.at(block, SCALE, _F32), line, 0)


def _pool_vector(form: PoolFormat) -> Any:
    """The type of 16 numbers of the pool."""
    return _FLOATS if form.bits == 32 else _HALVES


def _load(e: Emit, form: PoolFormat, source: Any, first: Any) -> Any:
    """16 floats from number `first` on, as the pool has them."""
    value = e.load(source, first, GROUP)
    if form.bits == 32:
        return value
    for comparison, limit in ((">", _LARGEST), ("<", -_LARGEST)):
        bound = ir.Constant(_FLOATS, [limit] * GROUP)
        value = e.b.select(e.b.fcmp_ordered(comparison, value, bound), bound, value)
    return e.b.fptrunc(value, _HALVES)
