"""Linear layers on packed weights: integers of 4 or 8 bits, whose inputs are rounded to int8, or plain float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from engine_core.kernels.cpu_dot import X_BLOCK_BYTES, dot_tile, dot_width, quantize_block
from engine_core.kernels.cpu_jit import compile_kernel, next_task
from engine_core.kernels.cpu_pack import PackedWeight
from engine_core.kernels.cpu_team import cpu_team
from engine_core.kernels.cpu_tile import BLOCK, CHUNK, GROUP, WeightFormat, linear_tile

ROWS = 48  # rows of x in a task: they stay in the second-level cache
SMALL = 16_384  # inputs that one thread rounds sooner than two could agree to share them


def _integer_kernel(form: WeightFormat, width: int) -> Callable[[Any], None]:
    """Arguments: counter, x (rounded), its stride in bytes, rows, weights, scales, blocks, chunks, out, out_stride.

    Tiles of few rows take the whole chunk, so that weights are read front to back; those of more take half of it, so
    that their sums stay in registers.
    """
    tile1, tile2 = dot_tile(form, 1, 4, width), dot_tile(form, 2, 4, width)
    tile4, tile8 = dot_tile(form, 4, 2, width), dot_tile(form, 8, 2, width)
    block_bytes, block_scales = form.block_bytes, form.block_scales
    half = CHUNK // 2

    def kernel(args: Any) -> None:
        x, x_stride, rows, weights, scales = args[1], args[2], args[3], args[4], args[5]
        blocks, chunks, out, out_stride = args[6], args[7], args[8], args[9]
        tasks = chunks * ((rows + ROWS - 1) // ROWS)
        while True:
            task = next_task(args)
            if task >= tasks:
                break
            chunk, first_row = task % chunks, task // chunks * ROWS
            last_row = min(rows, first_row + ROWS)
            w = weights + chunk * blocks * block_bytes
            s = scales + chunk * blocks * block_scales * 2
            o = out + chunk * CHUNK * 4
            whole = (last_row - first_row) // 4 * 4 + first_row
            for first in range(0, CHUNK, half):
                wh, sh = w + first * 4, s + first * 2
                row = first_row
                while row < whole:
                    xr, oh = x + row * x_stride, o + (row * out_stride + first) * 4
                    if whole - row >= 8:
                        tile8(xr, x_stride, wh, sh, blocks, oh, out_stride)
                        row += 8
                    else:
                        tile4(xr, x_stride, wh, sh, blocks, oh, out_stride)
                        row += 4
            row = whole
            while row < last_row:
                xr, oh = x + row * x_stride, o + row * out_stride * 4
                if last_row - row >= 2:
                    tile2(xr, x_stride, w, s, blocks, oh, out_stride)
                    row += 2
                else:
                    tile1(xr, x_stride, w, s, blocks, oh, out_stride)
                    row += 1

    return kernel


def _quantize(args: Any) -> None:
    """Arguments: counter, x, its stride in floats, rows, blocks, out, offset. `out` has no gaps between rows."""
    x, x_stride, rows, blocks, out, offset = args[1], args[2], args[3], args[4], args[5], args[6]
    while True:
        row = next_task(args)
        if row >= rows:
            break
        for block in range(blocks):
            source = x + (row * x_stride + block * BLOCK) * 4
            quantize_block(source, out + (row * blocks + block) * X_BLOCK_BYTES, offset)


def _float_kernel() -> Callable[[Any], None]:
    """Arguments: counter, x, x_stride, rows, weights, blocks, chunks, out, out_stride."""
    form = WeightFormat(32)
    tile1, tile2 = linear_tile(1, 4), linear_tile(2, 2)
    tile4, tile6 = linear_tile(4, 1), linear_tile(6, 1)
    group_bytes, block_bytes = GROUP * 4, form.block_bytes

    def kernel(args: Any) -> None:
        x, x_stride, rows, weights, blocks = args[1], args[2], args[3], args[4], args[5]
        chunks, out, out_stride = args[6], args[7], args[8]
        tasks = chunks * ((rows + ROWS - 1) // ROWS)
        while True:
            task = next_task(args)
            if task >= tasks:
                break
            chunk, first_row = task % chunks, task // chunks * ROWS
            last_row = min(rows, first_row + ROWS)
            for group in range(CHUNK // GROUP):
                w = weights + chunk * blocks * block_bytes + group * group_bytes
                row = first_row
                while row < last_row:
                    left = last_row - row
                    xr = x + row * x_stride * 4
                    o = out + (row * out_stride + chunk * CHUNK + group * GROUP) * 4
                    if left >= 6:
                        tile6(xr, x_stride, w, blocks, o, out_stride)
                        row += 6
                    elif left >= 4:
                        tile4(xr, x_stride, w, blocks, o, out_stride)
                        row += 4
                    elif left >= 2:
                        if group % 2 == 0:
                            tile2(xr, x_stride, w, blocks, o, out_stride)
                        row += 2
                    else:
                        if group == 0:
                            tile1(xr, x_stride, w, blocks, o, out_stride)
                        row += 1

    return kernel


@cache
def linear_kernel(form: WeightFormat, width: int) -> int:
    """The kernel of a format; `width` as `dot_width` tells it, or less."""
    if form.bits == 32:
        return compile_kernel("linear32", _float_kernel)
    name = f"linear{form.bits}{'_minimum' if form.minimum else ''}_{width}"
    return compile_kernel(name, lambda: _integer_kernel(form, width))


@cache
def quantize_kernel() -> int:
    return compile_kernel("quantize", lambda: _quantize)


class PackedLinear:
    """y = x W^T + b on packed weights; see `Linear`. A row of y does not depend on the other rows of x.

    Integer weights: x is rounded to int8, with a scale for each 32 values of a row, and the products are exact.
    """

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None = None, width: int | None = None) -> None:
        self.weight, self.bias, self._team = weight, bias, cpu_team()
        self.out_features, self.in_features = weight.shape
        self._kernel = linear_kernel(weight.form, dot_width() if width is None else width)
        self._blocks, self._chunks = weight.data.shape[1], weight.data.shape[0]
        self._width = self._chunks * CHUNK

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
        weight, blocks = self.weight, self._blocks
        where = (blocks, self._chunks, out.data_ptr(), self._width)
        if weight.form.bits == 32:
            self._team.run(self._kernel, (x.data_ptr(), x.stride(0), rows, weight.data.data_ptr(), *where))
            return
        rounded = torch.empty(rows, blocks * X_BLOCK_BYTES, dtype=torch.uint8)
        source, target = (x.data_ptr(), x.stride(0)), rounded.data_ptr()
        self._team.run(
            quantize_kernel(), (*source, rows, blocks, target, weight.form.offset), rows * blocks * BLOCK > SMALL
        )
        weights = (weight.data.data_ptr(), weight.scales.data_ptr())
        self._team.run(self._kernel, (target, rounded.stride(0), rows, *weights, *where))
