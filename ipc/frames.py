"""Frames on a pipe: between a process and the one it has started to work beside it, on its standard input and output.

length of 8 bytes, then as many bytes · again
"""

from __future__ import annotations

import struct
from typing import IO

LENGTH = struct.Struct("<Q")
_PIECE = 1 << 20  # bytes


def frame(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


def read_frame(source: IO[bytes]) -> bytearray | None:
    """The next frame of an unbuffered pipe; None if it has ended, also in the middle of one."""
    head = _exactly(source, LENGTH.size)
    return None if head is None else _exactly(source, LENGTH.unpack(head)[0])


def write_frame(sink: IO[bytes], data: bytes | memoryview) -> None:
    """To an unbuffered pipe. Raises OSError if nobody reads it any more."""
    for part in (memoryview(LENGTH.pack(len(data))), memoryview(data)):
        while part:
            part = part[sink.write(part[:_PIECE]) :]


def _exactly(source: IO[bytes], size: int) -> bytearray | None:
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        count = source.readinto(view[filled:])  # type: ignore[attr-defined]
        if not count:
            return None
        filled += count
    return data
