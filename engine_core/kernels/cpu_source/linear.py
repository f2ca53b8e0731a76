"""Linear layers: x W^T on packed weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine_core.kernels.cpu_layout import BLOCK, CHUNK, GROUP, X_BLOCK_BYTES, WeightFormat
from engine_core.kernels.cpu_source.compiler import next_task, smaller
from engine_core.kernels.cpu_source.dot import dot_tile, quantize_block
from engine_core.kernels.cpu_source.tile import linear_tile

ROWS = 48  # rows of x in a task: they stay in the second-level cache


def integers(bits: int, minimum: bool, width: int) -> Callable[[Any], None]:
    """Arguments: counter, rows, x (rounded), its stride in bytes, weights, scales, blocks, chunks, out, out_stride.

    Few rows take whole chunks, so that weights are read front to back. More take halves of them, so that their sums
    stay in registers. A thread draws its next task before it begins one, to fetch the weights of that meanwhile.
    """
    form = WeightFormat(bits, minimum)
    whole1, whole2 = dot_tile(form, 1, 4, width), dot_tile(form, 2, 4, width)
    half1, half2, half4, half8 = (dot_tile(form, rows, 2, width) for rows in (1, 2, 4, 8))
    block_bytes, block_scales = form.block_bytes, form.block_scales

    def kernel(args: Any) -> None:
        rows, x, x_stride, weights, scales = args[1], args[2], args[3], args[4], args[5]
        blocks, chunks, out, out_stride = args[6], args[7], args[8], args[9]
        parts = 2 if rows >= 4 else 1
        parts_of_all = chunks * parts
        tasks = parts_of_all * ((rows + ROWS - 1) // ROWS)
        task = next_task(args)
        while task < tasks:
            following = next_task(args)
            place, first_row = task % parts_of_all, task // parts_of_all * ROWS
            next_place = following % parts_of_all if following < tasks else place
            chunk, first = place // parts, place % parts * (CHUNK // 2)
            next_chunk, next_first = next_place // parts, next_place % parts * (CHUNK // 2)
            w = weights + chunk * blocks * block_bytes + first * 4
            s = scales + (chunk * blocks * block_scales + first) * 2
            next_w = weights + next_chunk * blocks * block_bytes + next_first * 4
            next_s = scales + (next_chunk * blocks * block_scales + next_first) * 2
            o = out + (chunk * CHUNK + first) * 4
            row, last_row = first_row, smaller(rows, first_row + ROWS)
            while row < last_row:
                left, xr, oh = last_row - row, x + row * x_stride, o + row * out_stride * 4
                if parts == 1:
                    if left >= 2:
                        whole2(xr, x_stride, w, s, blocks, oh, out_stride, next_w, next_s)
                        row += 2
                    else:
                        whole1(xr, x_stride, w, s, blocks, oh, out_stride, next_w, next_s)
                        row += 1
                elif left >= 8:
                    half8(xr, x_stride, w, s, blocks, oh, out_stride, next_w, next_s)
                    row += 8
                elif left >= 4:
                    half4(xr, x_stride, w, s, blocks, oh, out_stride, next_w, next_s)
                    row += 4
                elif left >= 2:
                    half2(xr, x_stride, w, s, blocks, oh, out_stride, next_w, next_s)
                    row += 2
                else:
                    half1(xr, x_stride, w, s, blocks, oh, out_stride, next_w, next_s)
                    row += 1
            task = following

    return kernel


def quantize() -> Callable[[Any], None]:
    """Arguments: counter, rows, x, its stride in floats, blocks, out, offset. `out` has no gaps between rows."""

    def kernel(args: Any) -> None:
        rows, x, x_stride, blocks, out, offset = args[1], args[2], args[3], args[4], args[5], args[6]
        while True:
            row = next_task(args)
            if row >= rows:
                break
            target = out + row * blocks * X_BLOCK_BYTES
            for block in range(blocks):
                quantize_block(x + (row * x_stride + block * BLOCK) * 4, target + block * X_BLOCK_BYTES, offset)

    return kernel


def floats() -> Callable[[Any], None]:
    """Arguments: counter, rows, x, x_stride, weights, blocks, chunks, out, out_stride."""
    form = WeightFormat(32)
    tile1, tile2 = linear_tile(1, 4), linear_tile(2, 2)
    tile4, tile6 = linear_tile(4, 1), linear_tile(6, 1)
    group_bytes, block_bytes = GROUP * 4, form.block_bytes

    def kernel(args: Any) -> None:
        rows, x, x_stride, weights, blocks = args[1], args[2], args[3], args[4], args[5]
        chunks, out, out_stride = args[6], args[7], args[8]
        tasks = chunks * ((rows + ROWS - 1) // ROWS)
        while True:
            task = next_task(args)
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
