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

from engine_core.kernels.cpu_layout import BLOCK, CONTEXT, GROUP, KEY_LINES, X_BLOCK_BYTES, PoolFormat
from engine_core.kernels.cpu_memory import CACHE_LINE
from engine_core.kernels.cpu_source.dot import VF32, VI32, dot_bytes
from engine_core.kernels.cpu_source.pool import pool_floats
from engine_core.kernels.cpu_source.rounding import SCALE, START
from engine_core.kernels.cpu_source.tile import Emit

GROUPS = CONTEXT // GROUP
# A table of addresses, three for each of the groups of a context: first those of K, then of V, then of V's scales.
VALUES, VALUE_SCALES, PLACES = 8 * GROUPS, 16 * GROUPS, 24 * GROUPS  # bytes to where these begin, and of all
_FLOAT, _LINE = 4, 4 * GROUP  # bytes
_I32, _F32, _I64 = ir.IntType(32), ir.FloatType(), ir.IntType(64)


def score_tile(rows: int, groups: int, form: PoolFormat, width: int) -> Any:
    """An intrinsic that computes the scores of `rows` queries with `groups` groups of `GROUP` positions.

    `tile(queries, dim, keys, step, scores, scores_stride)`: queries are [rows, dim], or if K is int8 rounded rows, each
    by itself, not in groups; `keys` is the address of an address for each group, `VALUES` behind which is that of its
    values; lines of a key are `step` bytes apart. Strides are in floats. With each line but of int8, as much of each
    group's values is fetched, which are needed next. `width` is of the instruction for products of bytes.
    """

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        queries, dim, keys, step, scores, stride = values
        e = Emit(builder)
        total = e.accumulators(rows, groups, GROUP)
        if form.scaled:
            _add_rounded_scores(e, width, total, queries, dim, keys, step)
        else:
            _add_scores(e, form, total, queries, dim, keys, step)
        _store(e, total, _rows(e, scores, stride, rows))
        return context.get_dummy_value()

    @intrinsic
    def tile(typing_context, queries, dim, keys, step, scores, scores_stride):  # type: ignore[no-untyped-def]
        return types.void(*[types.int64] * 6), codegen

    return tile


def _add_scores(
    e: Emit, form: PoolFormat, total: list[list[Any]], queries: Any, dim: Any, keys: Any, step: Any
) -> None:
    b, size, groups = e.b, GROUP * form.item, len(total[0])
    query_rows = _rows(e, queries, dim, len(total))
    key_at, fetch_at = (_addresses(e, keys, table, groups) for table in (0, VALUES))
    with cgutils.for_range(b, dim, intp=_I64) as loop:
        line, start = b.mul(loop.index, e.const(size)), b.mul(loop.index, step)
        columns = [pool_floats(e, form, b.add(address, start)) for address in key_at]
        for address in fetch_at:
            e.prefetch(b.add(address, line), 0)
        for row, slots in zip(query_rows, total, strict=True):
            _add_products(e, columns, e.load(row, loop.index), slots)


def _add_rounded_scores(
    e: Emit, width: int, total: list[list[Any]], queries: Any, dim: Any, keys: Any, step: Any
) -> None:
    """Of int8: 32 dimensions are summed exactly, then scaled. Too short a time to fetch more than scales."""
    b, groups = e.b, len(total[0])
    blocks = b.sdiv(dim, e.const(BLOCK))
    starts = [b.add(queries, b.mul(blocks, e.const(X_BLOCK_BYTES * m))) for m in range(len(total))]
    key_at, scales_at = (_addresses(e, keys, table, groups) for table in (0, VALUE_SCALES))
    for address in scales_at:
        e.prefetch(address, 0)
    with cgutils.for_range(b, blocks, intp=_I64) as loop:
        line = b.mul(b.mul(loop.index, e.const(KEY_LINES)), step)
        query = [b.add(start, b.mul(loop.index, e.const(X_BLOCK_BYTES))) for start in starts]
        sums = [[e.broadcast(e.at(block, START, _I32), GROUP)] * groups for block in query]
        for number in range(KEY_LINES - 1):
            columns = [e.at(b.add(address, line), 0, VI32) for address in key_at]
            for m, block in enumerate(query):
                x = e.broadcast(e.at(block, number * 4, _I32), GROUP)
                sums[m] = [dot_bytes(e, *pair, x, width) for pair in zip(sums[m], columns, strict=True)]
            line = b.add(line, step)
        key_scales = [e.at(b.add(address, line), 0, VF32) for address in key_at]
        for block, row, slots in zip(query, sums, total, strict=True):
            scale = e.broadcast(e.at(block, SCALE, _F32), GROUP)
            for value, key_scale, slot in zip(row, key_scales, slots, strict=True):
                both = b.fmul(scale, key_scale)
                b.store(e.multiply_add(b.sitofp(value, VF32), both, b.load(slot)), slot)


