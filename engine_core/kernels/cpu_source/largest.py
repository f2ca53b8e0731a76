"""The largest of each row of floats: where the first of them is, and what it is. NaN is largest.

A product that is to tell leaves the largest of each chunk of its outputs: for `LANES` rows at a time, chunk by chunk,
their values, then as many int32, which outputs they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine_core.kernels.cpu_layout import CHUNK
from engine_core.kernels.cpu_source.compiler import choose_side, floats, int32s, int64s, next_task, smaller, stack
from engine_core.kernels.cpu_source.rounding import TOGETHER, reduce_vectors
from engine_core.kernels.cpu_source.tile import Emit
from engine_core.kernels.cpu_source.vector import LANES, larger, row_max

PIECE = 512  # values whose largest is looked for at once
OUTPUTS = LANES * 4  # bytes from the values to these
CHUNK_BYTES = 2 * OUTPUTS

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_VF32, _VI32 = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)


def argmax() -> Callable[[Any], None]:
    """Arguments: counter, rows, x, x_stride, columns, out (int64), values."""

    def kernel(args: Any) -> None:
        rows, x, x_stride, columns, out, largest = args[1], args[2], args[3], args[4], int64s(args[5]), floats(args[6])
        side = choose_side(args)
        while True:
            row = next_task(args, side, rows)
            if row >= rows:
                break
            address = x + row * x_stride * 4
            values = floats(address)
            best, where = values[0], 0
            for start in range(0, columns, PIECE):
                count = smaller(PIECE, columns - start)
                highest = row_max(address + start * 4, count // LANES)
                for i in range(start + count // LANES * LANES, start + count):
                    if values[i] > highest or values[i] != values[i]:
                        highest = values[i]
                if highest > best or (highest != highest and best == best):
                    best, where = highest, start
            # Not `==`, which would not find a NaN. A piece without one has no NaN, for `best` would be it.
            while values[where] < best or (best != best and values[where] == values[where]):
                where += 1
            out[row], largest[row] = where, values[where]

    return kernel


def of_chunks() -> Callable[[Any], None]:
    """Arguments: counter, rows, the largest of each chunk, chunks, out (int64), values."""

    def kernel(args: Any) -> None:
        rows, known, chunks, out, largest = args[1], args[2], args[3], int64s(args[4]), floats(args[5])
        chosen = stack(LANES * 4)
        side, tasks = choose_side(args), (rows + LANES - 1) // LANES
        while True:
            task = next_task(args, side, tasks)
            if task >= tasks:
                break
            first = known + task * chunks * CHUNK_BYTES
            best_chunks(first, chunks, chosen)
            for row in range(task * LANES, smaller(task * LANES + LANES, rows)):
                lane = row % LANES
                at = first + int32s(chosen)[lane] * CHUNK_BYTES
                out[row], largest[row] = int32s(at + OUTPUTS)[lane], floats(at)[lane]

    return kernel


@intrinsic  # type: ignore[untyped-decorator]
def write_largest(typing_context: Any, rows: Any, first: Any, outputs: Any, known: Any) -> Any:
    """`write_largest(rows, first, outputs, known)`: of each of four rows of a chunk that lie side by side. The chunk
    begins with output `first`; those before `outputs` count."""

    def codegen(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        start, first, outputs, known = given
        e, b = Emit(builder), builder
        first = b.trunc(first, _I32)
        count = e.broadcast(b.sub(b.trunc(outputs, _I32), first), LANES)
        lowest = ir.Constant(_VF32, [-math.inf] * LANES)
        rows = []
        for row in range(TOGETHER):
            parts = [e.at(start, (row * CHUNK + at) * 4, _VF32) for at in range(0, CHUNK, LANES)]
            counts = [b.icmp_signed("<", _ids(at), count) for at in range(0, CHUNK, LANES)]
            rows.append([b.select(mask, part, lowest) for mask, part in zip(counts, parts, strict=True)])
        largest = reduce_vectors(e, [larger(e, *parts) for parts in rows], larger)
        e.put(largest, known, 0)
        for row, parts in enumerate(rows):
            most = e.broadcast(b.extract_element(largest, ir.Constant(_I32, row)), LANES)
            found = ir.Constant(_I32, 0)
            for number, part in enumerate(parts):
                both_nan = b.and_(b.fcmp_unordered("uno", part, part), b.fcmp_unordered("uno", most, most))
                hits = b.bitcast(b.or_(b.fcmp_ordered("==", part, most), both_nan), ir.IntType(LANES))
                found = b.or_(found, b.shl(b.zext(hits, _I32), ir.Constant(_I32, number * LANES)))
            place = b.cttz(found, ir.Constant(ir.IntType(1), 0))
            e.put(b.add(place, first), known, OUTPUTS + row * 4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


def _ids(first: int) -> Any:
    return ir.Constant(_VI32, [*range(first, first + LANES)])


@intrinsic  # type: ignore[untyped-decorator]
def best_chunks(typing_context: Any, known: Any, chunks: Any, out: Any) -> Any:
    """`best_chunks(known, chunks, out)`: the first chunk with the largest of all, int32, for each row of a
    group."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        known, chunks, out = values
        e, b = Emit(builder), builder
        where = cgutils.alloca_once_value(b, ir.Constant(_VI32, [0] * LANES))
        best = cgutils.alloca_once_value(b, e.at(known, 0, _VF32))
        with cgutils.for_range_slice(b, e.const(1), chunks, e.const(1), intp=_I64) as (chunk, _):
            value, so_far = e.at(b.add(known, b.mul(chunk, e.const(CHUNK_BYTES))), 0, _VF32), b.load(best)
            is_nan = b.and_(b.fcmp_unordered("uno", value, value), b.fcmp_ordered("ord", so_far, so_far))
            wins = b.or_(b.fcmp_ordered(">", value, so_far), is_nan)
            b.store(b.select(wins, value, so_far), best)
            b.store(b.select(wins, e.broadcast(b.trunc(chunk, _I32), LANES), b.load(where)), where)
        e.put(b.load(where), out, 0)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen
