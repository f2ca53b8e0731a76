"""The GGUF container: metadata and where each tensor lies. Reads a header in milliseconds.

The `gguf` package's reader makes a numpy view of every token of the vocabulary, which takes seconds; here large arrays
are stepped over. Its constants and dequantizers are used as they are.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType

from engine_core.errors import UserError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_KEPT_ARRAY = 512  # longer arrays (vocabularies) are stepped over
STRING, ARRAY = 8, 9
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str
    ggml_type: GGMLQuantizationType
    shape: tuple[int, ...]  # outermost first, as in numpy
    offset: int  # from the start of the file
    num_bytes: int


class GGUFFile:
    """A memory-mapped GGUF file.

    Raises:
        UserError: not a GGUF file, of an unknown version, truncated or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            with open(path, "rb") as file:
                # Stays mapped for as long as any array refers to it.
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise UserError(f"{path} cannot be read: {error}") from error
        self._data: npt.NDArray[np.uint8] = np.frombuffer(mapped, np.uint8)
        try:
            self._read_header(_Cursor(memoryview(mapped)))
        except (struct.error, ValueError, OverflowError) as error:
            if isinstance(error, UserError):
                raise
            raise self._damaged("its header makes no sense") from error

    def bytes_of(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        """The tensor's raw bytes, a read-only view of the file."""
        return self._data[info.offset : info.offset + info.num_bytes]

    def _read_header(self, cursor: _Cursor) -> None:
        if bytes(cursor.take(4)) != MAGIC:
            raise UserError(f"{self.path} is not a GGUF file")
        version = cursor.scalar("<I")
        if version not in VERSIONS:
            raise UserError(f"{self.path} has GGUF version {version}; supported are {VERSIONS} (little endian)")
        num_tensors, num_entries = cursor.scalar("<Q"), cursor.scalar("<Q")
        for _ in range(num_entries):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("<I"))
        infos = [self._tensor_info(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._damaged(f"its alignment is {alignment!r}")
        start = -(-cursor.offset // alignment) * alignment
        for name, ggml_type, shape, offset in infos:
            block, size = GGML_QUANT_SIZES[ggml_type]
            if shape[-1] % block:
                raise self._damaged(f"tensor {name} has rows of {shape[-1]} values in blocks of {block}")
            num_bytes = math.prod(shape) // block * size
            if start + offset + num_bytes > len(self._data):
                raise self._damaged(f"it ends before tensor {name}")
            self.tensors[name] = TensorInfo(name, ggml_type, shape, start + offset, num_bytes)

    def _tensor_info(self, cursor: _Cursor) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        name = cursor.string()
        dimensions = cursor.scalar("<I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._damaged(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(reversed([cursor.scalar("<Q") for _ in range(dimensions)]))
        number = cursor.scalar("<I")
        try:
            ggml_type = GGMLQuantizationType(number)
        except ValueError as error:
            raise UserError(f"{self.path}: tensor {name} is of the unknown GGML type {number}") from error
        return name, ggml_type, shape, cursor.scalar("<Q")

    def _damaged(self, why: str) -> UserError:
        return UserError(f"{self.path} is damaged or incomplete ({why}); download it again")


class _Cursor:
    """Reads values one after the other. Running off the end is a struct.error or a ValueError."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.offset = data, 0

    def take(self, count: int) -> memoryview:
        end = self.offset + count
        if end > len(self.data):
            raise ValueError("past the end of the file")
        start, self.offset = self.offset, end
        return self.data[start:end]

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self.data, self.offset)
        self.offset += struct.calcsize(code)
        return value

    def string(self) -> str:
        return str(self.take(self.scalar("<Q")), "utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self._array()
        if kind not in SCALARS:
            raise ValueError(f"unknown value type {kind}")
        return self.scalar(SCALARS[kind])

    def _array(self) -> list[Any] | None:
        """The items, or None for an array too long to be of interest here."""
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind == ARRAY:
            raise ValueError("nested arrays")
        if count <= MAX_KEPT_ARRAY:
            return [self.value(kind) for _ in range(count)]
        if kind == STRING:
            self._skip_strings(count)
        elif kind in SCALARS:
            self.take(count * struct.calcsize(SCALARS[kind]))
        else:
            raise ValueError(f"unknown value type {kind}")
        return None

    def _skip_strings(self, count: int) -> None:
        unpack, data, offset, end = struct.Struct("<Q").unpack_from, self.data, self.offset, len(self.data)
        for _ in range(count):
            offset += 8 + unpack(data, offset)[0]
            if offset > end:
                raise ValueError("past the end of the file")
        self.offset = offset
