"""The small steps between matrix products, each one pass over memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from engine_core.kernels.cpu_source.compiler import floats, next_task, smaller
from engine_core.kernels.cpu_source.vector import silu_multiply, square_sum

ROWS = 4  # rows in a task


def add_rms_norm() -> Callable[[Any], None]:
    """Arguments: counter, x, x_stride, residual (or 0), its stride, weight, out, total, rows, columns, eps * 2^60."""

    def kernel(args: Any) -> None:
        x, x_stride, residual, residual_stride = args[1], args[2], args[3], args[4]
        out, total, rows, columns = args[6], args[7], args[8], args[9]
        weight = floats(args[5])
        eps = np.float32(args[10] / 2.0**60)
        while True:
            first = next_task(args) * ROWS
            if first >= rows:
                break
            for row in range(first, smaller(first + ROWS, rows)):
                values = floats(x + row * x_stride * 4)
                address = x + row * x_stride * 4
                if residual != 0:
                    address = total + row * columns * 4
                    old, new = floats(residual + row * residual_stride * 4), floats(address)
                    for i in range(columns):
                        new[i] = values[i] + old[i]
                    values = new
                mean = square_sum(address, columns // 8) / np.float32(columns)
                scale = np.float32(1) / np.sqrt(mean + eps)
                normed = floats(out + row * columns * 4)
                for i in range(columns):
                    normed[i] = values[i] * scale * weight[i]

    return kernel


def rotate() -> Callable[[Any], None]:
    """Arguments: counter, x, x_stride, cos, sin, out, tokens, heads, head_dim."""

    def kernel(args: Any) -> None:
        x, x_stride, tokens, heads, half = args[1], args[2], args[6], args[7], args[8] // 2
        while True:
            first = next_task(args) * ROWS
            if first >= tokens:
                break
            for token in range(first, smaller(first + ROWS, tokens)):
                cos, sin = floats(args[3] + token * half * 4), floats(args[4] + token * half * 4)
                for head in range(heads):
                    source = floats(x + (token * x_stride + head * half * 2) * 4)
                    target = floats(args[5] + (token * heads + head) * half * 2 * 4)
                    for i in range(half):
                        a, b = source[i], source[half + i]
                        target[i] = a * cos[i] - b * sin[i]
                        target[half + i] = b * cos[i] + a * sin[i]

    return kernel


def silu_and_mul() -> Callable[[Any], None]:
    """Arguments: counter, x, x_stride, out, rows, columns."""

    def kernel(args: Any) -> None:
        x, x_stride, rows, columns = args[1], args[2], args[4], args[5]
        while True:
            first = next_task(args) * ROWS
            if first >= rows:
                break
            for row in range(first, smaller(first + ROWS, rows)):
                gate = x + row * x_stride * 4
                silu_multiply(gate, gate + columns * 4, args[3] + row * columns * 4, columns // 8)

    return kernel
