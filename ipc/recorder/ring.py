"""The recorder of one process, and the ring of fixed-size records that it writes to.

    file:    header (128 bytes) · records (48 bytes each); record n lies at n modulo their number
    record:  number · duration and code · begin · id · a · b · c · the low half of the number again

A record is written front to back by one `pack_into`, with no lock and no system call. A reader may look at any moment:
what was half written, or overwritten while it read, shows in the two numbers (see `reader`). The pages belong to the
file, not to the process, so they outlive a SIGKILL.

One thread of the process writes. Two threads that both do (a collection in another thread is recorded, too) lose
nothing, since numbers are drawn atomically and Python's lock is held while a record is packed.
"""

from __future__ import annotations

import fcntl
import gc
import itertools
import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ipc.recorder.events import GC

MAGIC: Final = b"GAPLESS\0"
VERSION: Final = 1
HEADER_BYTES: Final = 128
# magic, version, record bytes, number of records, pid, CLOCK_MONOTONIC ns and CLOCK_REALTIME ns of one moment, name
HEADER: Final = struct.Struct("<8sIIIIqq64s")
RECORD: Final = struct.Struct("<QQqqiiiI")
LONGEST: Final = 2**48 - 1  # nanoseconds of a span, 78 hours: an idle process may wait longer
CODE_BITS: Final = 16
SUFFIX: Final = ".ring"

RECORDS: Final = 1 << 17  # 6 MiB: some ten seconds of an engine that makes a step in half a millisecond
FEW_RECORDS: Final = 1 << 13  # where shared memory is scarce
_SHORT_GC_NS = 20_000
_SHARE = 32  # a full ring takes no more than this part of what is free: there are more processes, and other users


def num_records(folder: Path) -> int:
    """How many a ring in `folder` should hold. A container's shared memory may be 64 MiB in all."""
    found = os.statvfs(folder)
    return RECORDS if found.f_bavail * found.f_frsize >= _SHARE * RECORDS * RECORD.size else FEW_RECORDS


class Recorder:
    """Records nothing: for engines that nobody watches. `RingRecorder` and `NvtxRecorder` are those that do.

        began = recorder.begin(SCHEDULE)
        plan = scheduler.schedule()
        recorder.end(SCHEDULE, began, plan.step, plan.num_tokens)

    Times are CLOCK_MONOTONIC ns, `request` is a request id or a step (see `events`), a, b and c are int32 values.
    """

    keeps = False  # whether anything becomes of what is recorded

    def begin(self, code: int) -> int:
        """The time. Each `begin` is followed by its `end` in the same thread, and no other task runs in between."""
        return time.monotonic_ns()

    def end(self, code: int, began: int, id: int = 0, a: int = 0, b: int = 0, c: int = 0) -> None:
        """A span that began at `began` and ends now."""

    def span(self, code: int, began: int, ended: int, id: int = 0, a: int = 0, b: int = 0, c: int = 0) -> None:
        """A span whose times were taken elsewhere."""

    def mark(self, code: int, id: int = 0, a: int = 0, b: int = 0, c: int = 0) -> None:
        """A moment: now."""

    def watch_gc(self) -> None:
        """Record the garbage collections of this process from now on."""


class RingRecorder(Recorder):
    """Writes to the file `<folder>/<name>-<pid>.ring`, made here. Raises OSError if there is no room for it."""

    keeps = True

    def __init__(self, folder: Path, name: str, num_records: int = RECORDS) -> None:
        if num_records & (num_records - 1):
            raise ValueError(f"num_records must be a power of two, got {num_records}")
        self.path = folder / f"{name}-{os.getpid()}{SUFFIX}"
        memory = memoryview(_make_file(self.path, HEADER_BYTES + num_records * RECORD.size))
        times = time.monotonic_ns(), time.time_ns()
        HEADER.pack_into(
            memory, 0, MAGIC, VERSION, RECORD.size, num_records, os.getpid(), *times, name.encode()[:64]
        )  # fmt: skip
        self._records = memory[HEADER_BYTES:]
        self._mask = num_records - 1
        self._next: Callable[[], int] = itertools.count(1).__next__  # 0 is a record that was never written
        self._pack = RECORD.pack_into

    def end(self, code: int, began: int, id: int = 0, a: int = 0, b: int = 0, c: int = 0) -> None:
        n = self._next()
        took = time.monotonic_ns() - began
        if took > LONGEST:  # not `min`, which costs a fifth of all this
            took = LONGEST
        self._pack(self._records, (n & self._mask) * 48, n, took << 16 | code, began, id, a, b, c, n & 0xFFFF_FFFF)

    def span(self, code: int, began: int, ended: int, id: int = 0, a: int = 0, b: int = 0, c: int = 0) -> None:
        n = self._next()
        word = min(max(0, ended - began), LONGEST) << 16 | code
        self._pack(self._records, (n & self._mask) * 48, n, word, began, id, a, b, c, n & 0xFFFF_FFFF)

    def mark(self, code: int, id: int = 0, a: int = 0, b: int = 0, c: int = 0) -> None:
        n = self._next()
        self._pack(self._records, (n & self._mask) * 48, n, code, time.monotonic_ns(), id, a, b, c, n & 0xFFFF_FFFF)

    def watch_gc(self) -> None:
        began = 0

        def on_gc(phase: str, info: dict[str, int]) -> None:
            nonlocal began
            now = time.monotonic_ns()
            if phase == "start":
                began = now
            elif now - began >= _SHORT_GC_NS:
                self.span(GC, began, now, 0, info["generation"], info["collected"])

        gc.callbacks.append(on_gc)


def _make_file(path: Path, size: int) -> mmap.mmap:
    """A new file of this user alone, all its memory taken now: later there would be no error, but a SIGBUS.

    It is locked (flock) as long as the memory is mapped, so as long as the process lives."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)  # the mapping keeps a descriptor of the same open file
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)
        else:
            os.ftruncate(fd, size)
        return mmap.mmap(fd, size)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
