"""The key-value part of a GGUF file, vocabulary included, in tens of milliseconds. Tensors are not looked at.

The `gguf` package's reader builds a numpy view per token of the vocabulary, which takes seconds.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from ipc.errors import UserError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_NESTING = 4


def read_metadata(path: Path) -> dict[str, Any]:
    """All keys with their values as plain Python values.

    Raises `UserError` if the file cannot be read, is no GGUF file of version 2 or 3, or ends too early.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(data).metadata()
    except (OSError, ValueError, struct.error, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"cannot read {path} as a GGUF file: {error}") from error


class _Parser:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def metadata(self) -> dict[str, Any]:
        if self._data[:4] != b"GGUF":
            raise UserError("not a GGUF file: it does not begin with GGUF")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise UserError(f"GGUF version {version} is not supported (2 and 3, little endian, are)")
        self._scalar("Q")  # number of tensors
        entries = self._scalar("Q")
        return {self._string(): self._value(self._scalar("I")) for _ in range(entries)}

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        data, at, length_at = self._data, self._at, struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            (length,) = length_at(data, at)
            end = at + 8 + length
            if end > len(data):
                raise ValueError("it ends inside a string")
            strings.append(data[at + 8 : end].decode("utf-8", "replace"))
            at = end
        self._at = at
        return strings

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY and depth < _MAX_NESTING:
            item, count = self._scalar("I"), self._scalar("Q")
            if item == _STRING:
                return self._strings(count)
            if item == _ARRAY:
                return [self._value(item, depth + 1) for _ in range(count)]
            code = f"<{count}{self._code(item)}"
            values = struct.unpack_from(code, self._data, self._at)
            self._at += struct.calcsize(code)
            return list(values)
        return self._scalar(self._code(kind))

    @staticmethod
    def _code(kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind}")
        return _SCALARS[kind]
