"""Linear layers: x W^T on packed weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

from engine_core.kernels.cpu_layout import (
    ADD,
    CHUNK,
    GATE,
    GROUP,
    LARGEST,
    PIECE,
    STORE,
    TASK_ROWS,
    X_BLOCK_BYTES,
    X_GROUP,
    X_STEP,
    WeightFormat,
)
from engine_core.kernels.cpu_memory import CACHE_LINE
from engine_core.kernels.cpu_source.compiler import choose_side, next_task, smaller, stack
from engine_core.kernels.cpu_source.dot import STEP, dot_tile, panel_bytes
from engine_core.kernels.cpu_source.largest import CHUNK_BYTES, write_largest
from engine_core.kernels.cpu_source.rounding import (
    STEPS_BYTES,
    TOGETHER,
    quantize_gated,
    quantize_row,
    rounded_row,
    scale_fixer,
)
from engine_core.kernels.cpu_source.tile import linear_tile
from engine_core.kernels.cpu_source.vector import LANES, add_rows, copy_row, expect_row, multiply_rows

ROWS = 48  # rows of x in a task: they stay in the second-level cache
ROW_BYTES = CHUNK * 4  # of sums


def integers(bits: int, minimum: bool, width: int, result: int = STORE) -> Callable[[Any], None]:
    """Arguments: counter, rows, x (rounded), weights, blocks, chunks, out, out_stride, bias, offset, units of weights.

    `result`: STORE in `out`; ADD to it, the bias first; GATE: SiLU of the product's first half, with the bias, times
    the second, rounded for the next product in `out`, whose rows have `out_stride` blocks; or LARGEST: STORE
    unless `out` is 0, and at `offset` the largest of each chunk (see `largest`), of as many outputs as one more
    argument says.

    Several tiles of rows share the weights of a chunk: the first unpacks them into a panel, a piece at a time. A
    thread draws its next task before it begins one, to have the weights of that come from memory meanwhile, front to
    back: the processor itself fetches ahead only of such a stream, and stops at the end of each page.
    """
    form, vectors = WeightFormat(bits, minimum), CHUNK // LANES
    alone, first, other = (_tiles(form, vectors, width, use) for use in ("", "write", "read"))
    block_bytes, panel_size, half = form.block_bytes, panel_bytes(form, vectors), form.block_bytes // 2
    fixed, finish, parts = form.fixed, _finish(result, form.fixed), 2 if result == GATE else 1
    fix_scales = scale_fixer(ROWS * 4)

    def kernel(args: Any) -> None:
        rows, x, weights, blocks, chunks = args[1], args[2], args[3], args[4], args[5] // parts
        out, out_stride, bias, offset, scales = args[6], args[7], args[8], args[9], args[10]
        outputs = args[11] if result == LARGEST else 0
        pieces = (blocks + PIECE - 1) // PIECE
        panel = stack(PIECE * panel_size + ROWS * (parts * ROW_BYTES + ((pieces + blocks) * 4 if fixed else 0)))
        sums = panel + PIECE * panel_size
        units = sums + parts * ROWS * ROW_BYTES
        steps, known = units + pieces * ROWS * 4, -1
        tasks = chunks * ((rows + ROWS - 1) // ROWS)
        side = choose_side(args)
        task = next_task(args, side, tasks)
        while task < tasks:
            following = next_task(args, side, tasks)
            place, first_row = task % chunks, task // chunks * ROWS
            last_row = smaller(rows, first_row + ROWS)
            all_rows = last_row - first_row
            single = all_rows == 8 or all_rows == 4 or all_rows <= 2  # one tile has them all
            fetched = block_bytes if single else half  # with each block of a tile
            if fixed and first_row != known:
                fix_scales(x, first_row, last_row, blocks, steps, units)
                known = first_row
            if result != GATE and (result != LARGEST or out != 0):
                for row in range(first_row, last_row):
                    expect_row(out + row * out_stride * 4 + place * ROW_BYTES, ROW_BYTES // CACHE_LINE)
            for part in range(parts):
                w = weights + (place + part * chunks) * blocks * block_bytes
                fetch = w + chunks * blocks * block_bytes
                if part + 1 == parts:
                    fetch = weights + following % chunks * blocks * block_bytes
                fetch_end = fetch + blocks * block_bytes if following < tasks or part + 1 < parts else fetch
                for piece in range(pieces):
                    begin, row = piece * PIECE, first_row
                    end = smaller(begin + PIECE, blocks)
                    while row < last_row:
                        left = last_row - row
                        count = 8 if left >= 8 else 4 if left >= 4 else 2 if left >= 2 else 1
                        if fetch >= fetch_end:
                            fetch = panel  # anything that is near
                        number = row - first_row
                        xr, o = rounded_row(x, row, blocks), sums + (part * ROWS + number) * ROW_BYTES
                        u = units + (piece * ROWS + number) * 4
                        q = steps + number // X_GROUP * blocks * STEPS_BYTES + number % X_GROUP * STEP
                        if single:
                            alone(count, xr, q, u, w, panel, begin, end, o, fetch)
                        elif row == first_row:
                            first(count, xr, q, u, w, panel, begin, end, o, fetch)
                        else:
                            other(count, xr, q, u, w, panel, begin, end, o, fetch)
                        fetch += (end - begin) * fetched
                        if end == blocks and part + 1 == parts:
                            finish(o, row, count, place, chunks, out, out_stride, bias, offset, scales, outputs)
                        row += count
            task = following

    return kernel


def _tiles(form: WeightFormat, vectors: int, width: int, use: str) -> Any:
    """A function that is a `dot_tile` of 8, 4, 2 or 1 rows, whose number is its first argument."""
    one, two, four, eight = (dot_tile(form, rows, vectors, width, use) for rows in (1, 2, 4, 8))

    @numba.njit(inline="always")
    def tile(count, x, steps, units, weights, panel, begin, end, sums, fetch):  # type: ignore[no-untyped-def]
        if count == 8:
            eight(x, steps, units, weights, panel, begin, end, sums, fetch)
        elif count == 4:
            four(x, steps, units, weights, panel, begin, end, sums, fetch)
        elif count == 2:
            two(x, steps, units, weights, panel, begin, end, sums, fetch)
        else:
            one(x, steps, units, weights, panel, begin, end, sums, fetch)

    return tile


def _finish(result: int, fixed: bool) -> Any:
    """A function that does with the sums of some rows of a chunk what `result` says."""
    vectors, parts = CHUNK // LANES, 2 if result == GATE else 1

    @numba.njit(inline="always")
    def finish(sums, first_row, count, chunk, chunks, out, out_stride, bias, offset, scales, outputs):  # type: ignore[no-untyped-def]
        at, gate = sums, sums - ROWS * ROW_BYTES
        for row in range(first_row, first_row + count):
            if fixed:
                multiply_rows(at, scales + (chunk + (parts - 1) * chunks) * ROW_BYTES, at, vectors)
                if result == GATE:
                    half = at - ROWS * ROW_BYTES
                    multiply_rows(half, scales + chunk * ROW_BYTES, half, vectors)
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
                elif result != LARGEST or out != 0:
                    copy_row(at, target, vectors)
            at += ROW_BYTES
        if result == LARGEST:  # rows too many were done before, are by later tiles of this task, or do not exist
            for row in range(first_row // TOGETHER * TOGETHER, first_row + count, TOGETHER):
                known = offset + (row // LANES * chunks + chunk) * CHUNK_BYTES + row % LANES * 4
                write_largest(sums + (row - first_row) * ROW_BYTES, chunk * CHUNK, outputs, known)
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
                quantize_row(x + row * x_stride * 4, rounded_row(out, row, blocks), X_STEP, blocks, offset)

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
