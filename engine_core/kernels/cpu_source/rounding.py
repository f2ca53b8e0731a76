"""Rounds the inputs of a product to int8, with a scale for each block of 32: of rows as they are, normed or gated.

And the scales to fixed point.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
import numba
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine_core.kernels.cpu_layout import BLOCK, PIECE, X_BLOCK_BYTES, X_GROUP, X_STEP, X_STEPS
from engine_core.kernels.cpu_source.tile import Emit
from engine_core.kernels.cpu_source.vector import LANES, silu_product

SCALE, SCALED_SUM, START = BLOCK, BLOCK + 4, BLOCK + 8  # where in a block of rounded inputs
MAGIC = 1.5 * 2**23  # added to a small float, it leaves no bits behind the point
MAGIC_BITS = 0x4B400000

_I8, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_SMALLEST = 1e-30  # a block of smaller values counts as zeros: the inverse of its scale might be infinite
TOGETHER = 4  # blocks that are rounded at once
STEPS_BYTES = X_GROUP * 4  # of the scales of a group of rows in fixed point, for a block
_VI32, _VF32 = ir.VectorType(_I32, LANES), ir.VectorType(_F32, LANES)
_QI32, _QF32 = ir.VectorType(_I32, TOGETHER), ir.VectorType(_F32, TOGETHER)
_BYTES = ir.VectorType(_I8, 4 * LANES)


@numba.njit(inline="always")
def rounded_row(rounded, row, blocks):  # type: ignore[no-untyped-def]
    """The address of a row's first block; its others are `X_GROUP` blocks apart, with those of its neighbours between.

    So a tile of rows reads all its inputs at constant distances from one address.
    """
    return rounded + (row // X_GROUP * blocks * X_GROUP + row % X_GROUP) * X_BLOCK_BYTES


def scale_fixer(units_step: int) -> Any:
    """A function `fix(rounded, first_row, last_row, blocks, steps, units)` that writes down the scales of some rounded
    rows in fixed point, each twice beside itself, group by group, and each row's unit for a piece, `units_step` bytes
    from that for the next. The first row is the first of a group."""
    group, alone = (_fix_rows(rows, units_step) for rows in (X_GROUP, 1))

    @numba.njit(inline="always")
    def fix(rounded, first_row, last_row, blocks, steps, units):  # type: ignore[no-untyped-def]
        row = first_row
        while row < last_row:
            number = row - first_row
            scales = rounded_row(rounded, row, blocks) + SCALE
            target = steps + (number // X_GROUP * blocks * X_GROUP + number % X_GROUP) * 4
            if last_row - row >= X_GROUP:
                group(scales, blocks, target, units + number * 4)
                row += X_GROUP
            else:
                alone(scales, blocks, target, units + number * 4)
                row += 1

    return fix


def _fix_rows(rows: int, units_step: int) -> Any:
    """The same for a number of rows of one group, as an intrinsic `fix(scales, blocks, steps, units)`."""
    integers, floats = ir.VectorType(_I32, rows), ir.VectorType(_F32, rows)

    def constant(value: float) -> Any:
        return ir.Constant(floats, [value] * rows)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        scales, blocks, steps, units = values
        e, b = Emit(builder), builder

        def scale(block: Any) -> Any:
            start, vector = b.add(scales, b.mul(block, e.const(X_STEP))), ir.Constant(floats, ir.Undefined)
            for m in range(rows):
                vector = b.insert_element(vector, e.at(start, m * X_BLOCK_BYTES, _F32), ir.Constant(_I32, m))
            return vector

        with cgutils.for_range_slice(b, e.const(0), blocks, e.const(PIECE), intp=_I64) as (begin, _):
            end = b.add(begin, e.const(PIECE))
            end = b.select(b.icmp_signed("<", end, blocks), end, blocks)
            total = cgutils.alloca_once(b, floats)
            b.store(constant(0.0), total)
            with cgutils.for_range_slice(b, begin, end, e.const(1), intp=_I64) as (block, _):
                b.store(b.fadd(b.load(total), scale(block)), total)
            value = b.load(total)  # a NaN or an infinity is one in all of the piece
            # What is smaller are scales of blocks that have only zeros.
            counts = b.and_(
                b.fcmp_ordered(">", value, constant(_SMALLEST / 1000)), b.fcmp_ordered("<", value, constant(math.inf))
            )
            inverse = b.select(counts, b.fdiv(constant(float(X_STEPS)), value), constant(0.0))
            piece = b.sdiv(begin, e.const(PIECE))
            e.put(b.fmul(value, constant(1 / X_STEPS)), b.add(units, b.mul(piece, e.const(units_step))), 0)
            with cgutils.for_range_slice(b, begin, end, e.const(1), intp=_I64) as (block, _):
                whole = b.fptosi(b.fadd(b.fmul(scale(block), inverse), constant(0.5)), integers)
                whole = b.select(counts, whole, ir.Constant(integers, [0] * rows))
                pair = b.mul(whole, ir.Constant(integers, [0x10001] * rows))
                e.put(pair, b.add(steps, b.mul(block, e.const(STEPS_BYTES))), 0)
        return context.get_dummy_value()

    @intrinsic  # type: ignore[untyped-decorator]
    def fix(typing_context: Any, scales: Any, blocks: Any, steps: Any, units: Any) -> Any:
        return types.void(*[types.int64] * 4), codegen

    return fix


@intrinsic  # type: ignore[untyped-decorator]
def quantize_row(typing_context: Any, x: Any, out: Any, step: Any, blocks: Any, offset: Any) -> Any:
    """`quantize_row(x, out, step, blocks, offset)`: 32 floats a block at address `x` to blocks at `out`, `step` bytes
    apart.

    The largest of a block becomes 127. A NaN or an infinity makes the scale NaN or infinite, and with it all that it
    meets.
    """

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x, out, step, blocks, offset = values
        e = Emit(builder)
        quantize_blocks(e, x, out, step, blocks, offset)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


def quantize_blocks(e: Emit, x: Any, out: Any, step: Any, blocks: Any, offset: Any) -> None:
    """The code of `quantize_row`."""

    def block(at: Any) -> list[Any]:
        return _halves(e, e.b.add(x, at))

    _quantize(e, block, blocks, out, step, offset)


def quantize_head(e: Emit, x: Any, out: Any, scale: Any, vectors: Any) -> None:
    """16 * vectors floats at address `x` to int8 at `out`, with one scale for all, which goes to `scale`.

    What is not a number or infinite counts as for `quantize_row`.
    """
    b = e.b
    largest = cgutils.alloca_once_value(b, _integers(0))
    with cgutils.for_range(b, vectors, intp=_I64) as loop:
        value = e.load(x, b.mul(loop.index, e.const(LANES)), LANES)
        size = b.and_(b.bitcast(value, _VI32), _integers(0x7FFFFFFF))
        b.store(_larger(e, b.load(largest), size), largest)
    most = b.bitcast(reduce_vectors(e, [b.load(largest)], _larger), _QF32)
    inverse = b.fdiv(ir.Constant(_QF32, [127.0] * TOGETHER), most)
    counts = b.fcmp_ordered(">", most, ir.Constant(_QF32, [_SMALLEST] * TOGETHER))
    inverse = b.select(counts, inverse, ir.Constant(_QF32, [0.0] * TOGETHER))
    factor = b.shuffle_vector(inverse, inverse, _lanes([0] * LANES))
    with cgutils.for_range(b, vectors, intp=_I64) as loop:
        at = b.mul(loop.index, e.const(LANES))
        rounded = b.fadd(b.fmul(e.load(x, at, LANES), factor), ir.Constant(_VF32, [MAGIC] * LANES))
        lowest = b.bitcast(rounded, _BYTES)
        e.put(b.shuffle_vector(lowest, lowest, _lanes([*range(0, 4 * LANES, 4)])), b.add(out, at), 0)
    first = b.extract_element(most, ir.Constant(_I32, 0))
    e.put(b.fmul(first, ir.Constant(_F32, 1 / 127)), scale, 0)


@intrinsic  # type: ignore[untyped-decorator]
def quantize_normed(typing_context: Any, x: Any, scale: Any, weight: Any, out: Any, blocks: Any, offset: Any) -> Any:
    """`quantize_normed(x, scale, weight, out, blocks, offset)`: as `quantize_row`, of x * scale * weight."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x, scale, weight, out, blocks, offset = values
        e = Emit(builder)
        factor = e.broadcast(scale, LANES)

        def block(at: Any) -> list[Any]:
            parts = (_halves(e, builder.add(address, at)) for address in (x, weight))
            return [builder.fmul(builder.fmul(a, factor), b) for a, b in zip(*parts, strict=True)]

        _quantize(e, block, blocks, out, e.const(X_STEP), offset)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, *[types.int64] * 4), codegen


