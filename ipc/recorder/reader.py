"""Reads rings, also while they are written. Takes nothing for granted: a file may be cut short or hold anything."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ipc.recorder.events import KINDS
from ipc.recorder.ring import CODE_BITS, HEADER, HEADER_BYTES, MAGIC, RECORD, SUFFIX, VERSION

_LOW = 0xFFFF_FFFF


class NotARing(ValueError):
    """The file is no ring, or one of another version."""


class Record(NamedTuple):
    """One entry; see `events` for what `id`, `a`, `b` and `c` mean. `begin` is CLOCK_MONOTONIC ns."""

    number: int
    code: int
    begin: int
    duration: int
    id: int
    a: int
    b: int
    c: int

    @property
    def end(self) -> int:
        return self.begin + self.duration


@dataclass(frozen=True, slots=True)
class Recording:
    """What one process has recorded, in the order in which the records were written."""

    name: str
    pid: int
    records: list[Record]
    lost: int  # older records that newer ones have replaced
    torn: int  # records that were being written, or that make no sense
    monotonic_ns: int  # a moment in two clocks
    realtime_ns: int


def read_ring(path: Path) -> Recording:
    """Raises `NotARing` and OSError."""
    return parse_ring(path.read_bytes(), path.read_bytes(), path.read_bytes())


def read_rings(folder: Path) -> list[Recording]:
    """All rings of a run, by name and pid. What is no ring is left out."""
    found = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            found.append(read_ring(path))
        except (NotARing, OSError):
            continue
    return found


def parse_ring(before: bytes, data: bytes, after: bytes) -> Recording:
    """Three readings of one file, one after the other. A record is whole if the number at its end, which is written
    last, was there before it was read, and the one at its front, which is written first, was still there after it."""
    if len(data) < HEADER_BYTES:
        raise NotARing("too short")
    magic, version, size, count, pid, monotonic, realtime, name = HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION or size != RECORD.size or count == 0 or count & (count - 1):
        raise NotARing("not a recording, or one of another version of Gapless")
    count_here = min(count, (min(map(len, (before, data, after))) - HEADER_BYTES) // size)
    records: list[Record] = []
    torn = newest = 0
    window = slice(HEADER_BYTES, HEADER_BYTES + count_here * size)
    readings = (RECORD.iter_unpack(memoryview(reading)[window]) for reading in (before, data, after))
    for index, (old, (number, word, begin, id_, a, b, c, _), new) in enumerate(zip(*readings, strict=True)):
        if number == old[-1] == 0:
            continue
        code = word & ((1 << CODE_BITS) - 1)
        whole = old[-1] == number & _LOW and new[0] == number and number & (count - 1) == index
        if not whole or code not in KINDS or begin <= 0:
            torn += 1
            continue
        newest = max(newest, number)
        records.append(Record(number, code, begin, word >> CODE_BITS, id_, a, b, c))
    records.sort()
    text = name.rstrip(b"\0").decode(errors="replace")
    return Recording(text, pid, records, max(0, newest - count), torn, monotonic, realtime)


def used_bytes(data: bytes) -> int:
    """How much of a ring's file holds anything: the zeros after it need not be kept."""
    return HEADER_BYTES + -(-len(data[HEADER_BYTES:].rstrip(b"\0")) // RECORD.size) * RECORD.size


def span_of(recordings: Iterable[Recording]) -> tuple[int, int]:
    """From when to when anything was recorded, CLOCK_MONOTONIC ns; (0, 0) if nothing was."""
    begins = [record.begin for recording in recordings for record in recording.records]
    ends = [record.end for recording in recordings for record in recording.records]
    return (min(begins), max(ends)) if begins else (0, 0)
