"""Repacks weights for the CPU kernels: a GGUF file's blocks of 4, 5 or 8 bits, anything else rounded to int8.

Integers stay as they are. Matrices of 4 bits throughout stay so, since one row of input is bound by the bytes that come
from memory, with their scales in fixed point. All others are kept as bytes, with the file's scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from engine_core.kernels import cpu_memory
from engine_core.kernels.cpu_cache import kernel
from engine_core.kernels.cpu_layout import BLOCK, CHUNK, WeightFormat
from engine_core.kernels.cpu_team import cpu_team
from engine_core.loader.weights import QuantizedWeight, Weight

_FOUR_BITS = {GGMLQuantizationType.Q4_0: WeightFormat(4), GGMLQuantizationType.Q4_1: WeightFormat(4, minimum=True)}


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A matrix [out_features, in_features] as the kernels read it, outputs padded with zeros to whole chunks.

    Integers are unsigned, raised by `form.offset`. Four inputs of an output lie side by side, then those of the next
    output of the chunk; of 4 bits, the low ones are inputs of a block's first half, the high ones of its second half.
    Scales of a block's outputs lie side by side, then their minima; in fixed point each minimum beside its scale.
    """

    form: WeightFormat
    shape: tuple[int, int]
    data: torch.Tensor  # uint8 [chunks, blocks, block_bytes]; of a block first the integers or floats, then the scales
    units: torch.Tensor  # float32 [chunks * 32]: of the scales in fixed point; none if they are floats


@dataclass(frozen=True, slots=True, eq=False)
class Quants:
    """A matrix whose blocks of 32 are `scale * integer + minimum`. Arrays may be views of a file's blocks."""

    values: NDArray[Any]  # int8 [rows, blocks, 32]; unsigned 4 bits uint8 [rows, blocks, 16], as in the file
    scales: NDArray[np.float16]  # [rows, blocks]
    minima: NDArray[np.float16] | None  # the same


def pack_quantized(parts: Sequence[Weight]) -> PackedWeight:
    """The parts below one another."""
    forms = {_FOUR_BITS.get(part.ggml_type) if isinstance(part, QuantizedWeight) else None for part in parts}
    four_bits = forms.pop() if len(forms) == 1 else None
    quants = [read_quants(part, nibbles=four_bits is not None) for part in parts]
    form = four_bits or WeightFormat(8, minimum=any(part.minima is not None for part in quants))
    packed = _allocate(form, sum(part.shape[0] for part in parts), parts[0].shape[1])
    row = 0
    for part in quants:
        _pack(packed, row, part.values, part.scales, part.minima)
        row += len(part.values)
    return packed


def pack_floats(weight: torch.Tensor) -> PackedWeight:
    """Plain float32 weights [rows, columns], exactly as they are. Columns must be a multiple of 32."""
    rows, columns = weight.shape
    packed = _allocate(WeightFormat(32), rows, columns)
    _pack(packed, 0, weight.contiguous().numpy().reshape(rows, columns // BLOCK, BLOCK))
    return packed


def _allocate(form: WeightFormat, rows: int, columns: int) -> PackedWeight:
    chunks, blocks = -(-rows // CHUNK), columns // BLOCK
    data = cpu_memory.weights().take(chunks * blocks * form.block_bytes).view(chunks, blocks, form.block_bytes)
    units = torch.zeros(chunks * CHUNK if form.fixed else 0)
    return PackedWeight(form, (rows, columns), data, units)


def _pack(
    packed: PackedWeight,
    first_row: int,
    values: NDArray[Any],
    scales: NDArray[np.float16] | None = None,
    minima: NDArray[np.float16] | None = None,
) -> None:
    """Write a matrix into the rows of `packed` from `first_row` on."""
    rows, blocks, count = values.shape
    form = packed.form
    kinds = 0 if form.fixed else form.kinds
    if kinds == 2 and minima is None:
        minima = np.zeros((rows, blocks), np.float16)
    flip = 0x80808080 if form.bits == 8 else 0  # signed bytes to unsigned ones
    source = (_address(values), *values.strides[:2], _address(scales), *_strides(scales))
    more = (_address(minima), *_strides(minima))
    shape = (first_row, rows, blocks, count * values.itemsize // 4, flip)
    out = (packed.data.data_ptr(), form.block_bytes)
    cpu_team().run(kernel("pack:pack"), (*source, *more, *shape, *out, kinds))
    if form.fixed:
        target = (*out, form.scales_at, packed.units.data_ptr())
        cpu_team().run(kernel("pack:fix"), (*source[3:], *more, first_row, rows, blocks, *target))


def _address(array: NDArray[Any] | None) -> int:
    return 0 if array is None else int(array.ctypes.data)


def _strides(array: NDArray[Any] | None) -> tuple[int, ...]:
    return (0, 0) if array is None else array.strides


def read_quants(weight: Weight, nibbles: bool = False) -> Quants:
    """The integers of a weight: those of the file where it has such blocks, else rounded to int8.

    `nibbles` leaves integers of 4 bits packed and unsigned.
    """
    if isinstance(weight, torch.Tensor):
        return quantize(weight.float().numpy())
    types = GGMLQuantizationType
    rows, columns = weight.shape
    blocks = weight.data.reshape(rows, columns // BLOCK, -1)
    match weight.ggml_type:
        case types.Q4_0:
            return Quants(blocks[:, :, 2:] if nibbles else _nibbles(blocks[:, :, 2:]) - 8, _half(blocks, 0), None)
        case types.Q4_1:
            values = blocks[:, :, 4:] if nibbles else _nibbles(blocks[:, :, 4:])
            return Quants(values, _half(blocks, 0), _half(blocks, 2))
        case types.Q5_0:
            return Quants(_five_bits(blocks[:, :, 2:]) - 16, _half(blocks, 0), None)
        case types.Q5_1:
            return Quants(_five_bits(blocks[:, :, 4:]), _half(blocks, 0), _half(blocks, 2))
        case types.Q8_0:
            return Quants(blocks[:, :, 2:].view(np.int8), _half(blocks, 0), None)
        case _:
            return quantize(weight.dequantize())


def quantize(weight: NDArray[np.float32]) -> Quants:
    """Round float32 [rows, columns] to int8 with one scale per 32: the largest of a block becomes 127."""
    blocks = weight.reshape(weight.shape[0], -1, BLOCK)
    scales = (np.abs(blocks).max(2) / 127).astype(np.float16)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(scales > 0, 1 / scales.astype(np.float32), np.float32(0))
        integers = np.rint(blocks * inverse[:, :, None]).clip(-127, 127).astype(np.int8)
    return Quants(integers, scales, None)


def _half(blocks: NDArray[np.uint8], at: int) -> NDArray[np.float16]:
    """The half-precision number at byte `at` of each block."""
    return blocks[:, :, at : at + 2].view(np.float16)[:, :, 0]


def _nibbles(blocks: NDArray[np.uint8]) -> NDArray[np.int8]:
    """int8 [rows, blocks, 32] from 16 bytes that hold elements i and i + 16 in byte i."""
    return np.concatenate([blocks & 15, blocks >> 4], 2).view(np.int8)


def _five_bits(blocks: NDArray[np.uint8]) -> NDArray[np.int8]:
    """int8 [rows, blocks, 32] from 4 bytes of fifth bits followed by 16 bytes of nibbles."""
    fifth = np.unpackbits(blocks[:, :, :4], axis=2, bitorder="little") << 4
    return _nibbles(blocks[:, :, 4:]) | fifth.view(np.int8)
