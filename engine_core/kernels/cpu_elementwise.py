"""The small steps between matrix products, each one pass over memory: add and RMSNorm, rotary embedding, SiLU.

Tensors are float32 with contiguous last dimensions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine_core.kernels.cpu_cache import kernel
from engine_core.kernels.cpu_team import cpu_team

SMALL = 16_384  # values that one thread handles sooner than two could agree to share them


def supports(x: torch.Tensor) -> bool:
    """Whether these kernels take `x` and others of its kind: float32 on the CPU, whole vectors of 16."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.shape[-1] % 16 == 0 and x.stride(-1) == 1


def fixed_point(value: float) -> int:
    """A small float as an argument of a kernel: times 2^60."""
    return int(value * 2.0**60)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The RMSNorm of x + residual [rows, columns], and that sum (x itself without a residual)."""
    rows, columns = x.shape
    out = torch.empty(rows, columns)
    total = x if residual is None else torch.empty(rows, columns)
    before = (0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
    given = (rows, x.data_ptr(), x.stride(0), 0, *before)
    args = (*given, total.data_ptr(), weight.data_ptr(), columns, fixed_point(eps), out.data_ptr(), 0, 0, 0)
    cpu_team().run(kernel("elementwise:add_rms_norm"), args, x.numel() > SMALL)
    return out, total


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, head_dim] turned by cos and sin [tokens, 1, head_dim / 2] (contiguous); heads side by side."""
    out = torch.empty(x.shape)
    tokens, heads, head_dim = x.shape
    angles = (cos.data_ptr(), sin.data_ptr())
    args = (tokens, x.data_ptr(), x.stride(0), *angles, out.data_ptr(), heads, head_dim)
    cpu_team().run(kernel("elementwise:rotate"), args, x.numel() > SMALL)
    return out


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half of x [rows, 2 * columns] -> [rows, columns]."""
    rows, columns = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, columns)
    args = (rows, x.data_ptr(), x.stride(0), 0, columns, out.data_ptr(), 0, 0)
    cpu_team().run(kernel("elementwise:silu_and_mul"), args, x.numel() > SMALL)
    return out


class Largest(NamedTuple):
    """Of each row of numbers: the first of the largest. A NaN is larger than all, as numpy has it."""

    indices: NDArray[np.int64]
    values: NDArray[np.float32]


def argmax(rows: NDArray[np.float32]) -> Largest:
    """The largest of each row.

    Rows of float32 [rows, columns] are contiguous and not empty.
    """
    out, values = np.empty(len(rows), np.int64), np.empty(len(rows), np.float32)
    given = (len(rows), rows.ctypes.data, rows.strides[0] // 4, rows.shape[1])
    cpu_team().run(kernel("largest:argmax"), (*given, out.ctypes.data, values.ctypes.data), len(rows) > 1)
    return Largest(out, values)
