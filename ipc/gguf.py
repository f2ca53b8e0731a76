"""The header of a GGUF file: its keys and values. Read by the tokenizer with the vocabulary, by the engine without.

The `gguf` package's reader makes a numpy view of every token of the vocabulary, which takes seconds; here it takes tens
of milliseconds, or a few where long arrays are stepped over.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from ipc.errors import UserError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_NESTING = 4
_LENGTH = struct.Struct("<Q")


class HeaderReader:
    """Reads values one after the other. What makes no sense, or ends too early, is a struct.error or a ValueError.

    `path` is what `data` is called in errors. `longest`: arrays of more items are stepped over, their value is None.
    """

    def __init__(self, path: Path, data: mmap.mmap, longest: int | None = None) -> None:
        self.path = path
        self.offset = 0  # from the start of the file
        self._data = data
        self._longest = longest

    def metadata(self) -> tuple[dict[str, Any], int]:
        """All keys with their values as plain Python values, and how many descriptions of tensors follow them.

        Raises `UserError` if this is no GGUF file of a version that is known.
        """
        self.offset = len(MAGIC)
        if self._data[: self.offset] != MAGIC:
            raise UserError(f"{self.path} is not a GGUF file")
        if (version := self.scalar("I")) not in VERSIONS:
            raise UserError(f"{self.path} has GGUF version {version}; supported are {VERSIONS} (little endian)")
        num_tensors, num_entries = self.scalar("Q"), self.scalar("Q")
        return {self.string(): self._value(self.scalar("I")) for _ in range(num_entries)}, num_tensors

    def scalar(self, code: str) -> Any:
        """`code`: as in `struct`."""
        (value,) = struct.unpack_from("<" + code, self._data, self.offset)
        self.offset += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        return self._strings(1)[0]

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY and depth < _MAX_NESTING:
            return self._array(depth)
        return self.scalar(_code(kind))

    def _array(self, depth: int) -> list[Any] | None:
        kind, count = self.scalar("I"), self.scalar("Q")
        keep = self._longest is None or count <= self._longest
        if kind == _STRING:
            if keep:
                return self._strings(count)
            self._skip_strings(count)
            return None
        if kind == _ARRAY:
            values = [self._value(kind, depth + 1) for _ in range(count)]
            return values if keep else None
        code = f"<{count}{_code(kind)}"
        at = self.offset
        self.offset += struct.calcsize(code)
        if self.offset > len(self._data):
            raise ValueError("it ends inside an array")
        return list(struct.unpack_from(code, self._data, at)) if keep else None

    def _strings(self, count: int) -> list[str]:
        data, at, length_at = self._data, self.offset, _LENGTH.unpack_from
        strings = []
        for _ in range(count):
            (length,) = length_at(data, at)
            end = at + 8 + length
            if end > len(data):
                raise ValueError("it ends inside a string")
            strings.append(data[at + 8 : end].decode("utf-8", "replace"))
            at = end
        self.offset = at
        return strings

    def _skip_strings(self, count: int) -> None:
        data, at, length_at, end = self._data, self.offset, _LENGTH.unpack_from, len(self._data)
        for _ in range(count):
            at += 8 + length_at(data, at)[0]
            if at > end:
                raise ValueError("it ends inside a string")
        self.offset = at


def _code(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"unknown value type {kind}")
    return _SCALARS[kind]
