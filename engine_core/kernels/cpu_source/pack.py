"""Lays weights out as the other kernels read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine_core.kernels.cpu_layout import CHUNK
from engine_core.kernels.cpu_source.compiler import choose_side, int16s, int32s, larger, next_task, smaller


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
