"""Repacks weights for the CPU kernels: a GGUF file's blocks of 4, 5 or 8 bits exactly, anything else rounded to int8.

Matrices of 4 bits throughout stay so, since one row of input is bound by the bytes that come from memory. All others
are kept as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType

from engine_core.kernels.cpu_tile import BLOCK, CHUNK, WeightFormat
from engine_core.loader.weights import QuantizedWeight, Weight

_FOUR_BITS = {GGMLQuantizationType.Q4_0: WeightFormat(4), GGMLQuantizationType.Q4_1: WeightFormat(4, minimum=True)}


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A matrix [out_features, in_features] as the kernels read it, outputs padded with zeros to whole chunks.

    Integers are unsigned, raised by `form.offset`. Four inputs of an output lie side by side, then those of the next
    output of the chunk; of 4 bits, the low ones are inputs of a block's first half, the high ones of its second half.
    """

    form: WeightFormat
    shape: tuple[int, int]
    data: torch.Tensor  # uint8 [chunks, blocks, block_bytes]
    scales: torch.Tensor  # float16 [chunks, blocks, 1 or 2, 64]; empty for plain floats


@dataclass(frozen=True, slots=True, eq=False)
class Quants:
    """A matrix whose blocks of 32 are `scale * integer + minimum`."""

    values: torch.Tensor  # int8 [rows, blocks, 32], or the file's 16 bytes of nibbles
    scales: torch.Tensor  # float16 [rows, blocks]
    minima: torch.Tensor | None


def pack_quantized(parts: Sequence[Weight]) -> PackedWeight:
    """The parts below one another."""
    forms = {_FOUR_BITS.get(part.ggml_type) if isinstance(part, QuantizedWeight) else None for part in parts}
    four_bits = forms.pop() if len(forms) == 1 else None
    quants = [read_quants(part, nibbles=four_bits is not None) for part in parts]
    kinds = [torch.cat([part.scales for part in quants])]
    if any(part.minima is not None for part in quants):
        kinds.append(torch.cat([torch.zeros_like(q.scales) if q.minima is None else q.minima for q in quants]))
    form = four_bits or WeightFormat(8, minimum=len(kinds) == 2)
    values = torch.cat([part.values.view(torch.uint8) for part in quants])
    if form.bits == 8:
        values.bitwise_xor_(form.offset)
    rows, blocks = kinds[0].shape
    scales = torch.stack([_pad(kind).view(-1, CHUNK, blocks) for kind in kinds], 1)
    return PackedWeight(
        form=form,
        shape=(rows, blocks * BLOCK),
        data=_lanes_last(values.view(torch.int32)),
        scales=scales.permute(0, 3, 1, 2).contiguous(),
    )


def pack_floats(weight: torch.Tensor) -> PackedWeight:
    """Plain float32 weights [rows, columns], exactly as they are. Columns must be a multiple of 32."""
    rows, columns = weight.shape
    data = _lanes_last(weight.view(rows, columns // BLOCK, BLOCK))
    return PackedWeight(WeightFormat(32), (rows, columns), data, torch.empty(0, dtype=torch.float16))


def read_quants(weight: Weight, nibbles: bool = False) -> Quants:
    """The integers of a weight: those of the file where it has such blocks, else rounded to int8.

    `nibbles` leaves integers of 4 bits packed and unsigned.
    """
    if isinstance(weight, torch.Tensor):
        return quantize(weight.float())
    types = GGMLQuantizationType
    rows = weight.shape[0]
    blocks = torch.from_numpy(np.array(weight.data)).view(rows, weight.shape[1] // BLOCK, -1)
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
            return Quants(blocks[:, :, 2:].view(torch.int8), _half(blocks, 0), None)
        case _:
            return quantize(torch.from_numpy(weight.dequantize()))


def quantize(weight: torch.Tensor) -> Quants:
    """Round float32 [rows, columns] to int8 with one scale per 32: the largest of a block becomes 127."""
    blocks = weight.view(weight.shape[0], -1, BLOCK)
    scales = (blocks.abs().amax(2) / 127).half()
    inverse = torch.where(scales > 0, 1 / scales.float(), 0)
    return Quants((blocks * inverse[:, :, None]).round().clamp_(-127, 127).to(torch.int8), scales, None)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The half-precision number at byte `at` of each block."""
    return blocks[:, :, at : at + 2].contiguous().view(torch.float16)[:, :, 0]


def _nibbles(blocks: torch.Tensor) -> torch.Tensor:
    """int8 [rows, blocks, 32] from 16 bytes that hold elements i and i + 16 in byte i."""
    return torch.cat([blocks & 15, blocks >> 4], 2).view(torch.int8)


def _five_bits(blocks: torch.Tensor) -> torch.Tensor:
    """int8 [rows, blocks, 32] from 4 bytes of fifth bits followed by 16 bytes of nibbles."""
    fifth = (blocks[:, :, :4, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return _nibbles(blocks[:, :, 4:]) | (fifth.flatten(2) << 4).view(torch.int8)


def _lanes_last(values: torch.Tensor) -> torch.Tensor:
    """[rows, blocks, n] -> uint8 [chunks, blocks, n * 64 elements], the 64 rows of a chunk side by side."""
    blocks, count = values.shape[1:]
    chunks = _pad(values).view(-1, CHUNK, blocks, count).permute(0, 2, 3, 1).contiguous()
    return chunks.view(-1, blocks, count * CHUNK).view(torch.uint8)


def _pad(values: torch.Tensor) -> torch.Tensor:
    """Zero rows up to whole chunks."""
    missing = -values.shape[0] % CHUNK
    return torch.cat([values, values.new_zeros(missing, *values.shape[1:])]) if missing else values
