"""The gated activation of Llama-like feed-forward layers."""

from __future__ import annotations

import torch
from torch.nn import functional

from engine_core.kernels import cpu_elementwise


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of x [tokens, 2 * columns], gate first -> [tokens, columns]."""
    if cpu_elementwise.supports(x) and x.shape[1] % 32 == 0:
        return cpu_elementwise.silu_and_mul(x)
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up
