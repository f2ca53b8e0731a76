"""The CPU kernels against plain torch in float64, and bit for bit against themselves in other batches."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Q
from gguf.quants import quantize as gguf_quantize

from engine_core.kernels import cpu_elementwise, cpu_team
from engine_core.kernels.cpu_cache import dot_width, kernel
from engine_core.kernels.cpu_layout import PIECE, X_STEPS
from engine_core.kernels.cpu_linear import PackedLinear, largest_bytes, rounded_bytes
from engine_core.kernels.cpu_pack import pack_floats, pack_quantized
from engine_core.layers.linear import DenseLinear, make_linear
from engine_core.loader.weights import QuantizedWeight

pytestmark = pytest.mark.usefixtures("seed", "poisoned")


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).abs().max() / expected.abs().max())


def gguf_weight(kind: Q, rows: int, columns: int) -> QuantizedWeight:
    values = np.random.standard_normal((rows, columns)).astype(np.float32)
    return QuantizedWeight(kind, (rows, columns), gguf_quantize(values, kind))


def round_inputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x as integer weights meet it: float32 scales [rows, blocks, 1], each block's largest value / 127, and integers
    [rows, blocks, 32], halves to even."""
    blocks = x.view(x.shape[0], -1, 32)
    largest = blocks.abs().amax(2, keepdim=True)
    inverse = torch.full_like(largest, 127) / largest  # torch takes `127 / largest` for a product, rounded twice
    return largest * np.float32(1 / 127), (blocks * inverse.nan_to_num(0, 0, 0)).round()


def rounded(x: torch.Tensor) -> torch.Tensor:
    """The same as numbers, float64."""
    scales, integers = round_inputs(x)
    return (scales.double() * integers.double()).flatten(1)


