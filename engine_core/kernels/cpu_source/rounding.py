"""Rounds the inputs of a product to int8, with a scale for each block of 32: of rows as they are, normed or gated."""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
import numba
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine_core.kernels.cpu_layout import BLOCK, X_BLOCK_BYTES, X_GROUP
from engine_core.kernels.cpu_source.tile import Emit
from engine_core.kernels.cpu_source.vector import LANES, silu_product

SCALE, SCALED_SUM, START = BLOCK, BLOCK + 4, BLOCK + 8  # where in a block of rounded inputs
MAGIC = 1.5 * 2**23  # added to a small float, it leaves no bits behind the point
MAGIC_BITS = 0x4B400000

_I8, _I32, _F32 = ir.IntType(8), ir.IntType(32), ir.FloatType()
_SMALLEST = 1e-30  # a block of smaller values counts as zeros: the inverse of its scale might be infinite
_VI32, _VF32 = ir.VectorType(_I32, LANES), ir.VectorType(_F32, LANES)


@numba.njit(inline="always")
def rounded_row(rounded, row, blocks):  # type: ignore[no-untyped-def]
    """The address of a row's first block; its others are `X_GROUP` blocks apart, with those of its neighbours between.

    So a tile of rows reads all its inputs at constant distances from one address.
    """
    return rounded + (row // X_GROUP * blocks * X_GROUP + row % X_GROUP) * X_BLOCK_BYTES


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
        halves = [silu_product(e, *(e.at(x, 4 * LANES * half, _VF32) for x in (gate, up))) for half in (0, 1)]
        _quantize(e, halves, out, offset)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


def _quantize(e: Emit, halves: list[Any], out: Any, offset: Any) -> None:
    b = e.b
    sign = ir.Constant(_VI32, [0x7FFFFFFF] * LANES)
    # As integers, since a NaN is the largest of those; it would get lost among floats.
    sizes = [b.and_(b.bitcast(half, _VI32), sign) for half in halves]
    larger = b.select(b.icmp_signed(">", sizes[0], sizes[1]), sizes[0], sizes[1])
    largest = b.bitcast(_reduce(e, "umax", larger), _F32)
    inverse = b.fdiv(ir.Constant(_F32, 127.0), largest)
    inverse = b.select(b.fcmp_ordered(">", largest, ir.Constant(_F32, _SMALLEST)), inverse, ir.Constant(_F32, 0.0))
    total = ir.Constant(_VI32, [0] * LANES)
    for half, value in enumerate(halves):
        # The sum's lowest bits are the nearest integer, halves to even.
        rounded = b.fadd(b.fmul(value, e.broadcast(inverse, LANES)), ir.Constant(_VF32, [MAGIC] * LANES))
        bits = b.bitcast(rounded, _VI32)
        e.put(b.trunc(bits, ir.VectorType(_I8, LANES)), out, half * LANES)
        total = b.add(total, bits)
    integer_sum = b.sub(_reduce(e, "add", total), ir.Constant(_I32, BLOCK * MAGIC_BITS % 2**32))  # modulo 2^32
    scale = b.fmul(largest, ir.Constant(_F32, 1 / 127))
    e.put(scale, out, SCALE)
    e.put(b.fmul(scale, b.sitofp(integer_sum, _F32)), out, SCALED_SUM)
    e.put(b.mul(integer_sum, b.neg(b.trunc(offset, _I32))), out, START)


def _reduce(e: Emit, operation: str, vector: Any) -> Any:
    kind = ir.FunctionType(_I32, [vector.type])
    name = f"llvm.vector.reduce.{operation}.v{LANES}i32"
    return e.b.call(cgutils.get_or_insert_function(e.b.module, kind, name), [vector])
