"""The two inner loops of the CPU kernels, written as vector instructions of LLVM.

Both compute a tile of outputs, `rows` by `8 * vectors`, that stays in registers: one input value is broadcast and
multiplied into a vector of eight outputs. An output is summed over k in one fixed order whatever the tile's shape, so
a row's result does not depend on which rows are computed with it, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 8  # floats in a vector
GROUP = 16  # outputs of a tile with many rows
CHUNK = 64  # outputs whose weights lie side by side, the unit of work: one row of input reads them front to back
BLOCK = 32  # inputs that share a scale
UNROLL = 4  # steps of k written out

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_F16, _F32 = ir.HalfType(), ir.FloatType()
_VF32 = ir.VectorType(_F32, LANES)
_VI32 = ir.VectorType(_I32, LANES)
ZERO = ir.Constant(_VF32, [0.0] * LANES)


@dataclass(frozen=True)
class WeightFormat:
    """How a block of 32 weights is kept: as int8 with a half-precision scale (`bits` 8) or as plain floats (32), and
    whether a block has a minimum that is added to each of its weights."""

    bits: int
    minimum: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of all the outputs of a chunk, without scales."""
        return CHUNK * BLOCK * self.bits // 8

    @property
    def block_scales(self) -> int:
        """Scales and minima of one block of all the outputs of a chunk."""
        return 0 if self.bits == 32 else CHUNK * (2 if self.minimum else 1)


