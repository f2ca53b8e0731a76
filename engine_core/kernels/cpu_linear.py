"""Linear layers on packed weights: float32 inputs, weights as blocks of int8 or as plain float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
import torch

from engine_core.kernels.cpu_jit import compile_kernel, floats, next_task
from engine_core.kernels.cpu_pack import PackedWeight
from engine_core.kernels.cpu_team import cpu_team
from engine_core.kernels.cpu_tile import BLOCK, CHUNK, GROUP, WeightFormat, linear_tile

ROWS = 48  # rows of x in a task: they stay in the second-level cache


def _kernel(form: WeightFormat) -> Callable[[Any], None]:
    """Arguments: counter, x, x_stride, rows, weights, scales, blocks, chunks, out, out_stride."""
    tile1, tile2 = linear_tile(form, 1, 4), linear_tile(form, 2, 2)
    tile4, tile6 = linear_tile(form, 4, 1), linear_tile(form, 6, 1)
    group_bytes = GROUP * form.bits // 8  # 16 outputs further in a row of 64
    block_bytes, block_scales, minimum = form.block_bytes, form.block_scales, form.minimum

    def kernel(args: Any) -> None:
        x, x_stride, rows, weights, scales = args[1], args[2], args[3], args[4], args[5]
        blocks, chunks, out, out_stride = args[6], args[7], args[8], args[9]
        sums = np.empty(rows * blocks if minimum else 1, np.float32)
        if minimum:
            block_sums(x, x_stride, rows, blocks, sums)
        tasks = chunks * ((rows + ROWS - 1) // ROWS)
        while True:
            task = next_task(args)
            if task >= tasks:
                break
            chunk, first_row = task % chunks, task // chunks * ROWS
            last_row = min(rows, first_row + ROWS)
            for group in range(CHUNK // GROUP):
                w = weights + chunk * blocks * block_bytes + group * group_bytes
                s = scales + (chunk * blocks * block_scales + group * GROUP) * 2
                row = first_row
                while row < last_row:
                    left = last_row - row
                    xr = x + row * x_stride * 4
                    sr = sums.ctypes.data + row * blocks * 4
                    o = out + (row * out_stride + chunk * CHUNK + group * GROUP) * 4
                    if left >= 6:
                        tile6(xr, x_stride, w, s, sr, blocks, o, out_stride)
                        row += 6
                    elif left >= 4:
                        tile4(xr, x_stride, w, s, sr, blocks, o, out_stride)
                        row += 4
                    elif left >= 2:
                        if group % 2 == 0:
                            tile2(xr, x_stride, w, s, sr, blocks, o, out_stride)
                        row += 2
                    else:
                        if group == 0:
                            tile1(xr, x_stride, w, s, sr, blocks, o, out_stride)
                        row += 1

    return kernel


@numba.njit(inline="never", fastmath={"reassoc"})
def block_sums(x, x_stride, rows, blocks, sums):  # type: ignore[no-untyped-def]
    """sums[row, block] = the sum of the 32 values of each block of x."""
    values = floats(x)
    for row in range(rows):
        for block in range(blocks):
            start = row * x_stride + block * BLOCK
            total = np.float32(0)
            for k in range(BLOCK):
                total += values[start + k]
            sums[row * blocks + block] = total


@cache
def linear_kernel(form: WeightFormat) -> int:
    name = f"linear{form.bits}" + ("_minimum" if form.minimum else "")
    return compile_kernel(name, lambda: _kernel(form))


class PackedLinear:
    """y = x W^T + b on packed weights; see `Linear`. A row of y does not depend on the other rows of x."""

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias, self._team = weight, bias, cpu_team()
        self.out_features, self.in_features = weight.shape
        self._kernel = linear_kernel(weight.form)
        chunks, blocks = weight.data.shape[:2]
        self._width = chunks * CHUNK
        self._weight_args = (weight.data.data_ptr(), weight.scales.data_ptr(), blocks, chunks)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        if x.stride(1) != 1 or dtype != torch.float32:
            x = x.float().contiguous()
        rows = x.shape[0]
        out = torch.empty(rows, self._width)
        if rows:
            args = (x.data_ptr(), x.stride(0), rows, *self._weight_args, out.data_ptr(), self._width)
            self._team.run(self._kernel, args)
        if self._width != self.out_features:
            out = out[:, : self.out_features]
        if self.bias is not None:
            out.add_(self.bias)
        return out if dtype == torch.float32 else out.to(dtype)
