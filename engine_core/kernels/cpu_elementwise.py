"""The small steps between matrix products, each one pass over memory: add and RMSNorm, rotary embedding, SiLU.

Tensors are float32 with contiguous last dimensions.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from engine_core.kernels.cpu_jit import compile_kernel, floats, next_task
from engine_core.kernels.cpu_team import cpu_team
from engine_core.kernels.cpu_vector import silu_multiply, square_sum

ROWS = 4  # rows in a task
SMALL = 16_384  # values that one thread handles sooner than two could agree to share them


def _add_rms_norm(args: Any) -> None:
    """Arguments: counter, x, x_stride, residual (or 0), its stride, weight, out, total, rows, columns, eps * 2^60."""
    x, x_stride, residual, residual_stride = args[1], args[2], args[3], args[4]
    out, total, rows, columns = args[6], args[7], args[8], args[9]
    weight = floats(args[5])
    eps = np.float32(args[10] / 2.0**60)
    while True:
        first = next_task(args) * ROWS
        if first >= rows:
            break
        for row in range(first, min(first + ROWS, rows)):
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


def _rotate(args: Any) -> None:
    """Arguments: counter, x, x_stride, cos, sin, out, tokens, heads, head_dim."""
    x, x_stride, tokens, heads, half = args[1], args[2], args[6], args[7], args[8] // 2
    while True:
        first = next_task(args) * ROWS
        if first >= tokens:
            break
        for token in range(first, min(first + ROWS, tokens)):
            cos, sin = floats(args[3] + token * half * 4), floats(args[4] + token * half * 4)
            for head in range(heads):
                source = floats(x + (token * x_stride + head * half * 2) * 4)
                target = floats(args[5] + (token * heads + head) * half * 2 * 4)
                for i in range(half):
                    a, b = source[i], source[half + i]
                    target[i] = a * cos[i] - b * sin[i]
                    target[half + i] = b * cos[i] + a * sin[i]


def _silu_and_mul(args: Any) -> None:
    """Arguments: counter, x, x_stride, out, rows, columns."""
    x, x_stride, rows, columns = args[1], args[2], args[4], args[5]
    while True:
        first = next_task(args) * ROWS
        if first >= rows:
            break
        for row in range(first, min(first + ROWS, rows)):
            gate = x + row * x_stride * 4
            silu_multiply(gate, gate + columns * 4, args[3] + row * columns * 4, columns // 8)


@cache
def _compiled(name: str) -> int:
    return compile_kernel(name, lambda: {"norm": _add_rms_norm, "rotate": _rotate, "silu": _silu_and_mul}[name])


def supports(x: torch.Tensor) -> bool:
    """Whether these kernels take `x` and others of its kind: float32 on the CPU, whole vectors of eight."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.shape[-1] % 16 == 0 and x.stride(-1) == 1


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The RMSNorm of x + residual [rows, columns], and that sum (x itself without a residual)."""
    rows, columns = x.shape
    out = torch.empty(rows, columns)
    total = x if residual is None else torch.empty(rows, columns)
    before = (0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
    arrays = (weight.data_ptr(), out.data_ptr(), total.data_ptr())
    args = (x.data_ptr(), x.stride(0), *before, *arrays, rows, columns, int(eps * 2.0**60))
    cpu_team().run(_compiled("norm"), args, x.numel() > SMALL)
    return out, total


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, head_dim] turned by cos and sin [tokens, 1, head_dim / 2] (contiguous); heads side by side."""
    out = torch.empty(x.shape)
    args = (x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), *x.shape)
    cpu_team().run(_compiled("rotate"), args, x.numel() > SMALL)
    return out


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half of x [rows, 2 * columns] -> [rows, columns]."""
    rows, columns = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, columns)
    args = (x.data_ptr(), x.stride(0), out.data_ptr(), rows, columns)
    cpu_team().run(_compiled("silu"), args, x.numel() > SMALL)
    return out
