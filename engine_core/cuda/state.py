"""What the GPU keeps between steps, one row per slot, and the pinned memory that steps are told through."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine_core.plan import ScheduledRow
from engine_core.request import Request

STAGES = 4  # steps whose inputs may be on their way at once; more than the engine ever has in flight
MOST_BLOCKS = 16_384  # entries of block tables in one copy


def send(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy of `values` on the device, which may be on its way still."""
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.clone()


def aligned(length: int) -> int:
    """Int32 values that an array of `length` takes in a buffer of several. Triton compiles a kernel anew for a pointer
    that is not a multiple of 16 bytes where it was before: so all of them are."""
    return -(-length // 4) * 4


class SlotState:
    """Block tables on the device, and who owns them. The last row belongs to nobody: padding.

    `enter` is called with the requests that come to their slots, before anything of theirs is run.
    """

    def __init__(
        self, max_num_seqs: int, max_blocks: int, device: torch.device, enter: Callable[[Sequence[Request]], None]
    ) -> None:
        rows = max_num_seqs + 1
        self.pad = max_num_seqs
        self.device = device
        self.tables = torch.zeros(rows, max_blocks, dtype=torch.int32, device=device)
        self._enter = enter
        self._owners: list[Request | None] = [None] * rows
        self._known = [0] * rows  # blocks of each slot's table that the device has
        self._news = Staging(3 * MOST_BLOCKS, device)

    def new_blocks(self, rows: Sequence[ScheduledRow], block_size: int) -> list[int]:
        """The block that each decode row adds to its table in this step, or -1. Anything else is uploaded at once."""
        owners, known = self._owners, self._known
        new: list[int] = []
        unknown: list[ScheduledRow] = []
        for row in rows:
            request = row.request
            slot, last = request.slot, row.start // block_size
            count = known[slot] if owners[slot] is request else -1
            if count > last:
                new.append(-1)
            elif count == last:
                new.append(request.block_ids[last])
                known[slot] = last + 1
            else:
                new.append(-1)
                unknown.append(row)
        if unknown:
            self.upload(unknown, block_size)
        return new

    def upload(self, rows: Sequence[ScheduledRow], block_size: int) -> None:
        """The blocks the device does not know yet: one copy for all rows."""
        owners, known, width = self._owners, self._known, self.tables.shape[1]
        cells: list[int] = []  # of the flat tables
        blocks: list[int] = []
        newcomers: list[Request] = []
        for row in rows:
            request = row.request
            slot, needed = request.slot, -(-(row.start + row.count) // block_size)
            if owners[slot] is not request:
                owners[slot] = request
                known[slot] = 0
                newcomers.append(request)
            if known[slot] < needed:
                cells += range(slot * width + known[slot], slot * width + needed)
                blocks += request.block_ids[known[slot] : needed]
                known[slot] = needed
        for start in range(0, len(blocks), MOST_BLOCKS):
            part = slice(start, start + MOST_BLOCKS)
            where = np.array(cells[part], np.int64).view(np.int32)
            on_device = self._news.send([where, np.array(blocks[part], np.int32)])
            self.tables.view(-1).scatter_(0, on_device[0].view(torch.int64), on_device[1])
        if newcomers:
            self._enter(newcomers)

    def forget(self, request: Request) -> None:
        if request.slot >= 0 and self._owners[request.slot] is request:
            self._owners[request.slot] = None


class Staging:
    """A ring of pinned buffers for int32 step inputs. A buffer is filled again only when its copy is long done."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        buffers = [torch.zeros(size, dtype=torch.int32) for _ in range(STAGES)]
        self._host = [buffer.pin_memory() if self._pinned else buffer for buffer in buffers]
        self._views = [buffer.numpy() for buffer in self._host]
        self._copied = [torch.cuda.Event() for _ in range(STAGES if self._pinned else 0)]
        self._turn = 0
        self.size = size
        self.device = device

    def send(self, arrays: Sequence[np.ndarray], out: torch.Tensor | None = None) -> list[torch.Tensor]:
        """The int32 `arrays` one after the other on the device, in one copy; views of `out` if given."""
        turn = self._turn = (self._turn + 1) % STAGES
        if self._pinned:
            self._copied[turn].synchronize()
        starts = [0, *itertools.accumulate(aligned(len(array)) for array in arrays)]
        stop = starts[-2] + len(arrays[-1])
        for array, start in zip(arrays, starts, strict=False):
            self._views[turn][start : start + len(array)] = array
        if out is None:
            out = torch.empty(stop, dtype=torch.int32, device=self.device)
        out[:stop].copy_(self._host[turn][:stop], non_blocking=True)
        if self._pinned:
            self._copied[turn].record()
        return [out[start : start + len(array)] for array, start in zip(arrays, starts, strict=False)]
