"""Lays weights out as the other kernels read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from engine_core.kernels.cpu_layout import CHUNK
from engine_core.kernels.cpu_source.compiler import choose_side, floats, int16s, int32s, larger, next_task, smaller
from engine_core.kernels.cpu_source.tile import Emit


def pack() -> Callable[[Any], None]:
    """Arguments: counter; values, their row and block stride; scales and theirs; minima and theirs; first row, rows,
    blocks, words, flip; out, block_bytes, kinds.

    Rows become `rows` of a `PackedWeight` from `first row` on. A block has `words` of 4 bytes, each changed by xor with
    `flip`, and `kinds` numbers of 2 bytes: none, a scale, or a minimum too. Strides are in bytes.
    """

    def kernel(args: Any) -> None:
        values, row_stride, block_stride = args[1], args[2], args[3]
        first_row, rows, blocks, words, flip = args[10], args[11], args[12], args[13], args[14]
        out, block_bytes, kinds = args[15], args[16], args[17]
        first_chunk, last_chunk = first_row // CHUNK, (first_row + rows - 1) // CHUNK
        side = choose_side(args)
        while True:
            chunk = first_chunk + next_task(args, side, last_chunk - first_chunk + 1)
            if chunk > last_chunk:
                break
            begin = larger(first_row, chunk * CHUNK)
            count = smaller(first_row + rows, (chunk + 1) * CHUNK) - begin
            row, lane = begin - first_row, begin - chunk * CHUNK
            for block in range(blocks):
                source = values + row * row_stride + block * block_stride
                target = out + (chunk * blocks + block) * block_bytes
                integers = int32s(target)
                for word in range(words):
                    for r in range(count):
                        integers[word * CHUNK + lane + r] = int32s(source + r * row_stride + word * 4)[0] ^ flip
                for kind in range(kinds):
                    numbers, number_stride = args[4 + 3 * kind], args[5 + 3 * kind]
                    source = numbers + row * number_stride + block * args[6 + 3 * kind]
                    scales = int16s(target + (words * 2 + kind) * CHUNK * 2)
                    for r in range(count):
                        scales[lane + r] = int16s(source + r * number_stride)[0]

    return kernel


@intrinsic  # type: ignore[untyped-decorator]
def half_at(typing_context: Any, address: Any) -> Any:
    """The number in half precision at `address`."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fpext(Emit(builder).at(values[0], 0, ir.HalfType()), ir.FloatType())

    return types.float32(types.int64), codegen


@numba.njit(inline="always")
def nearest(x):  # type: ignore[no-untyped-def]
    """As int16, halves upwards."""
    return np.int16(np.floor(x + np.float32(0.5)))


def fix() -> Callable[[Any], None]:
    """Arguments: counter; scales, their row and block stride; minima and theirs, 0 if there are none; first row, rows,
    blocks; out, block_bytes, where in a block scales are; units.

    The scales of `rows` of a `PackedWeight` from `first row` on, in half precision, become numbers in fixed point with
    a unit for each row; so do minima, beside the scales, of weights less 8. Strides are in bytes.

    A scale is kept to 2^-16 of its row's largest, or of an eighth of the largest minimum if that is more, where half
    precision keeps it to 2^-12 of its own.
    """

    def kernel(args: Any) -> None:
        scales, row_stride, block_stride = args[1], args[2], args[3]
        minima, minima_row_stride, minima_block_stride = args[4], args[5], args[6]
        first_row, rows, blocks = args[7], args[8], args[9]
        out, block_bytes, scales_at, units = args[10], args[11], args[12], floats(args[13])
        kinds, zero = 1 if minima == 0 else 2, np.float32(0)
        first_chunk, last_chunk = first_row // CHUNK, (first_row + rows - 1) // CHUNK
        side = choose_side(args)
        while True:
            chunk = first_chunk + next_task(args, side, last_chunk - first_chunk + 1)
            if chunk > last_chunk:
                break
            for row in range(larger(first_row, chunk * CHUNK), smaller(first_row + rows, (chunk + 1) * CHUNK)):
                scale_at = scales + (row - first_row) * row_stride
                minimum_at = minima + (row - first_row) * minima_row_stride
                largest, largest_middle, spoilt = zero, zero, zero
                for block in range(blocks):
                    scale, middle = half_at(scale_at + block * block_stride), zero
                    if minima != 0:  # what a weight of 8 stands for
                        middle = half_at(minimum_at + block * minima_block_stride) + np.float32(8) * scale
                    largest = larger(largest, abs(scale))
                    largest_middle = larger(largest_middle, abs(middle))
                    spoilt += (scale + middle) * zero  # NaN from what is no number
                unit = larger(largest * np.float32(2**15 / 32767), largest_middle * np.float32(2**12 / 32767))
                inverse = np.float32(1) / unit if unit > zero and spoilt == zero else zero
                units[row] = unit + spoilt
                for block in range(blocks):
                    target = int16s(out + (chunk * blocks + block) * block_bytes + scales_at + row % CHUNK * kinds * 2)
                    if spoilt != zero:
                        target[0] = 0
                        continue
                    scale = half_at(scale_at + block * block_stride)
                    target[0] = nearest(scale * (inverse * np.float32(2**15)))
                    if minima != 0:
                        middle = half_at(minimum_at + block * minima_block_stride) + np.float32(8) * scale
                        target[1] = nearest(middle * (inverse * np.float32(2**12)))

    return kernel