class Emit:
    """Writes instructions; addresses are 64-bit integers, offsets are in elements."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def load(self, address: Any, element: Any, index: Any, lanes: int = 0) -> Any:
        kind = ir.VectorType(element, lanes) if lanes else element
        size = 2 if isinstance(element, ir.HalfType) else 4 if isinstance(element, ir.FloatType) else element.width // 8
        pointer = self.b.inttoptr(self.b.add(address, self.b.mul(index, self.const(size))), kind.as_pointer())
        return self.b.load(pointer, align=size)

    def store(self, value: Any, address: Any, index: Any) -> None:
        pointer = self.b.inttoptr(self.b.add(address, self.b.mul(index, self.const(4))), value.type.as_pointer())
        self.b.store(value, pointer, align=4)

    def const(self, value: int) -> Any:
        return ir.Constant(_I64, value)

    def broadcast(self, value: Any) -> Any:
        first = self.b.insert_element(ir.Constant(_VF32, ir.Undefined), value, ir.Constant(_I32, 0))
        return self.b.shuffle_vector(first, ir.Constant(_VF32, ir.Undefined), ir.Constant(_VI32, [0] * LANES))

    def multiply_add(self, x: Any, y: Any, z: Any) -> Any:
        kind = ir.FunctionType(_VF32, [_VF32] * 3)
        function = cgutils.get_or_insert_function(self.b.module, kind, f"llvm.fmuladd.v{LANES}f32")
        return self.b.call(function, [x, y, z])

    def accumulators(self, rows: int, vectors: int) -> list[list[Any]]:
        return [[cgutils.alloca_once_value(self.b, ZERO) for _ in range(vectors)] for _ in range(rows)]

    def weights(self, form: WeightFormat, block: Any, step: Any, v: int) -> Any:
        """The weights of input `step` of a block for the eight outputs of vector `v`, as floats."""
        index = self.b.add(self.b.mul(step, self.const(CHUNK)), self.const(v * LANES))
        if form.bits == 32:
            return self.load(block, _F32, index, LANES)
        return self.b.sitofp(self.b.sext(self.load(block, _I8, index, LANES), _VI32), _VF32)


def linear_tile(form: WeightFormat, rows: int, groups: int) -> Any:
    """An intrinsic that computes `rows` x `16 * groups` outputs of a linear layer from packed weights.

    `tile(x, x_stride, weights, scales, sums, blocks, out, out_stride)`: addresses, and strides in elements. `weights`
    and `scales` point at the tile's first output in a chunk of a `PackedWeight`; `sums` is [rows, blocks] float32,
    the sum of each block of x (read where the format has minima).
    """
    vectors = 2 * groups

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x, x_stride, weights, scales, sums, blocks, out, out_stride = values
        e = Emit(builder)
        total = e.accumulators(rows, vectors)
        part = e.accumulators(rows, vectors)
        x_rows = [builder.add(x, builder.mul(builder.mul(x_stride, e.const(4)), e.const(m))) for m in range(rows)]
        with cgutils.for_range(builder, blocks, intp=_I64) as loop:
            block = loop.index
            for row in part:
                for slot in row:
                    builder.store(ZERO, slot)
            start = builder.add(weights, builder.mul(block, e.const(form.block_bytes)))
            k0 = builder.mul(block, e.const(BLOCK))
            _multiply_block(e, form, vectors, start, x_rows, k0, part)
            for v in range(vectors):
                _add_block(e, form, v, block, scales, sums, blocks, part, total)
        for m in range(rows):
            for v in range(vectors):
                at = builder.add(builder.mul(out_stride, e.const(m)), e.const(v * LANES))
                e.store(builder.load(total[m][v]), out, at)
        return context.get_dummy_value()

    @intrinsic
    def tile(  # type: ignore[no-untyped-def]
        typing_context, x, x_stride, weights, scales, sums, blocks, out, out_stride
    ):
        return types.void(*[types.int64] * 8), codegen

    return tile


def _multiply_block(
    e: Emit, form: WeightFormat, vectors: int, start: Any, x_rows: list[Any], k0: Any, part: Any
) -> None:
    """part[m][v] += the sum over the inputs of a block of x[m, k] * weight[v, k]."""
    b = e.b
    with cgutils.for_range(b, e.const(BLOCK // UNROLL), intp=_I64) as loop:
        for u in range(UNROLL):
            step = b.add(b.mul(loop.index, e.const(UNROLL)), e.const(u))
            weights = [e.weights(form, start, step, v) for v in range(vectors)]
            for m, x_row in enumerate(x_rows):
                value = e.broadcast(e.load(x_row, _F32, b.add(k0, step)))
                for v, weight in enumerate(weights):
                    b.store(e.multiply_add(weight, value, b.load(part[m][v])), part[m][v])


def _add_block(
    e: Emit, form: WeightFormat, v: int, block: Any, scales: Any, sums: Any, blocks: Any, part: Any, total: Any
) -> None:
    """total[m][v] += scale * part[m][v] + minimum * sums[m]."""
    b = e.b
    at = b.add(b.mul(block, e.const(form.block_scales)), e.const(v * LANES))
    scale = minimum = None
    if form.bits != 32:
        scale = b.fpext(e.load(scales, _F16, at, LANES), _VF32)
    if form.minimum:
        minimum = b.fpext(e.load(scales, _F16, b.add(at, e.const(CHUNK)), LANES), _VF32)
    for m in range(len(part)):
        value = b.load(total[m][v])
        block_sum = b.load(part[m][v])
        value = b.fadd(value, block_sum) if scale is None else e.multiply_add(scale, block_sum, value)
        if minimum is not None:
            x_sum = e.load(sums, _F32, b.add(b.mul(blocks, e.const(m)), block))
            value = e.multiply_add(minimum, e.broadcast(x_sum), value)
        b.store(value, total[m][v])


def dense_tile(rows: int, vectors: int, accumulate: bool) -> Any:
    """An intrinsic that computes `rows` x `8 * vectors` values of A @ B, or adds them to C.

    `tile(a, a_stride, b, b_stride, count, c, c_stride)`: A is [rows, count], B is [count, 8 * vectors], C like the
    result; addresses of float32, strides in elements.
    """

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        a, a_stride, b, b_stride, count, c, c_stride = values
        e = Emit(builder)
        total = e.accumulators(rows, vectors)
        a_rows = [builder.add(a, builder.mul(builder.mul(a_stride, e.const(4)), e.const(m))) for m in range(rows)]
        places = [
            [builder.add(builder.mul(c_stride, e.const(m)), e.const(v * LANES)) for v in range(vectors)]
            for m in range(rows)
        ]
        if accumulate:
            for m in range(rows):
                for v in range(vectors):
                    builder.store(e.load(c, _F32, places[m][v], LANES), total[m][v])
        with cgutils.for_range(builder, count, intp=_I64) as loop:
            k = loop.index
            start = builder.mul(k, b_stride)
            columns = [e.load(b, _F32, builder.add(start, e.const(v * LANES)), LANES) for v in range(vectors)]
            for m in range(rows):
                value = e.broadcast(e.load(a_rows[m], _F32, k))
                for v in range(vectors):
                    builder.store(e.multiply_add(columns[v], value, builder.load(total[m][v])), total[m][v])
        for m in range(rows):
            for v in range(vectors):
                e.store(builder.load(total[m][v]), c, places[m][v])
        return context.get_dummy_value()

    @intrinsic
    def tile(typing_context, a, a_stride, b, b_stride, count, c, c_stride):  # type: ignore[no-untyped-def]
        return types.void(*[types.int64] * 7), codegen

    return tile
