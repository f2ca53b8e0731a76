"""The inner loop of linear layers on integer weights: products of bytes, summed exactly in int32.

The inputs of a layer are rounded to int8 too, with a scale for each block of 32. Then four products cost one lane of
one instruction (VNNI), and a block's sum is an exact integer whatever computes it. What follows once a block costs as
much as two products in floats and three if there are minima, but two in any case in fixed point, which 4-bit weights
allow: see `WeightFormat.fixed`. A row of the result depends on no other row, and is the same on every processor that
multiplies and adds floats in one instruction, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine_core.kernels.cpu_layout import BLOCK, CHUNK, X_BLOCK_BYTES, X_STEP, WeightFormat
from engine_core.kernels.cpu_memory import CACHE_LINE
from engine_core.kernels.cpu_source.rounding import MAGIC, MAGIC_BITS, SCALE, SCALED_SUM, START, STEPS_BYTES
from engine_core.kernels.cpu_source.tile import Emit
from engine_core.kernels.cpu_source.vector import LANES

STEP = 4  # inputs that one lane multiplies at once
VECTOR_BYTES = LANES * STEP  # of integers, and of floats

_I16, _I32, _I64, _F16, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.HalfType(), ir.FloatType()
_HALVES, _SHORTS, _PAIRS = ir.VectorType(_F16, LANES), ir.VectorType(_I16, LANES), ir.VectorType(_I16, 2 * LANES)
VI32, VF32 = ir.VectorType(_I32, LANES), ir.VectorType(_F32, LANES)


def dot_tile(form: WeightFormat, rows: int, vectors: int, width: int, panel: str = "") -> Any:
    """An intrinsic that computes `rows` x `16 * vectors` outputs of a linear layer.

    `tile(x, steps, units, weights, panel, begin, end, sums, fetch)`: addresses and blocks. Adds the blocks from `begin`
    to `end`, a piece of `PIECE` or what is left, to `sums` [rows, 16 * vectors], or to 0 if they are the first. `x` is
    the first of rounded rows of one group, `weights` points at a chunk of a `PackedWeight`. In fixed point `steps` has
    the scales of the inputs, a pair of equal int16 for each row of the group, block by block; `units` what one step is.

    Tiles of other rows with the same weights need not unpack them again: one that is to "write" the panel leaves them
    there, `panel_bytes` for each block, and one that is to "read" it takes them from there. Then each of the two has
    half a block at `fetch` come from memory with each block that it computes; a tile that works alone, a whole one.
    """
    fetched = form.block_bytes // 2 if panel else form.block_bytes

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x, steps, units, weights, panel_start, begin, end, out, fetch = values
        e = Emit(builder)
        total: Floats | Fixed = (Fixed if form.fixed else Floats)(e, rows, vectors, width)
        total.begin(out, begin)
        with cgutils.for_range_slice(builder, begin, end, e.const(1), intp=_I64) as (block, _):
            number = builder.sub(block, begin)
            x_block = builder.add(x, builder.mul(block, e.const(X_STEP)))
            packed = Packed(e, form, vectors, builder.add(weights, builder.mul(block, e.const(form.block_bytes))))
            at = builder.add(panel_start, builder.mul(number, e.const(panel_bytes(form, vectors))))
            unpacked = Panel(e, form, vectors, at)
            source = unpacked if panel == "read" else packed
            sums = [[_first_sum(e, form, x_block, m, width)] * vectors for m in range(rows)]
            fetch_block = builder.add(fetch, builder.mul(number, e.const(fetched)))
            lines = range(0, fetched, CACHE_LINE)
            at_once = -(-len(lines) * STEP // BLOCK)
            for at, integers in source.integers():
                for line in lines[at // STEP * at_once :][:at_once]:  # evenly: what is asked for at once has to queue
                    e.prefetch(fetch_block, line, near=False)
                if panel == "write":
                    unpacked.keep_integers(at, integers)
                for m in range(rows):
                    x_part = e.broadcast(e.at(x_block, m * X_BLOCK_BYTES + at, _I32), LANES)
                    sums[m] = [dot_bytes(e, *pair, x_part, width) for pair in zip(sums[m], integers, strict=True)]
            steps_block = builder.add(steps, builder.mul(block, e.const(STEPS_BYTES)))
            for v in range(vectors):
                factors = source.factors(v)
                if panel == "write":
                    unpacked.keep_factors(v, factors)
                total.add(v, [row[v] for row in sums], factors, x_block, steps_block)
        total.end(out, begin, units)
        return context.get_dummy_value()

    @intrinsic
    def tile(typing_context, x, steps, units, weights, panel, begin, end, sums, fetch):  # type: ignore[no-untyped-def]
        return types.void(*[types.int64] * 9), codegen

    return tile


class Floats:
    """The sums of a tile, to which each block's is added as floats."""

    def __init__(self, e: Emit, rows: int, vectors: int, width: int) -> None:
        self._e, self._width, self._slots = e, width, e.accumulators(rows, vectors, LANES)

    def begin(self, out: Any, begin: Any) -> None:
        e = self._e
        with e.b.if_then(e.b.icmp_signed(">", begin, e.const(0))):
            for number, slot in enumerate(chain(*self._slots)):
                e.b.store(e.at(out, number * VECTOR_BYTES, VF32), slot)

    def add(self, v: int, sums: list[Any], factors: list[Any], x_block: Any, steps: Any) -> None:
        """scale * x_scale[m] * sums[m] + minimum * x_scaled_sum[m]."""
        e, b = self._e, self._e.b
        scale, less_magic, *minimum = factors
        for m, block_sum in enumerate(sums):
            x_scale = e.broadcast(e.at(x_block, m * X_BLOCK_BYTES + SCALE, _F32), LANES)
            if self._width:  # MAGIC + sum times scale less MAGIC * scale, rounded once: exactly their product
                scaled = e.multiply_add(b.bitcast(block_sum, VF32), scale, less_magic)
            else:  # whoever has no VNNI might not multiply and add in one instruction
                scaled = b.fmul(b.sitofp(block_sum, VF32), scale)
            value = e.multiply_add(scaled, x_scale, b.load(self._slots[m][v]))
            for factor in minimum:
                scaled_sum = e.at(x_block, m * X_BLOCK_BYTES + SCALED_SUM, _F32)
                value = e.multiply_add(factor, e.broadcast(scaled_sum, LANES), value)
            b.store(value, self._slots[m][v])

    def end(self, out: Any, begin: Any, units: Any) -> None:
        for number, slot in enumerate(chain(*self._slots)):
            self._e.put(self._e.b.load(slot), out, number * VECTOR_BYTES)


class Fixed:
    """The sums of a tile, which stay integers until its piece is done."""

    def __init__(self, e: Emit, rows: int, vectors: int, width: int) -> None:
        zero = ir.Constant(VI32, [0] * LANES)
        self._slots = [[cgutils.alloca_once_value(e.b, zero) for _ in range(vectors)] for _ in range(rows)]
        self._e, self._width = e, width

    def begin(self, out: Any, begin: Any) -> None:
        """Nothing: a piece starts at zero, and `end` adds it to what is there."""

    def add(self, v: int, sums: list[Any], factors: list[Any], x_block: Any, steps: Any) -> None:
        """x_steps[m] * (scale * lower half of sums[m] + minimum * upper half)."""
        e, b = self._e, self._e.b
        for m, block_sum in enumerate(sums):
            scaled = _multiply_high(e, b.bitcast(block_sum, _PAIRS), b.bitcast(factors[0], _PAIRS), self._width)
            x_steps = e.broadcast(e.at(steps, m * STEP, _I32), LANES)
            slot = self._slots[m][v]
            b.store(_dot_pairs(e, b.load(slot), scaled, b.bitcast(x_steps, _PAIRS), self._width), slot)

    def end(self, out: Any, begin: Any, units: Any) -> None:
        e, b = self._e, self._e.b
        unit = [e.broadcast(e.at(units, m * STEP, _F32), LANES) for m in range(len(self._slots))]
        with b.if_else(b.icmp_signed(">", begin, e.const(0))) as (more, first):
            for branch in (more, first):
                with branch:
                    number = 0
                    for m, row in enumerate(self._slots):
                        for slot in row:
                            value = b.sitofp(b.load(slot), VF32)
                            if branch is more:
                                value = e.multiply_add(value, unit[m], e.at(out, number * VECTOR_BYTES, VF32))
                            else:
                                value = b.fmul(value, unit[m])
                            e.put(value, out, number * VECTOR_BYTES)
                            number += 1


