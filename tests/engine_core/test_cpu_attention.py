"""The CPU's attention against plain torch in float64, and bit for bit against itself in other batches."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from engine_core.attention.base import AttentionSpec
from engine_core.attention.cpu import CpuAttention
from engine_core.attention.torch import TorchAttention
from engine_core.batch import ForwardBatch
from engine_core.kernels.cpu_cache import dot_width

pytestmark = pytest.mark.usefixtures("seed", "poisoned")


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).abs().max() / expected.abs().max())


def rounded_heads(x: torch.Tensor, size: int) -> torch.Tensor:
    """x [tokens, heads, dim] as int8 with a scale for `size` numbers each; float64."""
    blocks = x.float().reshape(-1, size)
    largest = blocks.abs().amax(1, keepdim=True)
    inverse = torch.full_like(largest, 127) / largest
    integers = (blocks * inverse.nan_to_num(0, 0, 0)).round()
    return ((largest * np.float32(1 / 127)).double() * integers.double()).reshape(x.shape)


def spec(
    heads: int, kv_heads: int, dim: int, block_size: int, window: int | None = None, pool: torch.dtype | None = None
) -> AttentionSpec:
    return AttentionSpec(1, heads, kv_heads, dim, block_size, torch.float32, torch.device("cpu"), (window,), pool)


class Sequences:
    """Random sequences in one KV pool, their blocks scattered over it; fed to an attention in pieces."""

    def __init__(
        self, shape: AttentionSpec, lengths: list[int], attention: type[CpuAttention | TorchAttention] = CpuAttention
    ) -> None:
        self.shape, self.lengths = shape, lengths
        self.attention = attention(shape)
        widths = [-(-length // shape.block_size) for length in lengths]
        blocks = np.random.permutation(sum(widths) + 3).astype(np.int32)
        self.attention.allocate(len(blocks))
        self.tables = np.zeros((len(lengths), max(widths)), np.int32)
        for row, width in enumerate(widths):
            self.tables[row, :width], blocks = blocks[:width], blocks[width:]
        heads = shape.num_heads + 2 * shape.num_kv_heads
        self.qkv = [torch.randn(length, heads, shape.head_dim) for length in lengths]

    def attend(self, pieces: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Each piece is (sequence, start, stop); all of them are one step."""
        s = self.shape
        counts = np.array([stop - start for _, start, stop in pieces], np.int32)
        starts = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
        positions = np.concatenate([np.arange(start, stop) for _, start, stop in pieces])
        rows = np.repeat([sequence for sequence, _, _ in pieces], counts)
        slots = self.tables[rows, positions // s.block_size].astype(np.int64) * s.block_size + positions % s.block_size
        batch = ForwardBatch(
            token_ids=torch.zeros(len(positions), dtype=torch.int64),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(slots),
            block_tables=torch.from_numpy(self.tables[[sequence for sequence, _, _ in pieces]]),
            query_starts=starts,
            query_lens=counts,
            context_lens=np.array([stop for _, _, stop in pieces], np.int32),
            logits_rows=torch.zeros(0, dtype=torch.int64),
        )
        qkv = torch.cat([self.qkv[sequence][start:stop] for sequence, start, stop in pieces])
        q, k, v = qkv.split([s.num_heads, s.num_kv_heads, s.num_kv_heads], 1)
        self.attention.prepare(batch)
        out = self.attention(0, q, k, v, batch)
        return list(out.split(counts.tolist()))

    def expected(self, sequence: int) -> torch.Tensor:
        s = self.shape
        parts = self.qkv[sequence].split([s.num_heads, s.num_kv_heads, s.num_kv_heads], 1)
        if s.pool_dtype == torch.float16:
            parts = (parts[0], *(part.clamp(-65504, 65504).half() for part in parts[1:]))
        if s.pool_dtype == torch.int8:  # the kernels round queries that are scaled already
            q, k, v = parts
            parts = (
                rounded_heads(q * np.float32(s.scale), 32) / np.float32(s.scale),
                rounded_heads(k, 32),
                rounded_heads(v, s.head_dim),
            )
        q, k, v = (part.double().transpose(0, 1) for part in parts)
        age = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
        mask = (age >= 0) & (age < (s.window(0) or len(age)))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return out.transpose(0, 1).flatten(1)


@pytest.mark.parametrize("pool", [torch.float32, torch.float16, torch.int8])
@pytest.mark.parametrize(
    "heads",
    [
        (9, 3, 64, 16),
        (4, 4, 16, 32),
        (8, 1, 80, 16),
        (6, 2, 128, 64),
        (7, 1, 96, 16),
        (4, 2, 32, 16, 20),
        (5, 1, 256, 32, 64),
    ],
)
def test_attention_of_whole_prompts(heads: tuple[int, ...], pool: torch.dtype, threads: int) -> None:
    shape = spec(*heads[:4], *(heads[4:] or (None,)), pool)
    if pool == torch.int8 and heads[2] % 32:
        assert not CpuAttention.supports(shape)
        return
    sequences = Sequences(shape, [1, 17, 64, 150])
    for i, out in enumerate(sequences.attend([(i, 0, n) for i, n in enumerate(sequences.lengths)])):
        assert error(out, sequences.expected(i)) < 2e-6


@pytest.mark.parametrize("pool", [torch.float32, torch.float16, torch.int8])
@pytest.mark.parametrize("window", [None, 1, 33, 64, 65, 150])
def test_attention_is_the_same_in_chunks_in_decode_and_in_any_batch(
    window: int | None, pool: torch.dtype, threads: int
) -> None:
    sequences = Sequences(spec(9, 3, 64, 16, window, pool), [90, 200])
    first, second = sequences.attend([(0, 0, 90), (1, 0, 200)])
    assert error(second, sequences.expected(1)) < 2e-6
    pieces = [0, 1, 7, 64, 80, 81, 150, 199, 200]
    chunks = [sequences.attend([(1, a, b)])[0] for a, b in itertools.pairwise(pieces)]
    assert torch.equal(torch.cat(chunks), second)
    decoded = [sequences.attend([(1, 100 + i, 101 + i), (0, 40 + i, 41 + i)]) for i in range(40)]
    assert torch.equal(torch.cat([step[0] for step in decoded]), second[100:140])
    assert torch.equal(torch.cat([step[1] for step in decoded]), first[40:80])


@pytest.mark.parametrize("factor", [0.0, 1e-38, 1e-12, 1e12])
def test_int8_holds_numbers_of_any_size(factor: float) -> None:
    sequences = Sequences(spec(4, 2, 64, 16, None, torch.int8), [40])
    sequences.qkv[0][:20, 4:] *= factor
    sequences.qkv[0][:, :4] /= max(factor, 1.0)
    (out,) = sequences.attend([(0, 0, 40)])
    if factor < 1e-30:  # what is smaller than 1e-30 counts as 0
        sequences.qkv[0][:20, 4:] = 0
    expected = sequences.expected(0)
    for rows in (slice(20), slice(20, 40)):
        assert float((out[rows].double() - expected[rows]).abs().max()) <= 2e-6 * float(expected[rows].abs().max())


def test_what_half_precision_cannot_hold_becomes_its_largest() -> None:
    sequences = Sequences(spec(4, 2, 32, 16, None, torch.float16), [40])
    sequences.qkv[0][20:, 4:] *= 1e5
    sequences.qkv[0][20:, :4] *= 1e-5  # scores near 1: K counts as V does, and float32 can tell another limit
    (out,) = sequences.attend([(0, 0, 40)])
    for rows in (slice(20), slice(20, 40)):
        assert error(out[rows], sequences.expected(0)[rows]) < 2e-6
    sequences.qkv[0][3, 6] = math.nan
    (out,) = sequences.attend([(0, 0, 40)])
    assert out[3:, :64].isnan().all()
    assert out[:, 64:].isfinite().all()


@pytest.mark.parametrize(
    ("attention", "pool"), [(CpuAttention, None), (CpuAttention, torch.int8), (TorchAttention, None)]
)
def test_nan_left_in_the_pool_reaches_nobody(
    attention: type[CpuAttention | TorchAttention], pool: torch.dtype | None
) -> None:
    sequences = Sequences(spec(4, 2, 32, 16, None, pool), [40, 90], attention)
    if pool == torch.int8:
        sequences.attention.cache.fill_(-1)  # as floats, which scales are, these bits are NaN
    else:
        sequences.attention.cache.fill_(math.nan)
    parts = [[sequences.attend([(i, 0, 10)])[0]] for i in range(2)]
    for at in range(10, 40):
        for part, out in zip(parts, sequences.attend([(0, at, at + 1), (1, at, at + 1)]), strict=True):
            part.append(out)
    parts[1] += sequences.attend([(1, 40, 90)])
    for i, part in enumerate(parts):
        assert error(torch.cat(part), sequences.expected(i)) < 2e-6


@pytest.mark.parametrize(
    ("attention", "pool"), [(CpuAttention, None), (CpuAttention, torch.int8), (TorchAttention, None)]
)
@pytest.mark.parametrize("part", [0, 4, 6])  # the first head of Q, of K, of V
def test_a_rows_own_nan_is_not_hidden(
    part: int, attention: type[CpuAttention | TorchAttention], pool: torch.dtype | None
) -> None:
    sequences = Sequences(spec(4, 2, 32, 16, None, pool), [70], attention)
    sequences.qkv[0][50, part, 3] = math.nan
    out = sequences.attend([(0, 0, 70)])[0]
    assert out[50].isnan().any()
    if part:
        assert out[50:].isnan().any(1).all()
        step = sequences.attend([(0, 69, 70)])[0]
        assert step.isnan().any()


def test_large_scores_do_not_overflow() -> None:
    sequences = Sequences(spec(4, 2, 32, 16), [130])
    sequences.qkv[0] *= 40
    out = sequences.attend([(0, 0, 130)])[0]
    # Scores reach some 10,000, where float32 is off by about 1e-3, and so are the weights that come of them.
    assert error(out, sequences.expected(0)) < 2e-3


def test_attention_refuses_shapes_it_cannot_compute() -> None:
    assert CpuAttention.supports(spec(4, 2, 32, 16))
    assert not CpuAttention.supports(spec(4, 2, 24, 16))
    assert not CpuAttention.supports(spec(4, 2, 32, 8))


@pytest.mark.parametrize("width", [0, 256])
def test_scores_of_bytes_are_the_same_on_other_processors(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if width > dot_width():
        pytest.skip("this processor has no such instruction")
    sequences = Sequences(spec(9, 3, 64, 16, None, torch.int8), [90, 7])
    expected = sequences.attend([(0, 0, 90), (1, 0, 7)])
    monkeypatch.setattr("engine_core.attention.cpu.dot_width", lambda: width)
    other = CpuAttention(sequences.shape)
    other.allocate(sequences.attention.cache.shape[2])
    sequences.attention = other
    for mine, theirs in zip(sequences.attend([(0, 0, 90), (1, 0, 7)]), expected, strict=True):
        assert torch.equal(mine, theirs)
