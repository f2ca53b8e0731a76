"""What a checkpoint hands to the layers: a dense tensor, or a matrix still in the file's own quantized blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

UInt8Array = npt.NDArray[np.uint8]
Float32Array = npt.NDArray[np.float32]
CACHED_VALUES = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A matrix [rows, columns] in GGML blocks. Blocks run along the columns, so rows can be moved and joined freely.

    `data` is uint8 [rows, row_bytes]; it may be a read-only view of the memory-mapped file.
    """

    ggml_type: GGMLQuantizationType
    shape: tuple[int, int]
    data: UInt8Array

    def __post_init__(self) -> None:
        rows, columns = self.shape
        block, size = GGML_QUANT_SIZES[self.ggml_type]
        expected = (rows, columns // block * size)
        if columns % block or self.data.shape != expected or self.data.dtype != np.uint8:
            raise ValueError(
                f"{self.ggml_type.name} of shape {self.shape} needs uint8 data of shape {expected}, "
                f"got {self.data.dtype} {self.data.shape}"
            )

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes

    def dequantize(self, out: Float32Array | None = None) -> Float32Array:
        """The values, float32 [rows, columns]; written into `out` if it is given."""
        rows, columns = self.shape
        if out is None:
            out = np.empty(self.shape, np.float32)
        # Pieces that stay in the cache: three times as fast as all rows at once, or as few rows at a time.
        dequantize_rows = getattr(quants, self.ggml_type.name).dequantize_rows
        step = max(1, CACHED_VALUES // columns)
        for start in range(0, rows, step):
            out[start : start + step] = dequantize_rows(self.data[start : start + step])
        return out

    def take_rows(self, index: npt.NDArray[np.integer[Any]] | slice) -> QuantizedWeight:
        """The rows `index`, in that order, still quantized."""
        data = self.data[index]
        return QuantizedWeight(self.ggml_type, (data.shape[0], self.shape[1]), data)


Weight = torch.Tensor | QuantizedWeight


def dense(parts: Sequence[Weight], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The parts below one another as one dense tensor [sum of rows, columns]. A single tensor is not copied if it is
    what is wanted already."""
    if len(parts) == 1 and isinstance(parts[0], torch.Tensor):
        return parts[0].to(device, dtype)
    rows = sum(part.shape[0] for part in parts)
    out = torch.empty((rows, *parts[0].shape[1:]), dtype=dtype, device=device)
    start = 0
    for part in parts:
        target = out[start : start + part.shape[0]]
        if isinstance(part, torch.Tensor):
            target.copy_(part)
        elif dtype == torch.float32 and device.type == "cpu":
            part.dequantize(target.numpy())
        else:
            target.copy_(torch.from_numpy(part.dequantize()))
        start += part.shape[0]
    return out
