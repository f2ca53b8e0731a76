"""Memory for the CPU kernels: pages are taken when they are first written, and weights gathered into huge ones later.

A core that streams weights through small pages has to look each of them up, which in a virtual machine can take longer
than its data. But a huge page is cleared, and in a virtual machine fetched from its host, as a whole: a small model
starts a third slower, and a request's KV, a few KiB in each of many arrays, costs it a tenth of its time. So weights
are moved to huge pages once the model is in use, by a thread that rests most of the time.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch

CACHE_LINE = 64  # bytes
HUGE_PAGE = 2**21  # bytes
REGION = 32 * HUGE_PAGE  # of weights: most matrices are smaller than a huge page, so they share it
_ADVISE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux alone has it: the system gathers in its own time
_COLLAPSE = 25  # MADV_COLLAPSE, since Linux 6.1: at once
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_REST = 4  # times as long as moving a page took, before the next: whoever needs its memory meanwhile waits for it


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

    def gather(self) -> threading.Thread | None:
        """All of it is written: have it moved to huge pages. Returns the thread that does so, if there is any need."""
        with self._lock:
            regions, self._written = [weakref.ref(pages) for pages in self._written], weakref.WeakSet()
            unused, self._free = self._free.data_ptr(), self._free[:0]
        if _ADVISE is None or not regions or _switched_off():
            return None
        thread = threading.Thread(target=_gather, args=(regions, unused), name="huge pages", daemon=True)
        thread.start()
        return thread

    def _region(self, size: int) -> torch.Tensor:
        pages = _map(size)
        self._written.add(pages)
        return _tensor(pages)


def _gather(regions: list[weakref.ref[mmap.mmap]], unused: int) -> None:
    """Move regions to huge pages, except what lies from address `unused` on: nobody has written there."""
    for region in regions:
        at, began = 0, time.monotonic()
        while (pages := region()) is not None and _collapse(pages, at, unused):
            del pages  # nobody may need it any more
            at += HUGE_PAGE
            time.sleep(_REST * (time.monotonic() - began))
            began = time.monotonic()


def _collapse(pages: mmap.mmap, at: int, unused: int) -> bool:
    """Move what lies from byte `at` on to the next huge page. False: that was the last, or the system cannot."""
    start, end = np.frombuffer(pages, np.uint8).ctypes.data, len(pages)
    end = unused - start if 0 <= unused - start < end else end
    first = -start % HUGE_PAGE + at
    if first + HUGE_PAGE > end:
        return False
    if _madvise()(start + first, HUGE_PAGE, _COLLAPSE) == 0:
        return True
    with contextlib.suppress(OSError):
        assert _ADVISE is not None
        pages.madvise(_ADVISE)
    return False


def _switched_off() -> bool:
    """Whether whoever runs the system wants no huge pages: to be asked for at once they would come all the same."""
    with contextlib.suppress(OSError):
        return "[never]" in _SETTING.read_text()
    return False


@cache
def _madvise() -> Callable[[int, int, int], int]:
    """The system's: that of Python would keep all other threads waiting."""
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def _map(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _tensor(pages: mmap.mmap) -> torch.Tensor:
    """uint8, from where a huge page may start."""
    memory = np.frombuffer(pages, np.uint8)
    return torch.from_numpy(memory[-memory.ctypes.data % HUGE_PAGE :])
