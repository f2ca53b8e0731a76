"""Memory for the CPU kernels: pages are taken when they are first written, and weights gathered into huge ones later.

A core that streams weights through small pages has to look each of them up, which in a virtual machine can take longer
than its data. But a huge page is cleared, and in a virtual machine fetched from its host, as a whole: a small model
starts a third slower, and a request's KV, a few KiB in each of many arrays, costs it a tenth of its time. So the system
is told of the weights once they are there, and gathers them while the model is in use.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from functools import cache

import numpy as np
import torch

CACHE_LINE = 64  # bytes
HUGE_PAGE = 2**21  # bytes
REGION = 32 * HUGE_PAGE  # of weights: most matrices are smaller than a huge page, so they share it
_GATHER: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux alone has it


def zeros(size: int) -> torch.Tensor:
    """uint8 [size], aligned to pages."""
    return _tensor(_map(size))[:size]


@cache
def weights() -> Arena:
    """Where packed weights lie."""
    return Arena()


class Arena:
    """Hands out pieces of regions, each of which lives as long as a piece of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = torch.empty(0, dtype=torch.uint8)  # of the newest region
        # Regions that have not been gathered yet. Those of a model that could not be loaded go with it.
        self._written = weakref.WeakSet[mmap.mmap]()

    def take(self, size: int) -> torch.Tensor:
        """uint8 [size], zeros that nobody else has, from the start of a cache line on: no vector lies in two."""
        whole = -(-size // CACHE_LINE) * CACHE_LINE
        with self._lock:
            if size > REGION // 2:
                return self._region(size)[:size]
            if whole > len(self._free):
                self._free = self._region(REGION)
            piece, self._free = self._free[:size], self._free[whole:]
        return piece

    def gather(self) -> None:
        """All of it is written: let the system move it to huge pages in its own time."""
        with self._lock:
            regions, self._written = self._written, weakref.WeakSet()
        if _GATHER is not None:
            for pages in regions:
                with contextlib.suppress(OSError):  # a system without huge pages
                    pages.madvise(_GATHER)

    def _region(self, size: int) -> torch.Tensor:
        pages = _map(size)
        self._written.add(pages)
        return _tensor(pages)


def _map(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _tensor(pages: mmap.mmap) -> torch.Tensor:
    """uint8, from where a huge page may start."""
    memory = np.frombuffer(pages, np.uint8)
    return torch.from_numpy(memory[-memory.ctypes.data % HUGE_PAGE :])
