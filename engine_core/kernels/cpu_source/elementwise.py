"""The small steps between matrix products, each one pass over memory.

Those before a product write its inputs as it takes them: floats to `out`, or rounded to int8 to `rounded`, the other
address being 0. Addresses of what a model does not have (biases, say) are 0 too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from engine_core.kernels.cpu_layout import BLOCK, TASK_ROWS, X_STEP
from engine_core.kernels.cpu_source.compiler import choose_side, int64s, next_task, smaller
from engine_core.kernels.cpu_source.rounding import quantize_gated, quantize_normed, rounded_row
from engine_core.kernels.cpu_source.vector import (
    LANES,
    add_rows,
    copy_row,
    dequantize_row,
    rotate_head,
    scale_row,
    silu_multiply,
    square_sum,
)


def add_rms_norm() -> Callable[[Any], None]:
    """Arguments: counter, rows, x, x_stride, bias of x, residual, its stride, total, weight, columns, eps * 2^60, out,
    rounded, offset, index.

    With an `index` of int64, row i of the result is made of row index[i] of x.
    """

    def kernel(args: Any) -> None:
        rows, x, x_stride, bias = args[1], args[2], args[3], args[4]
        residual, residual_stride = args[5], args[6]
        total, weight, columns, eps = args[7], args[8], args[9], np.float32(args[10] / 2.0**60)
        out, rounded, offset, index = args[11], args[12], args[13], int64s(args[14])
        blocks = columns // BLOCK
        side, tasks = choose_side(args), (rows + TASK_ROWS - 1) // TASK_ROWS
        while True:
            first = next_task(args, side, tasks) * TASK_ROWS
            if first >= rows:
                break
            for row in range(first, smaller(first + TASK_ROWS, rows)):
                address = x + (row if args[14] == 0 else index[row]) * x_stride * 4
                if bias != 0:
                    add_rows(address, bias, address, columns // LANES)
                if residual != 0:
                    new = total + row * columns * 4
                    add_rows(address, residual + row * residual_stride * 4, new, columns // LANES)
                    address = new
                mean = square_sum(address, columns // LANES) / np.float32(columns)
                scale = np.float32(1) / np.sqrt(mean + eps)
                if rounded == 0:
                    scale_row(address, scale, weight, out + row * columns * 4, columns // LANES)
                    continue
                quantize_normed(address, scale, weight, rounded_row(rounded, row, blocks), blocks, offset)

    return kernel


def add() -> Callable[[Any], None]:
    """Arguments: counter, rows, x, x_stride, bias of x, total, columns. Adds x to the total."""

    def kernel(args: Any) -> None:
        rows, x, x_stride, bias, columns = args[1], args[2], args[3], args[4], args[6]
        side = choose_side(args)
        while True:
            row = next_task(args, side, rows)
            if row >= rows:
                break
            address, total = x + row * x_stride * 4, args[5] + row * columns * 4
            if bias != 0:
                add_rows(address, bias, address, columns // LANES)
            add_rows(address, total, total, columns // LANES)

    return kernel


def rotate() -> Callable[[Any], None]:
    """Arguments: counter, tokens, x, x_stride, cos, sin, out, heads, head_dim."""

    def kernel(args: Any) -> None:
        tokens, x, x_stride, heads, half = args[1], args[2], args[3], args[7], args[8] // 2
        side, tasks = choose_side(args), (tokens + TASK_ROWS - 1) // TASK_ROWS
        while True:
            first = next_task(args, side, tasks) * TASK_ROWS
            if first >= tokens:
                break
            for token in range(first, smaller(first + TASK_ROWS, tokens)):
                cos, sin = args[4] + token * half * 4, args[5] + token * half * 4
                for head in range(heads):
                    target = args[6] + (token * heads + head) * half * 2 * 4
                    rotate_head(x + (token * x_stride + head * half * 2) * 4, target, cos, sin, half)

    return kernel


def silu_and_mul() -> Callable[[Any], None]:
    """Arguments: counter, rows, x, x_stride, bias of x, columns, out, rounded, offset. The bias is added in place."""

    def kernel(args: Any) -> None:
        rows, x, x_stride, bias, columns = args[1], args[2], args[3], args[4], args[5]
        out, rounded, offset = args[6], args[7], args[8]
        blocks = columns // BLOCK
        side, tasks = choose_side(args), (rows + TASK_ROWS - 1) // TASK_ROWS
        while True:
            first = next_task(args, side, tasks) * TASK_ROWS
            if first >= rows:
                break
            for row in range(first, smaller(first + TASK_ROWS, rows)):
                gate = x + row * x_stride * 4
                up = gate + columns * 4
                if bias != 0:
                    add_rows(gate, bias, gate, 2 * columns // LANES)
                if rounded == 0:
                    silu_multiply(gate, up, out + row * columns * 4, columns // LANES)
                    continue
                quantize_gated(gate, up, rounded_row(rounded, row, blocks), X_STEP, blocks, offset)

    return kernel


def gather() -> Callable[[Any], None]:
    """Arguments: counter, rows, index (int64), x, out, columns. Row i of the result is row index[i] of x, or row i if
    there is no index."""

    def kernel(args: Any) -> None:
        rows, index, size = args[1], int64s(args[2]), args[5] * 4
        side = choose_side(args)
        while True:
            row = next_task(args, side, rows)
            if row >= rows:
                break
            source = row if args[2] == 0 else index[row]
            copy_row(args[3] + source * size, args[4] + row * size, args[5] // LANES)

    return kernel


def embed() -> Callable[[Any], None]:
    """Arguments: counter, rows, ids (int64), table, its stride in bytes, blocks, out.

    Row i of the result is row ids[i] of a table in blocks of 32 int8 behind a scale in half precision, GGUF's Q8_0.
    """

    def kernel(args: Any) -> None:
        rows, ids, table, stride, blocks, out = args[1], int64s(args[2]), args[3], args[4], args[5], args[6]
        side = choose_side(args)
        while True:
            row = next_task(args, side, rows)
            if row >= rows:
                break
            dequantize_row(table + ids[row] * stride, blocks, out + row * blocks * BLOCK * 4)

    return kernel
