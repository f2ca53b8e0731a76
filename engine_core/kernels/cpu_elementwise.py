"""The small steps between matrix products, each one pass over memory: add and RMSNorm, rotary embedding, SiLU.

Tensors are float32 with contiguous last dimensions.
"""

from __future__ import annotations

import torch

from engine_core.kernels.cpu_cache import kernel
from engine_core.kernels.cpu_team import cpu_team

SMALL = 16_384  # values that one thread handles sooner than two could agree to share them


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
    cpu_team().run(kernel("elementwise:add_rms_norm"), args, x.numel() > SMALL)
    return out, total


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, head_dim] turned by cos and sin [tokens, 1, head_dim / 2] (contiguous); heads side by side."""
    out = torch.empty(x.shape)
    args = (x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), *x.shape)
    cpu_team().run(kernel("elementwise:rotate"), args, x.numel() > SMALL)
    return out


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half of x [rows, 2 * columns] -> [rows, columns]."""
    rows, columns = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, columns)
    args = (x.data_ptr(), x.stride(0), out.data_ptr(), rows, columns)
    cpu_team().run(kernel("elementwise:silu_and_mul"), args, x.numel() > SMALL)
    return out
