"""The largest of each row of floats: where the first of them is, and what it is. NaN is largest.

A product that is to tell leaves the largest of each chunk of its outputs: for `LANES` rows at a time, chunk by chunk, a
float for each row.
"""

from __future__ import annotations

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
CHUNK_BYTES = LANES * 4  # of the largest of a chunk

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
    """Arguments: counter, rows, x, x_stride, columns, out (int64), values, the largest of each chunk, chunks.

    The same, of rows whose chunks' largest are known. What is behind `columns` does not count.
    """

    def kernel(args: Any) -> None:
        rows, x, x_stride, columns, out, largest = args[1], args[2], args[3], args[4], int64s(args[5]), floats(args[6])
        known, chunks, whole = args[7], args[8], columns // CHUNK
        chosen = stack(CHUNK_BYTES)
        side, tasks = choose_side(args), (rows + LANES - 1) // LANES
        while True:
            task = next_task(args, side, tasks)
            if task >= tasks:
                break
            best_chunks(known + task * chunks * CHUNK_BYTES, whole, chosen)
            for row in range(task * LANES, smaller(task * LANES + LANES, rows)):
                values = floats(x + row * x_stride * 4)
                where = int32s(chosen)[row % LANES] * CHUNK
                best = values[where]
                for i in range(where + 1, smaller(where + CHUNK, columns)):
                    if values[i] > best or (values[i] != values[i] and best == best):
                        best, where = values[i], i
                for i in range(whole * CHUNK, columns):
                    if values[i] > best or (values[i] != values[i] and best == best):
                        best, where = values[i], i
                out[row], largest[row] = where, best

    return kernel


@intrinsic  # type: ignore[untyped-decorator]
def write_largest(typing_context: Any, rows: Any, out: Any) -> Any:
    """`write_largest(rows, out)`: of each of four rows of a chunk that lie side by side, to four floats."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        start, out = values
        e = Emit(builder)
        vectors = []
        for row in range(TOGETHER):
            parts = [e.at(start, (row * CHUNK + at) * 4, _VF32) for at in range(0, CHUNK, LANES)]
            vectors.append(larger(e, *parts))
        e.put(reduce_vectors(e, vectors, larger), out, 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def best_chunks(typing_context: Any, known: Any, chunks: Any, out: Any) -> Any:
    """`best_chunks(known, chunks, out)`: the first chunk with the largest of all, int32, for each row of a group; 0 if
    there is none."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        known, chunks, out = values
        e, b = Emit(builder), builder
        where = cgutils.alloca_once_value(b, ir.Constant(_VI32, [0] * LANES))
        best = cgutils.alloca_once(b, _VF32)
        with b.if_then(b.icmp_signed(">", chunks, e.const(0))):
            b.store(e.at(known, 0, _VF32), best)
        with cgutils.for_range_slice(b, e.const(1), chunks, e.const(1), intp=_I64) as (chunk, _):
            value, so_far = e.at(b.add(known, b.mul(chunk, e.const(CHUNK_BYTES))), 0, _VF32), b.load(best)
            is_nan = b.and_(b.fcmp_unordered("uno", value, value), b.fcmp_ordered("ord", so_far, so_far))
            wins = b.or_(b.fcmp_ordered(">", value, so_far), is_nan)
            b.store(b.select(wins, value, so_far), best)
            b.store(b.select(wins, e.broadcast(b.trunc(chunk, _I32), LANES), b.load(where)), where)
        e.put(b.load(where), out, 0)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen
