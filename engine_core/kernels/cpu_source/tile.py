"""What the inner loops of the CPU kernels are written with, vector instructions of LLVM, and that of float products.

It computes a tile of outputs, `rows` by `16 * groups`, that stays in registers: one input value is broadcast and
multiplied into a vector of eight outputs. An output is summed over k in one fixed order whatever the tile's shape, so
a row's result does not depend on which rows are computed with it, bit for bit.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine_core.kernels.cpu_layout import BLOCK, CHUNK, WeightFormat

LANES = 8  # floats in a vector
UNROLL = 4  # steps of k written out

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_F32 = ir.FloatType()
ZERO = ir.Constant(ir.VectorType(_F32, LANES), [0.0] * LANES)


def _vector(lanes: int) -> Any:
    return ir.VectorType(_F32, lanes)


def _alignment(kind: Any) -> int:
    """Bytes: no vector is known to be aligned to more than one of its elements."""
    element = kind.element if isinstance(kind, ir.VectorType) else kind
    return 4 if isinstance(element, ir.FloatType) else 2 if isinstance(element, ir.HalfType) else element.width // 8


class Emit:
    """Writes instructions; addresses are 64-bit integers."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def load(self, address: Any, index: Any, lanes: int = 0) -> Any:
        """One float, or `lanes` of them, from number `index` on."""
        return self.at(self.b.add(address, self.b.mul(index, self.const(4))), 0, _vector(lanes) if lanes else _F32)

    def store(self, value: Any, address: Any, index: Any) -> None:
        """A float or a vector of them to number `index`."""
        self.put(value, self.b.add(address, self.b.mul(index, self.const(4))), 0)

    def at(self, address: Any, offset: int, kind: Any) -> Any:
        """The value of type `kind` at `address + offset` bytes."""
        return self.b.load(self._pointer(address, offset, kind), align=_alignment(kind))

    def put(self, value: Any, address: Any, offset: int) -> None:
        self.b.store(value, self._pointer(address, offset, value.type), align=_alignment(value.type))

    def prefetch(self, address: Any, offset: int, near: bool = True, write: bool = False) -> None:
        """Have the cache line at `address + offset` bytes come from memory, not only to the second-level cache.

        `write`: to be written to, so that other cores lose theirs.
        """
        kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), *[_I32] * 3])
        function = cgutils.get_or_insert_function(self.b.module, kind, "llvm.prefetch.p0")
        what = (int(write), 3 if near else 2, 1)  # write or read, how near, data
        self.b.call(function, [self._pointer(address, offset, _I8), *(ir.Constant(_I32, value) for value in what)])

    def _pointer(self, address: Any, offset: int, kind: Any) -> Any:
        """Steps from a pointer become part of an instruction; sums of integers would be kept in registers."""
        start = self.b.inttoptr(address, _I8.as_pointer())
        return self.b.bitcast(self.b.gep(start, [self.const(offset)]), kind.as_pointer())

    def const(self, value: int) -> Any:
        return ir.Constant(_I64, value)

    def broadcast(self, value: Any, lanes: int = LANES) -> Any:
        undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
        first = self.b.insert_element(undefined, value, ir.Constant(_I32, 0))
        return self.b.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes))

    def multiply_add(self, x: Any, y: Any, z: Any) -> Any:
        kind = ir.FunctionType(x.type, [x.type] * 3)
        function = cgutils.get_or_insert_function(self.b.module, kind, f"llvm.fmuladd.v{x.type.count}f32")
        return self.b.call(function, [x, y, z])

    def accumulators(self, rows: int, vectors: int, lanes: int = LANES) -> list[list[Any]]:
        """Slots of vectors that start at zero."""
        zero = ir.Constant(_vector(lanes), [0.0] * lanes)
        return [[cgutils.alloca_once_value(self.b, zero) for _ in range(vectors)] for _ in range(rows)]


def linear_tile(rows: int, groups: int) -> Any:
    """An intrinsic that computes `rows` x `16 * groups` outputs of a linear layer with plain float32 weights.

    `tile(x, x_stride, weights, blocks, out, out_stride)`: addresses, and strides in elements. `weights` points at the
    tile's first output in a chunk of a `PackedWeight`. Each block of inputs is summed alone, then added.
    """
    vectors = 2 * groups
    block_bytes = WeightFormat(32).block_bytes

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x, x_stride, weights, blocks, out, out_stride = values
        e = Emit(builder)
        total = e.accumulators(rows, vectors)
        part = e.accumulators(rows, vectors)
        x_rows = [builder.add(x, builder.mul(builder.mul(x_stride, e.const(4)), e.const(m))) for m in range(rows)]
        with cgutils.for_range(builder, blocks, intp=_I64) as loop:
            for row in part:
                for slot in row:
                    builder.store(ZERO, slot)
            start = builder.add(weights, builder.mul(loop.index, e.const(block_bytes)))
            _multiply_block(e, vectors, start, x_rows, builder.mul(loop.index, e.const(BLOCK)), part)
            for slots, parts in zip(total, part, strict=True):
                for slot, block_sum in zip(slots, parts, strict=True):
                    builder.store(builder.fadd(builder.load(slot), builder.load(block_sum)), slot)
        for m in range(rows):
            for v in range(vectors):
                at = builder.add(builder.mul(out_stride, e.const(m)), e.const(v * LANES))
                e.store(builder.load(total[m][v]), out, at)
        return context.get_dummy_value()

    @intrinsic
    def tile(typing_context, x, x_stride, weights, blocks, out, out_stride):  # type: ignore[no-untyped-def]
        return types.void(*[types.int64] * 6), codegen

    return tile


def _multiply_block(e: Emit, vectors: int, start: Any, x_rows: list[Any], k0: Any, part: Any) -> None:
    """part[m][v] += the sum over the inputs of a block of x[m, k] * weight[v, k]."""
    b = e.b
    with cgutils.for_range(b, e.const(BLOCK // UNROLL), intp=_I64) as loop:
        for u in range(UNROLL):
            step = b.add(b.mul(loop.index, e.const(UNROLL)), e.const(u))
            first = b.mul(step, e.const(CHUNK))
            weights = [e.load(start, b.add(first, e.const(v * LANES)), LANES) for v in range(vectors)]
            for m, x_row in enumerate(x_rows):
                value = e.broadcast(e.load(x_row, b.add(k0, step)))
                for v, weight in enumerate(weights):
                    b.store(e.multiply_add(weight, value, b.load(part[m][v])), part[m][v])