def value_tile(rows: int, groups: int, form: PoolFormat) -> Any:
    """An intrinsic that adds to `groups` groups of `GROUP` dimensions of `rows` sums the values of some positions.

    `tile(weights, weights_stride, values, dim, count, sums, keys, step, ahead)`: weights are [rows, count], values
    [count, dim], sums [rows, dim]; strides in numbers. With each position, the first group of as many lines as are
    needed for all dimensions is fetched of `keys`, which are needed next and `step` bytes apart; of int8 the values
    `ahead`, too, which are needed after those.
    """
    size = form.item

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        weights, weights_stride, values_at, dim, count, sums, fetch, step, ahead = values
        e = Emit(builder)
        total = e.accumulators(rows, groups, GROUP)
        weight_rows, sum_rows = _rows(e, weights, weights_stride, rows), _rows(e, sums, dim, rows)
        for row, slots in zip(sum_rows, total, strict=True):
            for g, slot in enumerate(slots):
                builder.store(e.at(row, g * _LINE, VF32), slot)
        if form.scaled:  # the last lines, which a quarter as many as positions below do not reach
            for line in range(groups * GROUP // 4, groups * GROUP // BLOCK * KEY_LINES):
                e.prefetch(builder.add(fetch, builder.mul(step, e.const(line))), 0)
        with cgutils.for_range(builder, count, intp=_I64) as loop:
            start = builder.add(values_at, builder.mul(loop.index, builder.mul(dim, e.const(size))))
            columns = [pool_floats(e, form, builder.add(start, e.const(g * GROUP * size))) for g in range(groups)]
            number = builder.mul(loop.index, e.const(groups))
            if form.scaled:
                number = builder.lshr(number, e.const(2))  # a line has four dimensions
                after = builder.add(ahead, builder.mul(loop.index, dim))
                for at in range(0, groups * GROUP, CACHE_LINE):
                    e.prefetch(after, at)
            line = builder.add(fetch, builder.mul(number, step))
            for g in range(1 if form.scaled else groups):
                e.prefetch(builder.add(line, builder.mul(step, e.const(g))), 0)
            for row, slots in zip(weight_rows, total, strict=True):
                _add_products(e, columns, e.load(row, loop.index), slots)
        _store(e, total, sum_rows)
        return context.get_dummy_value()

    @intrinsic
    def tile(typing_context, weights, weights_stride, values, dim, count, sums, keys, step, ahead):  # type: ignore[no-untyped-def]
        return types.void(*[types.int64] * 9), codegen

    return tile


@numba.njit(inline="always")
def tile_rows(left):  # type: ignore[no-untyped-def]
    """How many of the rows that are left make the next tile."""
    return 6 if left >= 6 else 4 if left >= 4 else left


def score_tiles(groups: int, form: PoolFormat, width: int) -> Any:
    """A function that is a `score_tile` of `tile_rows`, whose number is its first argument."""
    one, two, three, four, six = (score_tile(rows, groups, form, width) for rows in (1, 2, 3, 4, 6))

    @numba.njit(inline="always")
    def tile(count, queries, dim, keys, step, scores, scores_stride):  # type: ignore[no-untyped-def]
        if count == 6:
            six(queries, dim, keys, step, scores, scores_stride)
        elif count == 4:
            four(queries, dim, keys, step, scores, scores_stride)
        elif count == 3:
            three(queries, dim, keys, step, scores, scores_stride)
        elif count == 2:
            two(queries, dim, keys, step, scores, scores_stride)
        else:
            one(queries, dim, keys, step, scores, scores_stride)

    return tile


def value_tiles(groups: int, form: PoolFormat) -> Any:
    """A function that is a `value_tile` of `tile_rows`, whose number is its first argument."""
    one, two, three, four, six = (value_tile(rows, groups, form) for rows in (1, 2, 3, 4, 6))

    @numba.njit(inline="always")
    def tile(count, weights, weights_stride, values, dim, used, sums, keys, step, ahead):  # type: ignore[no-untyped-def]
        if count == 6:
            six(weights, weights_stride, values, dim, used, sums, keys, step, ahead)
        elif count == 4:
            four(weights, weights_stride, values, dim, used, sums, keys, step, ahead)
        elif count == 3:
            three(weights, weights_stride, values, dim, used, sums, keys, step, ahead)
        elif count == 2:
            two(weights, weights_stride, values, dim, used, sums, keys, step, ahead)
        else:
            one(weights, weights_stride, values, dim, used, sums, keys, step, ahead)

    return tile


def _rows(e: Emit, start: Any, stride: Any, count: int) -> list[Any]:
    return [e.b.add(start, e.b.mul(stride, e.const(_FLOAT * m))) for m in range(count)]


def _addresses(e: Emit, places: Any, table: int, count: int) -> list[Any]:
    return [e.at(places, table + 8 * i, _I64) for i in range(count)]


def _store(e: Emit, total: list[list[Any]], rows: list[Any]) -> None:
    for row, slots in zip(rows, total, strict=True):
        for g, slot in enumerate(slots):
            e.put(e.b.load(slot), row, g * _LINE)


def _add_products(e: Emit, columns: list[Any], value: Any, slots: list[Any]) -> None:
    factor = e.broadcast(value, GROUP)
    for column, slot in zip(columns, slots, strict=True):
        e.b.store(e.multiply_add(column, factor, e.b.load(slot)), slot)