class Packed:
    """A block of weights of a chunk, or of its first `16 * vectors` outputs, as it lies in a `PackedWeight`."""

    def __init__(self, e: Emit, form: WeightFormat, vectors: int, start: Any) -> None:
        self._e, self._form, self._vectors, self._start = e, form, vectors, start

    def integers(self) -> Iterator[tuple[int, list[Any]]]:
        """Four inputs of each output at a time, and where in a block they are."""
        e = self._e
        for at in range(0, BLOCK * self._form.bits // 8, STEP):
            packed = [e.at(self._start, at * CHUNK + v * VECTOR_BYTES, VI32) for v in range(self._vectors)]
            if self._form.bits == 8:
                yield at, packed
                continue
            # The low ones are inputs of a block's first half, the high ones of its second.
            mask, four = (ir.Constant(VI32, [value] * LANES) for value in (0x0F0F0F0F, 4))
            yield at, [e.b.and_(p, mask) for p in packed]
            yield at + BLOCK // 2, [e.b.and_(e.b.lshr(p, four), mask) for p in packed]

    def factors(self, v: int) -> list[Any]:
        """What sums of 16 outputs are multiplied by: pairs of scale and minimum in fixed point; or scales, -MAGIC *
        scales, and minima if there are any."""
        e, b = self._e, self._e.b
        if self._form.fixed:
            if self._form.minimum:
                return [e.at(self._start, self._form.scales_at + v * VECTOR_BYTES, VI32)]
            return [b.zext(e.at(self._start, self._form.scales_at + v * VECTOR_BYTES // 2, _SHORTS), VI32)]
        places = [self._form.scales_at + 2 * (CHUNK * kind + v * LANES) for kind in range(self._form.kinds)]
        halves = [e.at(self._start, place, _HALVES) for place in places]
        scale = b.fpext(halves[0], VF32)
        factors = [scale, b.fmul(scale, ir.Constant(VF32, [-MAGIC] * LANES))]
        return [*factors, b.fpext(halves[1], VF32)] if self._form.minimum else factors


class Panel:
    """The same, unpacked to bytes and whole vectors: front to back in memory of the thread's own."""

    def __init__(self, e: Emit, form: WeightFormat, vectors: int, start: Any) -> None:
        self._e, self._form, self._vectors, self._start = e, form, vectors, start

    def integers(self) -> Iterator[tuple[int, list[Any]]]:
        for at in range(0, BLOCK, STEP):
            yield at, [self._e.at(self._start, self._integers_at(at, v), VI32) for v in range(self._vectors)]

    def factors(self, v: int) -> list[Any]:
        kind = VI32 if self._form.fixed else VF32
        return [self._e.at(self._start, self._factor_at(n, v), kind) for n in range(_factors(self._form))]

    def keep_integers(self, at: int, integers: list[Any]) -> None:
        for v, value in enumerate(integers):
            self._e.put(value, self._start, self._integers_at(at, v))

    def keep_factors(self, v: int, factors: list[Any]) -> None:
        for kind, value in enumerate(factors):
            self._e.put(value, self._start, self._factor_at(kind, v))

    def _integers_at(self, at: int, v: int) -> int:
        return (at // STEP * self._vectors + v) * VECTOR_BYTES

    def _factor_at(self, kind: int, v: int) -> int:
        return self._integers_at(BLOCK, 0) + (kind * self._vectors + v) * VECTOR_BYTES


def panel_bytes(form: WeightFormat, vectors: int) -> int:
    """Of a block."""
    return (BLOCK // STEP + _factors(form)) * vectors * VECTOR_BYTES


def _factors(form: WeightFormat) -> int:
    return 1 if form.fixed else 3 if form.minimum else 2


def _first_sum(e: Emit, form: WeightFormat, x_block: Any, row: int, width: int) -> Any:
    """What the sum of a block begins with, in each of 16 lanes: what takes the offset out of the weights.

    With MAGIC's bits added, a sum is the bits of the float MAGIC + sum.
    """
    start = ir.Constant(VI32, [MAGIC_BITS if width and not form.fixed else 0] * LANES)
    if not form.offset:
        return start
    return e.b.add(start, e.broadcast(e.at(x_block, row * X_BLOCK_BYTES + START, _I32), LANES))


def _multiply_high(e: Emit, x: Any, y: Any, width: int) -> Any:
    """int16 [32]: x * y / 2^15, halves rounded up."""
    if width == 512:
        return _call(e, "llvm.x86.avx512.pmul.hr.sw.512", x, y)
    b, wide = e.b, ir.VectorType(_I32, 2 * LANES)
    half = ir.Constant(wide, [1 << 14] * 2 * LANES)
    product = b.add(b.mul(b.sext(x, wide), b.sext(y, wide)), half)
    return b.trunc(b.ashr(product, ir.Constant(wide, [15] * 2 * LANES)), _PAIRS)


def _dot_pairs(e: Emit, total: Any, x: Any, y: Any, width: int) -> Any:
    """total + the two products of int16 in each of 16 lanes."""
    if width == 512:
        return _call(e, "llvm.x86.avx512.vpdpwssd.512", total, e.b.bitcast(x, VI32), e.b.bitcast(y, VI32))
    return e.b.add(total, _multiply_pairs(e, x, y))


def dot_bytes(e: Emit, total: Any, weights: Any, x: Any, width: int) -> Any:
    """total + the four products of unsigned bytes of `weights` with signed bytes of `x`, in each of 16 lanes."""
    if width == 512:
        return _vnni(e, total, weights, x)
    if width == 256:
        halves = [[_half(e, value, h) for value in (total, weights, x)] for h in (0, 1)]
        low, high = (_vnni(e, *half) for half in halves)
        return e.b.shuffle_vector(low, high, ir.Constant(VI32, list(range(LANES))))
    # Even and odd bytes as int16: products of neighbours then add up in int32, which is one instruction of old.
    b = e.b
    eight = ir.Constant(_PAIRS, [8] * 2 * LANES)
    w, x = b.bitcast(weights, _PAIRS), b.bitcast(x, _PAIRS)
    even = _multiply_pairs(e, b.and_(w, ir.Constant(_PAIRS, [255] * 2 * LANES)), b.ashr(b.shl(x, eight), eight))
    odd = _multiply_pairs(e, b.lshr(w, eight), b.ashr(x, eight))
    return b.add(total, b.add(even, odd))


def _vnni(e: Emit, total: Any, weights: Any, x: Any) -> Any:
    return _call(e, f"llvm.x86.avx512.vpdpbusd.{total.type.count * 32}", total, weights, x)


def _call(e: Emit, name: str, *values: Any) -> Any:
    """An instruction of this processor: the result is of the type of the values."""
    kind = ir.FunctionType(values[0].type, [value.type for value in values])
    return e.b.call(cgutils.get_or_insert_function(e.b.module, kind, name), values)


def _half(e: Emit, value: Any, half: int) -> Any:
    lanes = [half * LANES // 2 + i for i in range(LANES // 2)]
    return e.b.shuffle_vector(value, value, ir.Constant(ir.VectorType(_I32, LANES // 2), lanes))


def _multiply_pairs(e: Emit, x: Any, y: Any) -> Any:
    """int32 [16] from int16 [32]: x[2i] * y[2i] + x[2i + 1] * y[2i + 1]."""
    b, wide = e.b, ir.VectorType(_I32, 2 * LANES)
    products = b.mul(b.sext(x, wide), b.sext(y, wide))
    parts = [b.shuffle_vector(products, products, ir.Constant(VI32, list(range(p, 2 * LANES, 2)))) for p in (0, 1)]
    return b.add(*parts)