def in_fixed_point(weight: QuantizedWeight, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The product with 4-bit weights in integers of any size, float64, and how far it may be from the exact product of
    rounded inputs."""
    data = weight.data.reshape(weight.shape[0], -1, {Q.Q4_0: 18, Q.Q4_1: 20}[weight.ggml_type])
    minima = data[:, :, 2:4].copy().view(np.float16)[:, :, 0] if weight.ggml_type is Q.Q4_1 else None
    scales = data[:, :, :2].copy().view(np.float16)[:, :, 0]
    full = scales.astype(np.float32)
    less_8 = np.zeros_like(full) if minima is None else minima.astype(np.float32) + 8 * full
    unit = np.maximum(
        np.abs(full).max(1) * np.float32(2**15 / 32767), np.abs(less_8).max(1) * np.float32(2**12 / 32767)
    )
    per_unit = (1 / unit)[:, None]
    scale, middle = (
        np.floor(part * per_unit * np.float32(2**bits) + np.float32(0.5)).astype(np.int64)
        for part, bits in ((full, 15), (less_8, 12))
    )
    assert np.abs(scale).max() < 2**15 > np.abs(middle).max()
    nibbles = np.concatenate([data[:, :, -16:] & 15, data[:, :, -16:] >> 4], 2).astype(np.int64) - 8

    x_scales, integers = (part.numpy() for part in round_inputs(x))
    steps, x_unit = np.zeros_like(x_scales, np.int64), np.zeros_like(x_scales)
    for begin in range(0, x_scales.shape[1], PIECE):
        piece = slice(begin, begin + PIECE)
        total = np.zeros_like(x_scales[:, 0])
        for block in range(*piece.indices(x_scales.shape[1])):
            total = total + x_scales[:, block]
        with np.errstate(divide="ignore", over="ignore"):
            inverse = np.where(total > 1e-33, np.float32(X_STEPS) / total, np.float32(0))[:, None]
        steps[:, piece] = np.floor(x_scales[:, piece] * inverse + np.float32(0.5))
        x_unit[:, piece] = (total * np.float32(1 / X_STEPS))[:, None]
    steps, x_unit = steps[:, None, :, 0], x_unit[:, None, :, 0].astype(np.float64)  # [rows, 1, blocks]
    lower = np.einsum("rkx,okx->rok", integers.astype(np.int64), nibbles)
    sums = integers.astype(np.int64).sum(2)[:, None]
    upper = 8 * sums - (lower < 0)
    terms = (lower * scale + 2**14 >> 15) + (upper * middle + 2**14 >> 15)
    assert np.abs(lower).max() < 2**15 > np.abs(upper).max()
    pieces = np.split(np.abs(terms * steps), range(PIECE, steps.shape[2], PIECE), 2)
    assert max(piece.sum(2).max() for piece in pieces) < 2**31
    assert steps.max() < 2**15
    sizes = (np.abs(lower * scale) + np.abs(8 * sums * middle)) / 2**15 + 3
    bound = (3 * x_scales[:, None, :, 0] + x_unit / 2 * sizes).sum(2) * unit
    return torch.from_numpy((terms * steps * x_unit).sum(2) * unit), torch.from_numpy(bound)


EXACT = [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0]
WIDTHS = sorted({0, min(dot_width(), 256), dot_width()})  # of the instructions that this processor has


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("shape", [(1, 32), (65, 96), (192, 576)])
def test_quantized_linear_is_the_product_with_the_dequantized_weight(
    kind: Q, shape: tuple[int, int], threads: int
) -> None:
    weight = gguf_weight(kind, *shape)
    x = torch.randn(9, shape[1]) * torch.logspace(-9, 6, shape[1])
    x[2], x[3, :32], x[4] = 0, 0, 1e-35
    matrix = torch.from_numpy(weight.dequantize()).double().T
    out = PackedLinear(pack_quantized([weight]))(x).double()
    exact = rounded(x) @ matrix
    expected, allowed = in_fixed_point(weight, x) if kind in (Q.Q4_0, Q.Q4_1) else (exact, torch.tensor(0.0))
    # As exact as the terms are large, though they may cancel: products with a block's largest weight, as each weight is
    # itself a sum, of its block's least and some steps.
    largest = matrix.abs().view(-1, 32, shape[0]).amax(1).repeat_interleave(32, 0)
    terms = 5e-7 * rounded(x).abs() @ largest + 1e-30
    assert ((out - expected).abs() <= terms).all()
    assert ((out - exact).abs() <= terms + allowed).all()
    # Rounding moves an input by half of 1/127 of its block's largest at most, so a sum by that times the weights.
    steps = x.double().view(9, -1, 32).abs().amax(2, keepdim=True).expand(-1, -1, 32).flatten(1) / 127
    assert ((out - x.double() @ matrix).abs() <= 0.501 * steps @ matrix.abs() + allowed + 1e-30).all()


@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q4_1])
def test_fixed_point_costs_little_beside_rounded_inputs(kind: Q) -> None:
    weight, x = gguf_weight(kind, 192, 1536), torch.randn(20, 1536)
    exact, matrix = x.double(), torch.from_numpy(weight.dequantize()).double().T
    floats, fixed = rounded(x) @ matrix - exact @ matrix, PackedLinear(pack_quantized([weight]))(x) - exact @ matrix
    assert fixed.square().mean() < 1.1 * floats.square().mean()  # of noise; 1.01 as measured
    x[:, 700] *= 1000  # what is far from an outlier keeps its precision
    exact = x.double()
    floats, fixed = rounded(x) @ matrix - exact @ matrix, PackedLinear(pack_quantized([weight]))(x) - exact @ matrix
    assert fixed.square().mean() < 1.5 * floats.square().mean()


@pytest.mark.parametrize("width", WIDTHS)
def test_the_largest_numbers_of_fixed_point_fit(width: int) -> None:
    """All inputs, weights, scales and minima as large as can be: sums, products and their sums reach their limits."""
    for sign, nibble in itertools.product((1, -1), (0x00, 0xFF)):
        data = np.zeros((33, 40, 20), np.uint8)
        data[:, :, 4:] = nibble
        data[:, :, :4].view(np.float16)[:] = [1, -8 + 8 * sign]  # minima of weights less 8: 8 or -8 scales
        weight = QuantizedWeight(Q.Q4_1, (33, 1280), data.reshape(33, -1))
        x = torch.ones(9, 1280) * torch.tensor([1.0, -1.0, 3.0] * 3)[:, None]
        out = PackedLinear(pack_quantized([weight]), width=width)(x).double()
        expected, allowed = in_fixed_point(weight, x)
        assert ((out - expected).abs() <= 1e-6 * 1280 * 3 * 16).all()
        assert ((out - x.double() @ torch.from_numpy(weight.dequantize()).double().T).abs() <= allowed + 1e-2).all()


@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q4_1, Q.Q8_0])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_instruction_gives_the_same_bits(kind: Q, width: int) -> None:
    weight = pack_quantized([gguf_weight(kind, 130, 192)])
    x = torch.randn(27, 192)
    assert torch.equal(PackedLinear(weight, width=width)(x), PackedLinear(weight)(x))


@pytest.mark.parametrize("width", WIDTHS)
def test_sums_of_the_largest_products_do_not_saturate(width: int) -> None:
    signs = torch.randint(0, 2, (64, 96)) * 2 - 1
    signs[0] = 1
    weight = PackedLinear(pack_quantized([signs.float()]), width=width)
    scale = float(np.float16(1 / 127)) * 127  # what a weight of 1 becomes
    out = weight(torch.stack([torch.ones(96), -torch.ones(96), *signs[:6].float()]))
    expected = torch.stack([torch.ones(96), -torch.ones(96), *signs[:6].float()]).double() @ signs.double().T * scale
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", [Q.Q4_1, Q.Q8_0])
def test_what_is_no_number_stays_none_and_in_its_row(value: float, kind: Q) -> None:
    linear = PackedLinear(pack_quantized([gguf_weight(kind, 70, 96)]))
    x = torch.randn(20, 96)
    clean = linear(x)
    x[7, 40] = value
    out = linear(x)
    assert not out[7].isfinite().any()
    out[7] = clean[7]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q4_1, Q.Q8_0])
def test_whatever_lies_in_the_place_of_rows_that_are_not_there(kind: Q) -> None:
    """Rows are rounded into groups of eight, and multiplied by tiles that may hold fewer."""
    linear, team = PackedLinear(pack_quantized([gguf_weight(kind, 70, 608)])), cpu_team.cpu_team()
    for rows in (*range(1, 10), 49, 53):
        x = torch.randn(rows, 608)
        results = []
        for number in (0, -1, math.nan, math.inf, 3e38):
            inputs = torch.full((rounded_bytes(rows, 608) // 4,), number)
            args = (rows, x.data_ptr(), x.stride(0), 19, inputs.data_ptr(), linear.weight.form.offset)
            team.run(kernel("linear:quantize"), args)
            results.append(torch.full((rows, linear.width), math.nan))
            team.run(*linear.product(rows, inputs.data_ptr(), 0, results[-1].data_ptr()))
        assert torch.equal(results[0][:, :70], linear(x))
        assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("kind", "place"), [(Q.Q4_0, 0), (Q.Q4_1, 0), (Q.Q4_1, 2), (Q.Q8_0, 0)])
def test_a_scale_that_is_no_number_spoils_its_output_alone(kind: Q, place: int, value: float) -> None:
    weight, x = gguf_weight(kind, 70, 96), torch.randn(20, 96)
    clean = PackedLinear(pack_quantized([weight]))(x)
    size = weight.data.shape[1] // 3
    weight.data[33, size + place : size + place + 2] = np.array([value], np.float16).view(np.uint8)
    out = PackedLinear(pack_quantized([weight]))(x)
    assert not out[:, 33].isfinite().any()
    out[:, 33] = clean[:, 33]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("shape", [(3, 32), (100, 224), (576, 1536)])
def test_float_linear_is_as_good_as_torch(shape: tuple[int, int], threads: int) -> None:
    weight, bias, x = torch.randn(shape), torch.randn(shape[0]), torch.randn(20, shape[1])
    out = PackedLinear(pack_floats(weight), bias)(x)
    assert error(out, x.double() @ weight.double().T + bias.double()) < 1e-6


def test_parts_of_different_types_stand_one_after_the_other() -> None:
    x = torch.randn(5, 64)
    parts = [gguf_weight(Q.Q4_1, 40, 64), gguf_weight(Q.Q8_0, 33, 64), gguf_weight(Q.Q5_0, 7, 64)]
    matrix = torch.cat([torch.from_numpy(part.dequantize()) for part in parts]).double()
    assert error(PackedLinear(pack_quantized(parts))(x), rounded(x) @ matrix.T) < 2e-6
    alike = [gguf_weight(Q.Q4_1, rows, 64) for rows in (40, 33, 7)]
    expected = torch.cat([in_fixed_point(part, x)[0] for part in alike], 1)
    assert error(PackedLinear(pack_quantized(alike))(x), expected) < 2e-6


def test_other_weights_are_rounded_to_half_a_step() -> None:
    weight = torch.randn(64, 96)
    weight[3] = 0
    recovered = PackedLinear(pack_quantized([weight]))(torch.eye(96)).T
    step = weight.view(64, 3, 32).abs().amax(2) / 127
    assert ((recovered - weight).view(64, 3, 32).abs() <= step[:, :, None] * 0.57 + 1e-9).all()


@pytest.mark.parametrize("kind", [None, *EXACT])
def test_a_row_does_not_depend_on_its_batch(kind: Q | None, threads: int) -> None:
    weight = pack_floats(torch.randn(200, 160)) if kind is None else pack_quantized([gguf_weight(kind, 200, 160)])
    linear = PackedLinear(weight)
    x = torch.randn(110, 160)
    together = linear(x)
    for rows in (*range(1, 18), 47, 48, 49, 97):
        start = int(torch.randint(0, 110 - rows, ()))
        assert torch.equal(linear(x[start : start + rows]), together[start : start + rows]), rows


def test_linear_takes_strided_rows_other_dtypes_and_no_rows() -> None:
    linear = PackedLinear(pack_floats(torch.randn(70, 64)))
    wide = torch.randn(6, 100)
    assert torch.equal(linear(wide[:, 10:74]), linear(wide[:, 10:74].contiguous()))
    assert torch.equal(linear(wide.T.contiguous().T[:, :64]), linear(wide[:, :64]))
    half = wide[:, :64].bfloat16()
    assert torch.equal(linear(half), linear(half.float()).bfloat16())
    assert linear(wide[:0, :64]).shape == (0, 70)


def test_the_factory_keeps_odd_widths_dense() -> None:
    assert isinstance(make_linear([torch.randn(8, 48)], mode="int8"), DenseLinear)
    assert isinstance(make_linear([torch.randn(8, 64)], mode="int8"), PackedLinear)
    assert isinstance(make_linear([torch.randn(8, 64)], dtype=torch.bfloat16), DenseLinear)


@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (3, 576), (300, 96)])
def test_add_and_norm(rows: int, columns: int, threads: int) -> None:
    x, residual, weight = torch.randn(rows, columns) * 9, torch.randn(rows, columns), torch.randn(columns)
    out, total = cpu_elementwise.add_rms_norm(x, residual, weight, 1e-5)
    exact = x.double() + residual.double()
    assert torch.equal(total, x + residual)
    assert error(out, exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-5) * weight.double()) < 1e-6
    alone, same = cpu_elementwise.add_rms_norm(total[:1], None, weight, 1e-5)
    assert torch.equal(alone, out[:1])
    assert torch.equal(same, total[:1])


@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (5, 1536), (700, 48)])
def test_silu_and_mul(rows: int, columns: int, threads: int) -> None:
    x = torch.randn(rows, 2 * columns) * torch.logspace(-3, 2, rows)[:, None]
    expected = torch.nn.functional.silu(x[:, :columns].double()) * x[:, columns:].double()
    assert ((cpu_elementwise.silu_and_mul(x).double() - expected).abs() <= 1e-6 * expected.abs() + 1e-30).all()
    x[0, 0] = math.nan
    assert cpu_elementwise.silu_and_mul(x)[0, 0].isnan()


@pytest.mark.parametrize("columns", [1, 7, 8, 511, 512, 513, 5000])
def test_argmax_is_numpys(columns: int, threads: int) -> None:
    rows = np.random.standard_normal((9, columns)).astype(np.float32)
    rows[1] = 3.0
    rows[2] = -np.inf
    rows[3, np.random.randint(columns)] = np.inf
    rows[4, np.random.randint(columns, size=3)] = np.nan
    rows[5, np.random.randint(columns, size=3)] = np.nan
    rows[5, np.random.randint(columns, size=3)] = np.inf
    rows[6, np.random.randint(columns, size=3)] = 50.0
    rows[7] = np.where(np.random.standard_normal(columns) > 0, 0.0, -0.0)
    for some in (rows, rows[:1], rows[:0]):
        indices, values = cpu_elementwise.argmax(some)
        np.testing.assert_array_equal(indices, some.argmax(1))
        np.testing.assert_array_equal(values, some.max(1))


@pytest.mark.parametrize("kind", [Q.Q8_0, Q.Q4_1])
@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 700])
def test_the_head_tells_what_argmax_finds(vocabulary: int, kind: Q, threads: int) -> None:
    """However many rows are in the last of its tiles and groups; with NaN and equal logits; logits wanted or not."""
    width = -(-vocabulary // 32) * 32
    linear = PackedLinear(pack_quantized([gguf_weight(kind, vocabulary, 64)]))
    team = cpu_team.cpu_team()
    for rows in (*range(1, 10), 15, 16, 17, 31, 47, 48, 49, 63, 95, 111):
        x = torch.randn(rows, 64)
        x[np.random.randint(rows)] = 0
        if rows > 1:
            x[np.random.randint(rows)] = math.nan
        rounded = torch.empty(rounded_bytes(rows, 64), dtype=torch.uint8)
        given = (rows, x.data_ptr(), 64, 2, rounded.data_ptr(), linear.weight.form.offset)
        team.run(kernel("linear:quantize"), given)
        expected = linear(x).numpy()
        for wanted in (True, False):
            logits, largest = torch.empty(rows, width), torch.empty(largest_bytes(rows, width) // 4)
            indices, values = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
            out = logits.data_ptr() if wanted else 0
            team.run(*linear.telling_product(rows, rounded.data_ptr(), out, largest.data_ptr()))
            found = indices.data_ptr(), values.data_ptr()
            team.run(kernel("largest:of_chunks"), (rows, largest.data_ptr(), width // 32, *found))
            if wanted:
                np.testing.assert_array_equal(logits[:, :vocabulary], expected)
            np.testing.assert_array_equal(indices, expected.argmax(1))
            np.testing.assert_array_equal(values, expected.max(1))


@pytest.mark.parametrize("dim", [16, 64, 80])
def test_rotate(dim: int, threads: int) -> None:
    x = torch.randn(50, 9, dim)[:, 2:7]
    angles = torch.randn(50, 1, dim // 2)
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    torch.testing.assert_close(cpu_elementwise.rotate(x, cos, sin), expected, rtol=1e-5, atol=1e-5)


def test_a_team_of_python_threads_computes_the_same(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    linear = PackedLinear(pack_floats(torch.randn(300, 64)))
    x = torch.randn(60, 64)
    expected = linear(x)
    plain = cpu_team.Team(native=False)
    monkeypatch.setattr(linear, "_team", plain)
    assert torch.equal(linear(x), expected)
    plain.close()
