"""The GGUF container: metadata and where each tensor lies. The `gguf` package's constants are used as they are."""

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
from ipc.gguf import HeaderReader

MAX_DIMENSIONS = 4
MAX_KEPT_ARRAY = 512  # longer arrays (vocabularies) are stepped over


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
        self.metadata: dict[str, Any] = {}  # without long arrays
        self.tensors: dict[str, TensorInfo] = {}
        try:
            with open(path, "rb") as file:
                # Stays mapped for as long as any array refers to it.
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise UserError(f"{path} cannot be read: {error}") from error
        self._data: npt.NDArray[np.uint8] = np.frombuffer(mapped, np.uint8)
        try:
            self._read_header(HeaderReader(path, mapped, MAX_KEPT_ARRAY))
        except (struct.error, ValueError, OverflowError) as error:
            if isinstance(error, UserError):
                raise
            raise self._damaged("its header makes no sense") from error

    def bytes_of(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        """The tensor's raw bytes, a read-only view of the file."""
        return self._data[info.offset : info.offset + info.num_bytes]

    def _read_header(self, reader: HeaderReader) -> None:
        self.metadata, num_tensors = reader.metadata()
        infos = [self._tensor_info(reader) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._damaged(f"its alignment is {alignment!r}")
        start = -(-reader.offset // alignment) * alignment
        for name, ggml_type, shape, offset in infos:
            block, size = GGML_QUANT_SIZES[ggml_type]
            if shape[-1] % block:
                raise self._damaged(f"tensor {name} has rows of {shape[-1]} values in blocks of {block}")
            num_bytes = math.prod(shape) // block * size
            if start + offset + num_bytes > len(self._data):
                raise self._damaged(f"it ends before tensor {name}")
            self.tensors[name] = TensorInfo(name, ggml_type, shape, start + offset, num_bytes)

    def _tensor_info(self, reader: HeaderReader) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        name = reader.string()
        dimensions = reader.scalar("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._damaged(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(reversed([reader.scalar("Q") for _ in range(dimensions)]))
        number = reader.scalar("I")
        try:
            ggml_type = GGMLQuantizationType(number)
        except ValueError as error:
            raise UserError(f"{self.path}: tensor {name} is of the unknown GGML type {number}") from error
        return name, ggml_type, shape, reader.scalar("Q")

    def _damaged(self, why: str) -> UserError:
        return UserError(f"{self.path} is damaged or incomplete ({why}); download it again")