@intrinsic  # type: ignore[untyped-decorator]
def quantize_gated(typing_context: Any, gate: Any, up: Any, out: Any, step: Any, blocks: Any, offset: Any) -> Any:
    """`quantize_gated(gate, up, out, step, blocks, offset)`: as `quantize_row`, of SiLU(gate) * up, to blocks that are
    `step` bytes apart."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        gate, up, out, step, blocks, offset = values
        e = Emit(builder)

        def block(at: Any) -> list[Any]:
            parts = (_halves(e, builder.add(address, at)) for address in (gate, up))
            return [silu_product(e, *pair) for pair in zip(*parts, strict=True)]

        _quantize(e, block, blocks, out, step, offset)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


def _halves(e: Emit, address: Any) -> list[Any]:
    return [e.at(address, 4 * LANES * half, _VF32) for half in (0, 1)]


def _quantize(e: Emit, block: Callable[[Any], list[Any]], blocks: Any, out: Any, step: Any, offset: Any) -> None:
    """`block` makes the two halves of a block from where it begins, in bytes; they are `BLOCK` floats apart."""
    b = e.b
    whole = b.and_(blocks, e.const(-TOGETHER))
    for begin, end, count in ((e.const(0), whole, TOGETHER), (whole, blocks, 1)):
        with cgutils.for_range_slice(b, begin, end, e.const(count), intp=_I64) as (first, _):
            numbers = [b.add(first, e.const(i)) for i in range(count)]
            targets = [b.add(out, b.mul(number, step)) for number in numbers]
            _quantize_blocks(e, [block(b.mul(number, e.const(4 * BLOCK))) for number in numbers], targets, offset)


def _quantize_blocks(e: Emit, blocks: list[list[Any]], targets: list[Any], offset: Any) -> None:
    """Up to four blocks, which share what is done once for each: most of the instructions would be that."""
    b = e.b
    # As integers, since a NaN is the largest of those; it would get lost among floats.
    sizes = [[b.and_(b.bitcast(half, _VI32), _integers(0x7FFFFFFF)) for half in halves] for halves in blocks]
    largest = b.bitcast(reduce_vectors(e, [_larger(e, *halves) for halves in sizes], _larger), _QF32)
    inverse = b.fdiv(ir.Constant(_QF32, [127.0] * TOGETHER), largest)
    counts = b.fcmp_ordered(">", largest, ir.Constant(_QF32, [_SMALLEST] * TOGETHER))
    inverse = b.select(counts, inverse, ir.Constant(_QF32, [0.0] * TOGETHER))
    sums = []
    for number, (halves, target) in enumerate(zip(blocks, targets, strict=True)):
        factor = b.shuffle_vector(inverse, inverse, _lanes([number] * LANES))
        # The sum's lowest bits are the nearest integer, halves to even.
        rounded = [b.fadd(b.fmul(half, factor), ir.Constant(_VF32, [MAGIC] * LANES)) for half in halves]
        lowest = [b.bitcast(half, _BYTES) for half in rounded]
        e.put(b.shuffle_vector(*lowest, _lanes([*range(0, 4 * BLOCK, 4)])), target, 0)
        sums.append(_sum(e, *(b.bitcast(half, _VI32) for half in rounded)))
    surplus = ir.Constant(_QI32, [BLOCK * MAGIC_BITS % 2**32] * TOGETHER)
    integer_sum = b.sub(reduce_vectors(e, sums, _sum), surplus)  # modulo 2^32
    scale = b.fmul(largest, ir.Constant(_QF32, [1 / 127] * TOGETHER))
    scaled_sum = b.fmul(scale, b.sitofp(integer_sum, _QF32))
    start = b.mul(integer_sum, e.broadcast(b.neg(b.trunc(offset, _I32)), TOGETHER))
    for number, target in enumerate(targets):
        for value, place in ((scale, SCALE), (scaled_sum, SCALED_SUM), (start, START)):
            e.put(b.extract_element(value, ir.Constant(_I32, number)), target, place)


def reduce_vectors(e: Emit, vectors: list[Any], combine: Callable[[Emit, Any, Any], Any]) -> Any:
    """Of up to four vectors of 16, each combined to one number: a vector of four."""
    b = e.b
    vectors = vectors + vectors[-1:] * (TOGETHER - len(vectors))
    # Within quarters: a0 b0 a1 b1 ... meets a2 b2 a3 b3 ..., then a0 b0 c0 d0 ... meets a1 b1 c1 d1 ...
    pairs = [_fold(e, vectors[i : i + 2], ([0, 16, 1, 17], [2, 18, 3, 19]), combine) for i in (0, 2)]
    vector = _fold(e, pairs, ([0, 1, 16, 17], [2, 3, 18, 19]), combine)
    for lanes in (LANES // 2, LANES // 4):
        parts = [[*range(lanes)], [*range(lanes, 2 * lanes)]]
        vector = combine(e, *(b.shuffle_vector(vector, vector, _lanes(part)) for part in parts))
    return vector


def _fold(
    e: Emit, pair: list[Any], shuffles: tuple[list[int], list[int]], combine: Callable[[Emit, Any, Any], Any]
) -> Any:
    """Two shuffles of a pair of vectors combined, the same in each quarter."""
    lanes = ([lane + quarter for quarter in range(0, LANES, 4) for lane in shuffle] for shuffle in shuffles)
    return combine(e, *(e.b.shuffle_vector(*pair, _lanes(numbers)) for numbers in lanes))


def _lanes(numbers: list[int]) -> Any:
    return ir.Constant(ir.VectorType(_I32, len(numbers)), numbers)


def _integers(value: int) -> Any:
    return ir.Constant(_VI32, [value] * LANES)


def _larger(e: Emit, x: Any, y: Any) -> Any:
    return e.b.select(e.b.icmp_signed(">", x, y), x, y)


def _sum(e: Emit, x: Any, y: Any) -> Any:
    return e.b.add(x, y)
