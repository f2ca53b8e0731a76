"""Memory for the CPU kernels: in huge pages where the system gives them to who asks.

A core that streams through small pages has to look each of them up, which in a virtual machine can take longer than
its data. Most matrices are smaller than a huge page, so they share regions.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from functools import cache

import numpy as np
import torch

CACHE_LINE = 64  # bytes
HUGE_PAGE = 2**21  # bytes
REGION = 32 * HUGE_PAGE
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux alone has it


def zeros(size: int) -> torch.Tensor:
    """uint8 [size] from the start of a cache line on, so that no vector lies in two.

    A page is taken only when it is first written.
    """
    return _arena().take(size)


@cache
def _arena() -> Arena:
    return Arena()


class Arena:
    """Hands out pieces of regions, each of which lives as long as a piece of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = torch.empty(0, dtype=torch.uint8)  # of the newest region

    def take(self, size: int) -> torch.Tensor:
        """uint8 [size], zeros that nobody else has."""
        if size > REGION // 2:
            return _region(size)[:size]
        whole = -(-size // CACHE_LINE) * CACHE_LINE
        with self._lock:
            if whole > len(self._free):
                self._free = _region(REGION)
            piece, self._free = self._free[:size], self._free[whole:]
        return piece


def _region(size: int) -> torch.Tensor:
    """uint8 zeros, at least `size`, from the start of a huge page on if there are any."""
    if _ADVICE is None:
        memory = np.zeros(size + CACHE_LINE, np.uint8)
        return torch.from_numpy(memory[-memory.ctypes.data % CACHE_LINE :])
    pages = mmap.mmap(-1, size + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without huge pages
        pages.madvise(_ADVICE)
    memory = np.frombuffer(pages, np.uint8)
    return torch.from_numpy(memory[-memory.ctypes.data % HUGE_PAGE :])
