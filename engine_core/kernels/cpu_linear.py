"""Linear layers on packed weights: integers of 4 or 8 bits, whose inputs are rounded to int8, or plain float32."""

from __future__ import annotations

import torch

from engine_core.kernels.cpu_cache import dot_width, kernel
from engine_core.kernels.cpu_layout import ADD, BLOCK, CHUNK, GATE, GROUP, LARGEST, STORE, X_BLOCK_BYTES, X_GROUP
from engine_core.kernels.cpu_pack import PackedWeight
from engine_core.kernels.cpu_team import cpu_team

SMALL = 16_384  # inputs that one thread rounds sooner than two could agree to share them


class PackedLinear:
    """y = x W^T + b on packed weights; see `Linear`. A row of y does not depend on the other rows of x.

    Integer weights: x is rounded to int8, with a scale for each 32 values of a row, and the sums of 32 products are
    exact. With 4 bits these are scaled in fixed point, see `WeightFormat.fixed`.
    `width` is of the instruction to use, as `dot_width` tells it.
    """

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None = None, width: int | None = None) -> None:
        self.weight, self.bias, self._team = weight, bias, cpu_team()
        self.out_features, self.in_features = weight.shape
        form = weight.form
        self.rounds = form.bits != 32  # its inputs to int8
        if self.rounds:
            self._instruction = dot_width() if width is None else width
        self._blocks, self._chunks = weight.data.shape[1], weight.data.shape[0]
        self.width = self._chunks * CHUNK  # of its results in memory, of which the first `out_features` count

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        if x.stride(1) != 1 or dtype != torch.float32:
            x = x.float().contiguous()
        rows = x.shape[0]
        out = torch.empty(rows, self.width)
        if rows:
            self._multiply(x, rows, out)
        if self.width != self.out_features:
            out = out[:, : self.out_features]
        if self.bias is not None:
            out.add_(self.bias)
        return out if dtype == torch.float32 else out.to(dtype)

    def _multiply(self, x: torch.Tensor, rows: int, out: torch.Tensor) -> None:
        form, blocks = self.weight.form, self._blocks
        if not self.rounds:
            self._team.run(*self.product(rows, x.data_ptr(), x.stride(0), out.data_ptr()))
            return
        rounded = torch.empty(rounded_bytes(rows, self.in_features), dtype=torch.uint8)
        args = (rows, x.data_ptr(), x.stride(0), blocks, rounded.data_ptr(), form.offset)
        self._team.run(kernel("linear:quantize"), args, rows * blocks * BLOCK > SMALL)
        self._team.run(*self.product(rows, rounded.data_ptr(), 0, out.data_ptr()))

    def product(self, rows: int, x: int, x_stride: int, out: int) -> tuple[int, tuple[int, ...]]:
        """The kernel and its arguments for `x`, floats or rounded to int8, and `out` [rows, width], both addresses.

        The stride is of floats. The bias is left to the caller.
        """
        if self.rounds:
            return self._integers(STORE, rows, x, out, self.width, 0)
        weights = (self.weight.data.data_ptr(), self._blocks, self._chunks)
        return kernel("linear:floats"), (rows, x, x_stride, *weights, out, self.width)

    def telling_product(self, rows: int, x: int, out: int, largest: int) -> tuple[int, tuple[int, ...]]:
        """Of integer weights, as `product` unless `out` is 0; and the largest of each chunk at `largest`, which has
        `largest_bytes`."""
        code, args = self._integers(LARGEST, rows, x, out, self.width, largest)
        return code, (*args, self.out_features)

    def added_product(self, rows: int, x: int, total: int, stride: int) -> tuple[int, tuple[int, ...]]:
        """Of integer weights: product and bias are added to `total` [rows, out_features]."""
        return self._integers(ADD, rows, x, total, stride, 0, self.bias)

    def gated_product(self, rows: int, x: int, consumer: PackedLinear, out: int) -> tuple[int, tuple[int, ...]]:
        """Of integer weights: SiLU of the first half times the second, rounded for `consumer`."""
        return self._integers(GATE, rows, x, out, consumer._blocks, consumer.weight.form.offset, self.bias)

    def _integers(
        self, result: int, rows: int, x: int, out: int, stride: int, offset: int, bias: torch.Tensor | None = None
    ) -> tuple[int, tuple[int, ...]]:
        form, added = self.weight.form, 0 if bias is None else bias.data_ptr()
        weights = (self.weight.data.data_ptr(), self._blocks, self._chunks)
        code = kernel("linear:integers", form.bits, form.minimum, self._instruction, result)
        return code, (rows, x, *weights, out, stride, added, offset, self.weight.units.data_ptr())


def largest_bytes(rows: int, width: int) -> int:
    """Of what `telling_product` tells: for groups of rows and each chunk a float and an int32 a row."""
    return -(-rows // GROUP) * GROUP * (width // CHUNK) * 8


def rounded_bytes(rows: int, columns: int) -> int:
    """The size of inputs rounded to int8: whole groups of rows."""
    return -(-rows // X_GROUP) * X_GROUP * columns // BLOCK * X_BLOCK_BYTES
