"""Weights to the GPU, faster than one thread can read them.

A copy from pageable memory goes through one thread at a few GB/s. Here a tensor is cut into pieces, and each of several
threads moves its pieces through pinned memory of its own: while one piece is on the bus, the next is read.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import torch

from engine_core.loader.weights import Weight, dense

THREADS = 8
PIECE_BYTES = 4 * 2**20


class Uploader:
    """Threads and pinned memory, until it is closed. For use by one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "upload")
        self._local = threading.local()
        self._lanes: list[_Lane] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def dense(self, parts: Sequence[Weight], dtype: torch.dtype) -> torch.Tensor:
        """The parts below one another, as `weights.dense` makes them; ready for the current stream."""
        tensors = [part for part in parts if isinstance(part, torch.Tensor) and part.device.type == "cpu"]
        if len(tensors) < len(parts):
            return dense(parts, dtype, self._device)
        rows = sum(len(tensor) for tensor in tensors)
        out = torch.empty((rows, *tensors[0].shape[1:]), dtype=dtype, device=self._device)
        ready = torch.cuda.Event()
        ready.record()  # whoever had this memory before is done by then
        pieces = cut(out.view(-1), tensors)
        for done in [self._threads.submit(self._copy, target, source, ready) for target, source in pieces]:
            done.result()
        for lane in self._lanes:
            torch.cuda.current_stream().wait_stream(lane.stream)
        return out

    def _copy(self, target: torch.Tensor, source: torch.Tensor, ready: torch.cuda.Event) -> None:
        if not hasattr(self._local, "lane"):
            self._local.lane = _Lane(self._device)
            self._lanes.append(self._local.lane)
        self._local.lane.copy(target, source, ready)


class _Lane:
    """A thread's stream, and two pinned buffers that take turns."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8).pin_memory() for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor, ready: torch.cuda.Event) -> None:
        self._turn = turn = 1 - self._turn
        self._sent[turn].synchronize()
        pinned = self._buffers[turn][: source.nbytes].view(source.dtype)
        pinned.copy_(source)
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(ready)
            target.copy_(pinned, non_blocking=True)
            self._sent[turn].record()


def cut(target: torch.Tensor, sources: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Flat pieces (of `target`, of a source) of at most PIECE_BYTES that fill the flat `target` with the sources."""
    pieces, start = [], 0
    for source in sources:
        flat = source.reshape(-1)
        for piece in flat.split(PIECE_BYTES // flat.element_size()):
            pieces.append((target[start : start + len(piece)], piece))
            start += len(piece)
    return pieces
