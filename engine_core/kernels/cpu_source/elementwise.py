"""The small steps between matrix products, each one pass over memory.

Those before a product write its inputs as it takes them: floats to `out`, or rounded to int8 to `rounded`, the other
address being 0. Addresses of what a model does not have (biases, say) are 0 too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from engine_core.kernels.cpu_layout import BLOCK, TASK_ROWS, X_STEP
from engine_core.kernels.cpu_source.compiler import floats, int64s, next_task, smaller
from engine_core.kernels.cpu_source.rounding import quantize_gated, quantize_normed, rounded_row
from engine_core.kernels.cpu_source.vector import row_max, silu_multiply, square_sum

PIECE = 512  # values whose largest is looked for at once


def add_rms_norm() -> Callable[[Any], None]:
    """Arguments: counter, rows, x, x_stride, bias of x, residual, its stride, total, weight, columns, eps * 2^60, out,
    rounded, offset, index.

    With an `index` of int64, row i of the result is made of row index[i] of x.
    """

    def kernel(args: Any) -> None:
        rows, x, x_stride, bias, residual, residual_stride = (
            args[1],
            args[2],
            args[3],
            floats(args[4]),
            args[5],
            args[6],
        )
        total, weight, columns, eps = args[7], floats(args[8]), args[9], np.float32(args[10] / 2.0**60)
        out, rounded, offset, index = args[11], args[12], args[13], int64s(args[14])
        blocks = columns // BLOCK
        while True:
            first = next_task(args) * TASK_ROWS
            if first >= rows:
                break
            for row in range(first, smaller(first + TASK_ROWS, rows)):
                address = x + (row if args[14] == 0 else index[row]) * x_stride * 4
                values = floats(address)
                if residual != 0:
                    address = total + row * columns * 4
                    old, new = floats(residual + row * residual_stride * 4), floats(address)
                    if args[4] != 0:
                        for i in range(columns):
                            new[i] = values[i] + bias[i] + old[i]
                    else:
                        for i in range(columns):
                            new[i] = values[i] + old[i]
                    values = new
                mean = square_sum(address, columns // 8) / np.float32(columns)
                scale = np.float32(1) / np.sqrt(mean + eps)
                if rounded == 0:
                    normed = floats(out + row * columns * 4)
                    for i in range(columns):
                        normed[i] = values[i] * scale * weight[i]
                    continue
                target = rounded_row(rounded, row, blocks)
                for block in range(blocks):
                    at = block * BLOCK * 4
                    quantize_normed(address + at, scale, args[8] + at, target + block * X_STEP, offset)

    return kernel


def add() -> Callable[[Any], None]:
    """Arguments: counter, rows, x, x_stride, bias of x, total, columns. Adds x to the total."""

    def kernel(args: Any) -> None:
        rows, x, x_stride, bias, columns = args[1], args[2], args[3], floats(args[4]), args[6]
        while True:
            row = next_task(args)
            if row >= rows:
                break
            values, total = floats(x + row * x_stride * 4), floats(args[5] + row * columns * 4)
            if args[4] != 0:
                for i in range(columns):
                    total[i] = values[i] + bias[i] + total[i]
            else:
                for i in range(columns):
                    total[i] = values[i] + total[i]

    return kernel


@numba.njit(inline="always")
def rotate_head(source, target, step, half, cos, sin):  # type: ignore[no-untyped-def]
    """Turn the two halves of a head against one another; its results lie `step` apart in `target`."""
    for i in range(half):
        a, b = source[i], source[half + i]
        target[i * step] = a * cos[i] - b * sin[i]
        target[(half + i) * step] = b * cos[i] + a * sin[i]


def rotate() -> Callable[[Any], None]:
    """Arguments: counter, tokens, x, x_stride, cos, sin, out, heads, head_dim."""

    def kernel(args: Any) -> None:
        tokens, x, x_stride, heads, half = args[1], args[2], args[3], args[7], args[8] // 2
        while True:
            first = next_task(args) * TASK_ROWS
            if first >= tokens:
                break
            for token in range(first, smaller(first + TASK_ROWS, tokens)):
                cos, sin = floats(args[4] + token * half * 4), floats(args[5] + token * half * 4)
                for head in range(heads):
                    source = floats(x + (token * x_stride + head * half * 2) * 4)
                    target = floats(args[6] + (token * heads + head) * half * 2 * 4)
                    rotate_head(source, target, 1, half, cos, sin)

    return kernel


def silu_and_mul() -> Callable[[Any], None]:
    """Arguments: counter, rows, x, x_stride, bias of x, columns, out, rounded, offset. The bias is added in place."""

    def kernel(args: Any) -> None:
        rows, x, x_stride, bias, columns = args[1], args[2], args[3], floats(args[4]), args[5]
        out, rounded, offset = args[6], args[7], args[8]
        blocks = columns // BLOCK
        while True:
            first = next_task(args) * TASK_ROWS
            if first >= rows:
                break
            for row in range(first, smaller(first + TASK_ROWS, rows)):
                gate = x + row * x_stride * 4
                up = gate + columns * 4
                if args[4] != 0:
                    values = floats(gate)
                    for i in range(2 * columns):
                        values[i] += bias[i]
                if rounded == 0:
                    silu_multiply(gate, up, out + row * columns * 4, columns // 8)
                    continue
                target = rounded_row(rounded, row, blocks)
                for block in range(blocks):
                    at = block * BLOCK * 4
                    quantize_gated(gate + at, up + at, target + block * X_STEP, offset)

    return kernel


def argmax() -> Callable[[Any], None]:
    """Arguments: counter, rows, x, x_stride, columns, out (int64). The first of the largest; NaN is largest."""

    def kernel(args: Any) -> None:
        rows, x, x_stride, columns, out = args[1], args[2], args[3], args[4], int64s(args[5])
        while True:
            row = next_task(args)
            if row >= rows:
                break
            address = x + row * x_stride * 4
            values = floats(address)
            best, where = values[0], 0
            for start in range(0, columns, PIECE):
                count = smaller(PIECE, columns - start)
                highest = row_max(address + start * 4, count // 8)
                for i in range(start + count // 8 * 8, start + count):
                    if values[i] > highest or values[i] != values[i]:
                        highest = values[i]
                if highest > best or (highest != highest and best == best):
                    best, where = highest, start
            # Not `==`, which would not find a NaN. A piece without one has no NaN, for `best` would be it.
            while values[where] < best or (best != best and values[where] == values[where]):
                where += 1
            out[row] = where

    return kernel
