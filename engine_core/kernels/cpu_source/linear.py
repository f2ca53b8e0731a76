"""Linear layers: x W^T on packed weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

from engine_core.kernels.cpu_layout import (
    ADD,
    ASIDE_LINES,
    CHUNK,
    GATE,
    GROUP,
    STORE,
    TASK_NUMBERS,
    TASK_ROWS,
    X_BLOCK_BYTES,
    X_STEP,
    WeightFormat,
)
from engine_core.kernels.cpu_memory import CACHE_LINE
from engine_core.kernels.cpu_source.compiler import choose_side, int32s, int64s, next_task, smaller, stack
from engine_core.kernels.cpu_source.dot import dot_tile, panel_bytes
from engine_core.kernels.cpu_source.rounding import quantize_gated, quantize_row, rounded_row
from engine_core.kernels.cpu_source.tile import linear_tile
from engine_core.kernels.cpu_source.vector import LANES, add_rows, copy_row, expect_row

ROWS = 48  # rows of x in a task: they stay in the second-level cache
# Blocks of inputs that are unpacked at a time: with the rows they meet, they stay in the nearest cache.
PANEL, FEW_PANEL = 9, 18
FEW = 16  # rows up to which it is `FEW_PANEL`
ROW_BYTES = CHUNK * 4  # of sums


def integers(bits: int, minimum: bool, width: int, result: int = STORE) -> Callable[[Any], None]:
    """Arguments: counter, rows, x (rounded), weights, blocks, chunks, out, out_stride, bias, offset; for GATE also the
    attention whose KV blocks are fetched: num_tasks, tasks, positions, block_tables, table_stride as `attend` has them,
    of one query token each; keys, values, block_size, bytes of a block in each, and how many of these at most.

    `result`: STORE in `out`; ADD to it, the bias first; or GATE: SiLU of the product's first half, with the bias, times
    the second, rounded for the next product in `out`, whose rows have `out_stride` blocks.

    Several tiles of rows share the weights of a chunk: the first unpacks them into a panel, some blocks at a time. A
    thread draws its next task before it begins one, to have the weights of that come from memory meanwhile, front to
    back: the processor itself fetches ahead only of such a stream, and stops at the end of each page. With GATE the
    blocks that the thread will attend to come too, as attention alone would have to wait for them: a core asks for some
    16 cache lines at once and no more.
    """
    form, vectors = WeightFormat(bits, minimum), CHUNK // LANES
    aside = result == GATE
    alone1, alone2, alone4, alone8 = (dot_tile(form, rows, vectors, width, "", aside) for rows in (1, 2, 4, 8))
    first2, first4, first8 = (dot_tile(form, rows, vectors, width, "write", aside) for rows in (2, 4, 8))
    other1, other2, other4, other8 = (dot_tile(form, rows, vectors, width, "read", aside) for rows in (1, 2, 4, 8))
    block_bytes, panel_size = form.block_bytes, panel_bytes(vectors)
    half = block_bytes // 2

    finish, parts = _finish(result), 2 if result == GATE else 1

    def kernel(args: Any) -> None:
        rows, x, weights, blocks, chunks = args[1], args[2], args[3], args[4], args[5] // parts
        out, out_stride, bias, offset = args[6], args[7], args[8], args[9]
        panel = stack(FEW_PANEL * panel_size + parts * ROWS * ROW_BYTES)
        sums = panel + FEW_PANEL * panel_size
        tasks = chunks * ((rows + ROWS - 1) // ROWS)
        side = choose_side(args)
        kv_row, half_number, fetched, other, other_end = 0, 0, 0, panel, panel
        task = next_task(args, side, tasks)
        while task < tasks:
            following = next_task(args, side, tasks)
            place, first_row = task % chunks, task // chunks * ROWS
            last_row = smaller(rows, first_row + ROWS)
            all_rows = last_row - first_row
            alone = all_rows == 8 or all_rows == 4 or all_rows <= 2
            if result != GATE:
                for row in range(first_row, last_row):
                    expect_row(out + row * out_stride * 4 + place * ROW_BYTES, ROW_BYTES // CACHE_LINE)
            size = blocks if alone else FEW_PANEL if all_rows <= FEW else PANEL
            for part in range(parts):
                chunk, ahead = place + part * chunks, place + (part + 1) * chunks
                if part + 1 == parts:
                    ahead = (following if following < tasks else task) % chunks
                w = weights + chunk * blocks * block_bytes
                fetch = weights + ahead * blocks * block_bytes
                fetch_end = fetch + blocks * block_bytes
                for piece in range((blocks + size - 1) // size):
                    begin, row = piece * size, first_row
                    end = smaller(begin + size, blocks)
                    while row < last_row:
                        left = last_row - row
                        count = 8 if left >= 8 else 4 if left >= 4 else 2 if left >= 2 else 1
                        xr, o = rounded_row(x, row, blocks), sums + (part * ROWS + row - first_row) * ROW_BYTES
                        if aside and other >= other_end:
                            other = other_end = panel  # anything that is near
                            if kv_row < args[10] // 2 and fetched < args[19]:
                                other, last = half_block(args, side, kv_row, half_number)
                                other_end, fetched = other + args[18], fetched + 1
                                kv_row, half_number = (kv_row + 1, 0) if last else (kv_row, half_number + 1)
                        if alone:
                            if count == 8:
                                alone8(xr, w, panel, begin, end, o, fetch, other)
                            elif count == 4:
                                alone4(xr, w, panel, begin, end, o, fetch, other)
                            elif count == 2:
                                alone2(xr, w, panel, begin, end, o, fetch, other)
                            else:
                                alone1(xr, w, panel, begin, end, o, fetch, other)
                        elif row == first_row:
                            if count == 8:
                                first8(xr, w, panel, begin, end, o, fetch, other)
                            elif count == 4:
                                first4(xr, w, panel, begin, end, o, fetch, other)
                            else:
                                first2(xr, w, panel, begin, end, o, fetch, other)
                        else:
                            if count == 8:
                                other8(xr, w, panel, begin, end, o, fetch, other)
                            elif count == 4:
                                other4(xr, w, panel, begin, end, o, fetch, other)
                            elif count == 2:
                                other2(xr, w, panel, begin, end, o, fetch, other)
                            else:
                                other1(xr, w, panel, begin, end, o, fetch, other)
                        other += (end - begin) * ASIDE_LINES * CACHE_LINE
                        fetch += (end - begin) * half
                        if fetch >= fetch_end:
                            fetch = panel  # anything that is near
                        if end == blocks and part + 1 == parts:
                            finish(o, row, count, place, chunks, out, out_stride, bias, offset)
                        row += count
            task = following

    return kernel


@numba.njit(inline="always")
def half_block(args, side, row, number):  # type: ignore[no-untyped-def]
    """Where K or V of a block is that one of the rows at the front or the back attends to, and whether it is the last.

    `args` as in `integers`; K and V of a block have numbers one after the other.
    """
    task = int64s(args[11] + (args[10] - 1 - row if side else row) * TASK_NUMBERS * 8)
    table, position = int32s(args[13] + task[0] * args[14] * 4), int64s(args[12])[task[1]]
    return args[15 + number % 2] + table[number // 2] * args[18], (number + 1) // 2 * args[17] > position


def _finish(result: int) -> Any:
    """A function that does with the sums of some rows of a chunk what `result` says."""
    vectors, parts = CHUNK // LANES, 2 if result == GATE else 1

    @numba.njit(inline="always")
    def finish(sums, first_row, count, chunk, chunks, out, out_stride, bias, offset):  # type: ignore[no-untyped-def]
        at, gate = sums, sums - ROWS * ROW_BYTES
        for row in range(first_row, first_row + count):
            if bias != 0:
                add_rows(at, bias + (chunk + (parts - 1) * chunks) * ROW_BYTES, at, vectors)
            if result == GATE:
                if bias != 0:
                    half = at - ROWS * ROW_BYTES
                    add_rows(half, bias + chunk * ROW_BYTES, half, vectors)
            else:
                target = out + row * out_stride * 4 + chunk * ROW_BYTES
                if result == ADD:
                    add_rows(at, target, target, vectors)
                else:
                    copy_row(at, target, vectors)
            at += ROW_BYTES
        if result == GATE:  # a row has one block of a chunk, and the rows are of one group
            target = rounded_row(out, first_row, out_stride) + chunk * X_STEP
            quantize_gated(gate, sums, target, X_BLOCK_BYTES, count, offset)

    return finish


def quantize() -> Callable[[Any], None]:
    """Arguments: counter, rows, x, its stride in floats, blocks, out, offset."""

    def kernel(args: Any) -> None:
        rows, x, x_stride, blocks, out, offset = args[1], args[2], args[3], args[4], args[5], args[6]
        side, tasks = choose_side(args), (rows + TASK_ROWS - 1) // TASK_ROWS
        while True:
            first = next_task(args, side, tasks) * TASK_ROWS
            if first >= rows:
                break
            for row in range(first, smaller(first + TASK_ROWS, rows)):
                quantize_row(x + row * x_stride * 4, rounded_row(out, row, blocks), blocks, offset)

    return kernel


def floats() -> Callable[[Any], None]:
    """Arguments: counter, rows, x, x_stride, weights, blocks, chunks, out, out_stride."""
    form = WeightFormat(32)
    tile1, tile2 = linear_tile(1, CHUNK // GROUP), linear_tile(2, 2)
    tile4, tile6 = linear_tile(4, 1), linear_tile(6, 1)
    group_bytes, block_bytes = GROUP * 4, form.block_bytes

    def kernel(args: Any) -> None:
        rows, x, x_stride, weights, blocks = args[1], args[2], args[3], args[4], args[5]
        chunks, out, out_stride = args[6], args[7], args[8]
        tasks = chunks * ((rows + ROWS - 1) // ROWS)
        side = choose_side(args)
        while True:
            task = next_task(args, side, tasks)
            if task >= tasks:
                break
            chunk, first_row = task % chunks, task // chunks * ROWS
            last_row = smaller(rows, first_row + ROWS)
            for group in range(CHUNK // GROUP):
                w = weights + chunk * blocks * block_bytes + group * group_bytes
                row = first_row
                while row < last_row:
                    left = last_row - row
                    xr = x + row * x_stride * 4
                    o = out + (row * out_stride + chunk * CHUNK + group * GROUP) * 4
                    if left >= 6:
                        tile6(xr, x_stride, w, blocks, o, out_stride)
                        row += 6
                    elif left >= 4:
                        tile4(xr, x_stride, w, blocks, o, out_stride)
                        row += 4
                    elif left >= 2:
                        if group % 2 == 0:
                            tile2(xr, x_stride, w, blocks, o, out_stride)
                        row += 2
                    else:
                        if group == 0:
                            tile1(xr, x_stride, w, blocks, o, out_stride)
                        row += 1

    return kernel
