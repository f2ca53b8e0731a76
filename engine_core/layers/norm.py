"""Root-mean-square normalisation."""

from __future__ import annotations

import torch

from engine_core.kernels import cpu_elementwise


class RMSNorm:
    """x / rms(x) * weight over the last dimension, computed in float32."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if cpu_elementwise.supports(x):
            rows = x.reshape(-1, x.shape[-1])
            return cpu_elementwise.add_rms_norm(rows, None, self.weight, self.eps)[0].view(x.shape)
        values = x.float()
        scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (values * scale).to(x.dtype)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual, and that sum: the next residual."""
        if cpu_elementwise.supports(x):
            return cpu_elementwise.add_rms_norm(x, residual, self.weight, self.eps)
        total = x + residual
        return self(total), total
