"""What the GPU can do that kernels must know before they are launched."""

from __future__ import annotations

from functools import cache

import torch
from triton.compiler.compiler import max_shared_mem


@cache
def chained(device: torch.device) -> bool:
    """Whether kernels may start before the one before them has ended and wait for its results inside (programmatic
    dependent launch): Hopper and newer. It hides the 1-2 us between two kernels of a graph."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of it that a program may take, from 99 KiB up; those of Hopper where there is no GPU."""
    return int(max_shared_mem(device.index)) if device.type == "cuda" else 227 << 10
