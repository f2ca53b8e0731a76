"""The inner loop of linear layers on integer weights: products of bytes, summed exactly in int32.

The inputs of a layer are rounded to int8 too, with a scale for each block of 32. Then four products cost one lane of
one instruction (VNNI), and a block's sum is an exact integer whatever computes it: every processor gets the same one,
and only what follows, once a block, is float arithmetic. A row of the result depends on no other row, bit for bit.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine_core.kernels.cpu_layout import BLOCK, CHUNK, X_BLOCK_BYTES, WeightFormat
from engine_core.kernels.cpu_source.tile import Emit
from engine_core.kernels.cpu_source.vector import silu_product

LANES = 16  # outputs in a vector
STEP = 4  # inputs that one lane multiplies at once
SCALE, SCALED_SUM, START = BLOCK, BLOCK + 4, BLOCK + 8  # where in a block of rounded inputs

_I8, _I16, _I32, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_F16, _F32 = ir.HalfType(), ir.FloatType()
_MAGIC = 1.5 * 2**23  # added to a small float, it leaves no bits behind the point
_MAGIC_BITS = 0x4B400000
_SMALLEST = 1e-30  # a block of smaller values counts as zeros: the inverse of its scale might be infinite
_EIGHT = ir.VectorType(_F32, 8)
_VI32, _VF32 = ir.VectorType(_I32, LANES), ir.VectorType(_F32, LANES)


@intrinsic  # type: ignore[untyped-decorator]
def quantize_block(typing_context: Any, x: Any, out: Any, offset: Any) -> Any:
    """`quantize_block(x, out, offset)`: 32 floats at address `x` to a block of `X_BLOCK_BYTES` at `out`.

    The largest becomes 127. A NaN or an infinity makes the scale NaN or infinite, and with it all that it meets.
    """

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x, out, offset = values
        e = Emit(builder)
        _quantize(e, [e.at(x, 4 * LANES * half, _VF32) for half in (0, 1)], out, offset)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def quantize_normed(typing_context: Any, x: Any, scale: Any, weight: Any, out: Any, offset: Any) -> Any:
    """`quantize_normed(x, scale, weight, out, offset)`: as `quantize_block`, of x * scale * weight."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x, scale, weight, out, offset = values
        e = Emit(builder)
        factor = e.broadcast(scale, LANES)
        parts = [[e.at(address, 4 * LANES * half, _VF32) for half in (0, 1)] for address in (x, weight)]
        products = [builder.fmul(builder.fmul(a, factor), b) for a, b in zip(*parts, strict=True)]
        _quantize(e, products, out, offset)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64, types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def quantize_gated(typing_context: Any, gate: Any, up: Any, out: Any, offset: Any) -> Any:
    """`quantize_gated(gate, up, out, offset)`: as `quantize_block`, of SiLU(gate) * up."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        gate, up, out, offset = values
        e = Emit(builder)
        eights = [silu_product(e, *(e.at(x, 32 * i, _EIGHT) for x in (gate, up))) for i in range(4)]
        lanes = ir.Constant(_VI32, list(range(LANES)))
        _quantize(e, [builder.shuffle_vector(*eights[i : i + 2], lanes) for i in (0, 2)], out, offset)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


def _quantize(e: Emit, halves: list[Any], out: Any, offset: Any) -> None:
    b = e.b
    sign = ir.Constant(_VI32, [0x7FFFFFFF] * LANES)
    # As integers, since a NaN is the largest of those; it would get lost among floats.
    bits = [b.and_(b.bitcast(half, _VI32), sign) for half in halves]
    larger = b.select(b.icmp_signed(">", bits[0], bits[1]), bits[0], bits[1])
    largest = b.bitcast(_reduce(e, "umax", larger), _F32)
    inverse = b.fdiv(ir.Constant(_F32, 127.0), largest)
    inverse = b.select(b.fcmp_ordered(">", largest, ir.Constant(_F32, _SMALLEST)), inverse, ir.Constant(_F32, 0.0))
    total = ir.Constant(_VI32, [0] * LANES)
    for half, value in enumerate(halves):
        # The sum's lowest bits are the nearest integer, halves to even.
        rounded = b.fadd(b.fmul(value, e.broadcast(inverse, LANES)), ir.Constant(_VF32, [_MAGIC] * LANES))
        integers = b.sub(b.bitcast(rounded, _VI32), ir.Constant(_VI32, [_MAGIC_BITS] * LANES))
        small = b.trunc(integers, ir.VectorType(_I8, LANES))
        total = b.add(total, b.sext(small, _VI32))
        e.put(small, out, half * LANES)
    integer_sum = _reduce(e, "add", total)
    scale = b.fmul(largest, ir.Constant(_F32, 1 / 127))
    e.put(scale, out, SCALE)
    e.put(b.fmul(scale, b.sitofp(integer_sum, _F32)), out, SCALED_SUM)
    e.put(b.mul(integer_sum, b.neg(b.trunc(offset, _I32))), out, START)


def dot_tile(form: WeightFormat, rows: int, vectors: int, width: int) -> Any:
    """An intrinsic that computes `rows` x `16 * vectors` outputs of a linear layer.

    `tile(x, x_stride, weights, scales, blocks, out, out_stride, next_weights, next_scales)`: addresses; strides in
    bytes and in floats. `x` is rows of blocks of `X_BLOCK_BYTES`; `weights` and `scales` point at the tile's first
    output in a chunk of a `PackedWeight`. Those that come next are fetched meanwhile: the processor itself stops at
    the end of each page.
    """

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x, x_stride, weights, scales, blocks, out, out_stride, next_weights, next_scales = values
        e = Emit(builder)
        total = e.accumulators(rows, vectors, LANES)
        x_rows = [builder.add(x, builder.mul(x_stride, e.const(m))) for m in range(rows)]
        with cgutils.for_range(builder, blocks, intp=_I64) as loop:
            at = builder.mul(loop.index, e.const(X_BLOCK_BYTES))
            x_blocks = [builder.add(row, at) for row in x_rows]
            start = builder.add(weights, builder.mul(loop.index, e.const(form.block_bytes)))
            sums = _block_sums(e, form, vectors, start, x_blocks, width)
            first = builder.add(scales, builder.mul(loop.index, e.const(2 * form.block_scales)))
            _fetch_block(e, form, vectors, loop.index, next_weights, next_scales)
            for v in range(vectors):
                _add_block(e, form, v, first, x_blocks, [row[v] for row in sums], [row[v] for row in total])
        for m in range(rows):
            for v in range(vectors):
                at = builder.add(builder.mul(out_stride, e.const(m)), e.const(v * LANES))
                e.store(builder.load(total[m][v]), out, at)
        return context.get_dummy_value()

    @intrinsic
    def tile(  # type: ignore[no-untyped-def]
        typing_context, x, x_stride, weights, scales, blocks, out, out_stride, next_weights, next_scales
    ):
        return types.void(*[types.int64] * 9), codegen

    return tile


def _fetch_block(e: Emit, form: WeightFormat, vectors: int, block: Any, weights: Any, scales: Any) -> None:
    """Have a tile's part of a block come from memory."""
    start = e.b.add(weights, e.b.mul(block, e.const(form.block_bytes)))
    for step in range(BLOCK * form.bits // 8 // STEP):
        for v in range(vectors):
            e.prefetch(start, step * CHUNK * STEP + v * LANES * STEP)
    first = e.b.add(scales, e.b.mul(block, e.const(2 * form.block_scales)))
    for kind in range(form.block_scales // CHUNK):
        for line in range(0, 2 * vectors * LANES, 64):
            e.prefetch(first, 2 * CHUNK * kind + line)


def _block_sums(
    e: Emit, form: WeightFormat, vectors: int, start: Any, x_blocks: list[Any], width: int
) -> list[list[Any]]:
    """int32 [rows][vectors]: the sum over the inputs of a block of x * (weight - offset)."""
    sums = []
    for x_block in x_blocks:
        initial = ir.Constant(_VI32, [0] * LANES)
        if form.offset:
            initial = e.broadcast(e.at(x_block, START, _I32), LANES)
        sums.append([initial] * vectors)
    for step in range(BLOCK * form.bits // 8 // STEP):
        packed = [e.at(start, step * CHUNK * STEP + v * LANES * STEP, _VI32) for v in range(vectors)]
        for half, weights in enumerate(_unpack(e, form, packed)):
            for m, x_block in enumerate(x_blocks):
                x = e.broadcast(e.at(x_block, step * STEP + half * BLOCK // 2, _I32), LANES)
                sums[m] = [_dot(e, total, w, x, width) for total, w in zip(sums[m], weights, strict=True)]
    return sums


def _unpack(e: Emit, form: WeightFormat, packed: list[Any]) -> list[list[Any]]:
    """Bytes as they are; of nibbles first the low ones, inputs of a block's first half, then the high ones."""
    if form.bits == 8:
        return [packed]
    mask, four = (ir.Constant(_VI32, [value] * LANES) for value in (0x0F0F0F0F, 4))
    return [[e.b.and_(p, mask) for p in packed], [e.b.and_(e.b.lshr(p, four), mask) for p in packed]]


def _add_block(
    e: Emit, form: WeightFormat, v: int, scales: Any, x_blocks: list[Any], sums: list[Any], total: list[Any]
) -> None:
    """total[m] += scale * x_scale[m] * sums[m] + minimum * x_scaled_sum[m]."""
    b = e.b
    scale = b.fpext(e.at(scales, 2 * v * LANES, ir.VectorType(_F16, LANES)), _VF32)
    minimum = None
    if form.minimum:
        minimum = b.fpext(e.at(scales, 2 * (CHUNK + v * LANES), ir.VectorType(_F16, LANES)), _VF32)
    for x_block, block_sum, slot in zip(x_blocks, sums, total, strict=True):
        x_scale = e.broadcast(e.at(x_block, SCALE, _F32), LANES)
        value = e.multiply_add(b.fmul(b.sitofp(block_sum, _VF32), scale), x_scale, b.load(slot))
        if minimum is not None:
            value = e.multiply_add(minimum, e.broadcast(e.at(x_block, SCALED_SUM, _F32), LANES), value)
        b.store(value, slot)


def _dot(e: Emit, total: Any, weights: Any, x: Any, width: int) -> Any:
    """total + the four products of unsigned bytes of `weights` with signed bytes of `x`, in each of 16 lanes."""
    if width == 512:
        return _vnni(e, total, weights, x)
    if width == 256:
        halves = [[_half(e, value, h) for value in (total, weights, x)] for h in (0, 1)]
        low, high = (_vnni(e, *half) for half in halves)
        return e.b.shuffle_vector(low, high, ir.Constant(_VI32, list(range(LANES))))
    # Even and odd bytes as int16: products of neighbours then add up in int32, which is one instruction of old.
    b, pairs = e.b, ir.VectorType(_I16, 2 * LANES)
    eight = ir.Constant(pairs, [8] * 2 * LANES)
    w, x = b.bitcast(weights, pairs), b.bitcast(x, pairs)
    even = _multiply_pairs(e, b.and_(w, ir.Constant(pairs, [255] * 2 * LANES)), b.ashr(b.shl(x, eight), eight))
    odd = _multiply_pairs(e, b.lshr(w, eight), b.ashr(x, eight))
    return b.add(total, b.add(even, odd))


def _vnni(e: Emit, total: Any, weights: Any, x: Any) -> Any:
    lanes = total.type.count
    kind = ir.FunctionType(total.type, [total.type] * 3)
    name = f"llvm.x86.avx512.vpdpbusd.{lanes * 32}"
    return e.b.call(cgutils.get_or_insert_function(e.b.module, kind, name), [total, weights, x])


def _half(e: Emit, value: Any, half: int) -> Any:
    lanes = [half * LANES // 2 + i for i in range(LANES // 2)]
    return e.b.shuffle_vector(value, value, ir.Constant(ir.VectorType(_I32, LANES // 2), lanes))


def _multiply_pairs(e: Emit, x: Any, y: Any) -> Any:
    """int32 [16] from int16 [32]: x[2i] * y[2i] + x[2i + 1] * y[2i + 1]."""
    b, wide = e.b, ir.VectorType(_I32, 2 * LANES)
    products = b.mul(b.sext(x, wide), b.sext(y, wide))
    parts = [b.shuffle_vector(products, products, ir.Constant(_VI32, list(range(p, 2 * LANES, 2)))) for p in (0, 1)]
    return b.add(*parts)


def _reduce(e: Emit, operation: str, vector: Any) -> Any:
    kind = ir.FunctionType(_I32, [vector.type])
    name = f"llvm.vector.reduce.{operation}.v{LANES}i32"
    return e.b.call(cgutils.get_or_insert_function(e.b.module, kind, name), [vector])
