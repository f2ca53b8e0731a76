"""Memory for the CPU kernels."""

from __future__ import annotations

import numpy as np
import torch

CACHE_LINE = 64  # bytes


def zeros(size: int) -> torch.Tensor:
    """uint8 [size] from the start of a cache line on, so that no vector lies in two.

    It comes from calloc, which takes a page only when it is first written.
    """
    memory = np.zeros(size + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return torch.from_numpy(memory[start : start + size])
