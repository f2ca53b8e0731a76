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

    Tiles of few rows take the whole chunk, so that weights are read front to back; those of more take half of it, so
    that their sums stay in registers.
    """
    form = WeightFormat(bits, minimum)
    tile1, tile2 = dot_tile(form, 1, 4, width), dot_tile(form, 2, 4, width)
    tile4, tile8 = dot_tile(form, 4, 2, width), dot_tile(form, 8, 2, width)
    block_bytes, block_scales = form.block_bytes, form.block_scales
    half = CHUNK // 2

    def kernel(args: Any) -> None:
        rows, x, x_stride, weights, scales = args[1], args[2], args[3], args[4], args[5]
        blocks, chunks, out, out_stride = args[6], args[7], args[8], args[9]
        tasks = chunks * ((rows + ROWS - 1) // ROWS)
        while True:
            task = next_task(args)
            if task >= tasks:
                break
            chunk, first_row = task % chunks, task // chunks * ROWS
            last_row = smaller(rows, first_row + ROWS)
            w = weights + chunk * blocks * block_bytes
            s = scales + chunk * blocks * block_scales * 2
            o = out + chunk * CHUNK * 4
            whole = (last_row - first_row) // 4 * 4 + first_row
            for first in range(0, CHUNK, half):
                wh, sh = w + first * 4, s + first * 2
                row = first_row
                while row < whole:
                    xr, oh = x + row * x_stride, o + (row * out_stride + first) * 4
                    if whole - row >= 8:
                        tile8(xr, x_stride, wh, sh, blocks, oh, out_stride)
                        row += 8
                    else:
                        tile4(xr, x_stride, wh, sh, blocks, oh, out_stride)
                        row += 4
            row = whole
            while row < last_row:
                xr, oh = x + row * x_stride, o + row * out_stride * 4
                if last_row - row >= 2:
                    tile2(xr, x_stride, w, s, blocks, oh, out_stride)
                    row += 2
                else:
                    tile1(xr, x_stride, w, s, blocks, oh, out_stride)
                    row += 1

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
