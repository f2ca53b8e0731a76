"""The two inner loops of attention: scores of queries and keys, and sums of values.

An output is summed in one fixed order, over dimensions or over positions, whatever the tile's shape. So a row's result
does not depend on which rows are computed with it, bit for bit.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
import numba
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine_core.kernels.cpu_layout import GROUP
from engine_core.kernels.cpu_source.pool import pool_vector
from engine_core.kernels.cpu_source.tile import Emit

_FLOAT, _LINE = 4, 4 * GROUP  # bytes
_I64, _FLOATS = ir.IntType(64), ir.VectorType(ir.FloatType(), GROUP)


def score_tile(rows: int, groups: int, half: bool) -> Any:
    """An intrinsic that computes the scores of `rows` queries with `groups` groups of `GROUP` positions.

    `tile(queries, dim, keys, step, values, scores, scores_stride)`: queries are [rows, dim]; `keys` and `values` are
    the addresses of an address for each group; dimensions of a key are `step` bytes apart. Strides are in floats. With
    each dimension, as much of each group's values is fetched, which are needed next.
    """
    size = GROUP * (2 if half else 4)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        queries, dim, keys, step, fetch, scores, scores_stride = values
        e = Emit(builder)
        total = e.accumulators(rows, groups, GROUP)
        query_rows = _rows(e, queries, dim, rows)
        key_at, fetch_at = (_addresses(e, table, groups) for table in (keys, fetch))
        with cgutils.for_range(builder, dim, intp=_I64) as loop:
            line, start = builder.mul(loop.index, e.const(size)), builder.mul(loop.index, step)
            columns = [_column(e, builder.add(address, start), half) for address in key_at]
            for address in fetch_at:
                e.prefetch(builder.add(address, line), 0)
            for row, slots in zip(query_rows, total, strict=True):
                _add_products(e, columns, e.load(row, loop.index), slots)
        for row, slots in zip(_rows(e, scores, scores_stride, rows), total, strict=True):
            for g, slot in enumerate(slots):
                e.put(builder.load(slot), row, g * _LINE)
        return context.get_dummy_value()

    @intrinsic
    def tile(typing_context, queries, dim, keys, step, values, scores, scores_stride):  # type: ignore[no-untyped-def]
        return types.void(*[types.int64] * 7), codegen

    return tile


def value_tile(rows: int, groups: int, half: bool) -> Any:
    """An intrinsic that adds to `groups` groups of `GROUP` dimensions of `rows` sums the values of some positions.

    `tile(weights, weights_stride, values, dim, count, sums, keys, step)`: weights are [rows, count], values [count,
    dim], sums [rows, dim]; strides in numbers. With each position, the first of as many dimensions as groups are
    fetched of `keys`, which are needed next and `step` bytes apart.
    """
    size = 2 if half else 4

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        weights, weights_stride, values_at, dim, count, sums, fetch, step = values
        e = Emit(builder)
        total = e.accumulators(rows, groups, GROUP)
        weight_rows, sum_rows = _rows(e, weights, weights_stride, rows), _rows(e, sums, dim, rows)
        for row, slots in zip(sum_rows, total, strict=True):
            for g, slot in enumerate(slots):
                builder.store(e.at(row, g * _LINE, _FLOATS), slot)
        with cgutils.for_range(builder, count, intp=_I64) as loop:
            start = builder.add(values_at, builder.mul(loop.index, builder.mul(dim, e.const(size))))
            columns = [_column(e, builder.add(start, e.const(g * GROUP * size)), half) for g in range(groups)]
            line = builder.add(fetch, builder.mul(builder.mul(loop.index, e.const(groups)), step))
            for g in range(groups):
                e.prefetch(builder.add(line, builder.mul(step, e.const(g))), 0)
            for row, slots in zip(weight_rows, total, strict=True):
                _add_products(e, columns, e.load(row, loop.index), slots)
        for row, slots in zip(sum_rows, total, strict=True):
            for g, slot in enumerate(slots):
                e.put(builder.load(slot), row, g * _LINE)
        return context.get_dummy_value()

    @intrinsic
    def tile(typing_context, weights, weights_stride, values, dim, count, sums, keys, step):  # type: ignore[no-untyped-def]
        return types.void(*[types.int64] * 8), codegen

    return tile


@numba.njit(inline="always")
def tile_rows(left):  # type: ignore[no-untyped-def]
    """How many of the rows that are left make the next tile."""
    return 6 if left >= 6 else 4 if left >= 4 else left


def score_tiles(groups: int, half: bool) -> Any:
    """A function that is a `score_tile` of `tile_rows`, whose number is its first argument."""
    one, two, three, four, six = (score_tile(rows, groups, half) for rows in (1, 2, 3, 4, 6))

    @numba.njit(inline="always")
    def tile(count, queries, dim, keys, step, values, scores, scores_stride):  # type: ignore[no-untyped-def]
        if count == 6:
            six(queries, dim, keys, step, values, scores, scores_stride)
        elif count == 4:
            four(queries, dim, keys, step, values, scores, scores_stride)
        elif count == 3:
            three(queries, dim, keys, step, values, scores, scores_stride)
        elif count == 2:
            two(queries, dim, keys, step, values, scores, scores_stride)
        else:
            one(queries, dim, keys, step, values, scores, scores_stride)

    return tile


def value_tiles(groups: int, half: bool) -> Any:
    """A function that is a `value_tile` of `tile_rows`, whose number is its first argument."""
    one, two, three, four, six = (value_tile(rows, groups, half) for rows in (1, 2, 3, 4, 6))

    @numba.njit(inline="always")
    def tile(count, weights, weights_stride, values, dim, used, sums, keys, step):  # type: ignore[no-untyped-def]
        if count == 6:
            six(weights, weights_stride, values, dim, used, sums, keys, step)
        elif count == 4:
            four(weights, weights_stride, values, dim, used, sums, keys, step)
        elif count == 3:
            three(weights, weights_stride, values, dim, used, sums, keys, step)
        elif count == 2:
            two(weights, weights_stride, values, dim, used, sums, keys, step)
        else:
            one(weights, weights_stride, values, dim, used, sums, keys, step)

    return tile


def _column(e: Emit, address: Any, half: bool) -> Any:
    """16 numbers of the pool as floats."""
    value = e.at(address, 0, pool_vector(half))
    return e.b.fpext(value, _FLOATS) if half else value


def _rows(e: Emit, start: Any, stride: Any, count: int) -> list[Any]:
    return [e.b.add(start, e.b.mul(stride, e.const(_FLOAT * m))) for m in range(count)]


def _addresses(e: Emit, table: Any, count: int) -> list[Any]:
    return [e.at(table, 8 * i, _I64) for i in range(count)]


def _add_products(e: Emit, columns: list[Any], value: Any, slots: list[Any]) -> None:
    factor = e.broadcast(value, GROUP)
    for column, slot in zip(columns, slots, strict=True):
        e.b.store(e.multiply_add(column, factor, e.b.load(slot)), slot)
