"""Linear layers on packed weights: integers of 4 or 8 bits, whose inputs are rounded to int8, or plain float32."""

from __future__ import annotations

import torch

from engine_core.kernels.cpu_cache import dot_width, kernel
from engine_core.kernels.cpu_layout import BLOCK, CHUNK, X_BLOCK_BYTES
from engine_core.kernels.cpu_pack import PackedWeight
from engine_core.kernels.cpu_team import cpu_team

SMALL = 16_384  # inputs that one thread rounds sooner than two could agree to share them


class PackedLinear:
    """y = x W^T + b on packed weights; see `Linear`. A row of y does not depend on the other rows of x.

    Integer weights: x is rounded to int8, with a scale for each 32 values of a row, and the products are exact.
    `width` is of the instruction to use, as `dot_width` tells it.
    """

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None = None, width: int | None = None) -> None:
        self.weight, self.bias, self._team = weight, bias, cpu_team()
        self.out_features, self.in_features = weight.shape
        form = weight.form
        if form.bits == 32:
            self._kernel = kernel("linear:floats")
        else:
            self._kernel = kernel("linear:integers", form.bits, form.minimum, dot_width() if width is None else width)
            self._quantize = kernel("linear:quantize")
        self._blocks, self._chunks = weight.data.shape[1], weight.data.shape[0]
        self._width = self._chunks * CHUNK
        self._weights = (weight.data.data_ptr(), weight.scales.data_ptr())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        if x.stride(1) != 1 or dtype != torch.float32:
            x = x.float().contiguous()
        rows = x.shape[0]
        out = torch.empty(rows, self._width)
        if rows:
            self._multiply(x, rows, out)
        if self._width != self.out_features:
            out = out[:, : self.out_features]
        if self.bias is not None:
            out.add_(self.bias)
        return out if dtype == torch.float32 else out.to(dtype)

    def _multiply(self, x: torch.Tensor, rows: int, out: torch.Tensor) -> None:
        form, blocks = self.weight.form, self._blocks
        where = (blocks, self._chunks, out.data_ptr(), self._width)
        if form.bits == 32:
            self._team.run(self._kernel, (x.data_ptr(), x.stride(0), rows, self._weights[0], *where))
            return
        rounded = torch.empty(rows, blocks * X_BLOCK_BYTES, dtype=torch.uint8)
        source, target = (x.data_ptr(), x.stride(0)), rounded.data_ptr()
        self._team.run(self._quantize, (*source, rows, blocks, target, form.offset), rows * blocks * BLOCK > SMALL)
        self._team.run(self._kernel, (target, rounded.stride(0), rows, *self._weights, *where))
