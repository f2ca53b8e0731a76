"""Each Triton kernel against plain torch in float32: odd shapes, poisoned outputs, fresh random inputs.

On a GPU the kernels run compiled. Without one they run in Triton's interpreter, on shapes small enough for it.
"""

from __future__ import annotations

import itertools
import math
import secrets

import pytest
import torch

from engine_core.attention.base import AttentionSpec
from engine_core.kernels import triton_attention, triton_gemm, triton_gemv, triton_pointwise, triton_step
from engine_core.layers.norm import RMSNorm

GPU = torch.cuda.is_available()  # if not, tests/conftest.py has chosen the interpreter
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPES = [torch.bfloat16, torch.float16] if GPU else [torch.float16]  # the interpreter gets bf16 products wrong
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
NAN = float("nan")


@pytest.fixture(autouse=True)
def seed() -> int:
    value = secrets.randbits(31)
    print(f"seed {value}")
    torch.manual_seed(value)
    return value


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = float((actual.double() - expected.double()).norm() / expected.double().norm())
    assert error < TOLERANCE[dtype], f"relative error {error}"


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps) * weight.float()


def product(x: torch.Tensor, weight: torch.Tensor, gated: bool) -> torch.Tensor:
    y = x.float() @ weight.float().T
    if not gated:
        return y
    gate, up = y.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize(("rows", "n", "k"), [(1, 10, 576), (2, 33, 512), (1, 8, 100), (2, 16, 1536)])
@pytest.mark.parametrize("gated", [False, True])
def test_gemv_with_its_neighbours(rows: int, n: int, k: int, gated: bool, dtype: torch.dtype) -> None:
    x, weight = random(rows, k, dtype=dtype), random(n * (1 + gated), k, dtype=dtype, scale=0.1)
    norm = RMSNorm(random(k, dtype=dtype), 1e-5)
    bias = None if gated else random(n, dtype=dtype)
    out = triton_gemv.gemv(x, weight, bias, norm=norm, gated=gated)
    expected = product(rms(x, norm.weight, 1e-5), weight, gated)
    close(out, expected if bias is None else expected + bias.float(), dtype)
    if not gated:
        residual = random(rows, n, dtype=dtype)
        out = triton_gemv.gemv(x, weight, residual=residual, dtype=torch.float32)
        close(out, product(x, weight, False) + residual.float(), dtype)


@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [
        *[(3, 40, 576), (8, 70, 512), (16, 64, 2048), (30, 100, 2100), (33, 64, 256), (40, 2100, 64), (130, 2100, 64)],
        (36, 2100, 4100),
    ],
)
@pytest.mark.parametrize("gated", [False, True])
def test_gemm_of_few_rows_with_its_neighbours(rows: int, n: int, k: int, gated: bool, dtype: torch.dtype) -> None:
    x, weight = random(rows, k, dtype=dtype), random(n * (1 + gated), k, dtype=dtype, scale=0.1)
    assert triton_gemm.suits(rows, weight, gated)
    residual = None if gated else random(rows, n, dtype=dtype)
    for _ in range(2):  # twice: the counters of split products must be back at 0
        out = triton_gemm.gemm(x, weight, residual=residual, gated=gated)
        expected = product(x, weight, gated)
        close(out, expected if residual is None else expected + residual.float(), dtype)


@pytest.mark.parametrize(("rows", "k"), [(33, 72), (64, 1100)])
def test_gemm_of_a_head(rows: int, k: int, dtype: torch.dtype) -> None:
    x, weight = random(rows, k, dtype=dtype), random(32800, k, dtype=dtype, scale=0.1)
    assert triton_gemm.suits(rows, weight)
    close(triton_gemm.gemm(x, weight, dtype=torch.float32), product(x, weight, False), dtype)


@pytest.mark.parametrize(("rows", "width"), [(1, 100), (3, 576), (70, 48)])
def test_norm_and_silu(rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = random(rows, width, dtype=dtype, scale=3), random(width, dtype=dtype)
    close(triton_pointwise.rms_norm(x, weight, 1e-5), rms(x, weight, 1e-5), dtype)
    gate, up = x[:, : width // 2], x[:, width // 2 :]
    expected = torch.nn.functional.silu(gate.float()) * up.float()
    close(triton_pointwise.silu_mul(x.contiguous()), expected, dtype)


HEADS = [(4, 2, 64), (6, 2, 96), (3, 3, 128), (9, 3, 64), (2, 1, 256)]


class Pool:
    """Sequences of some lengths in a paged pool, with block tables in random order."""

    def __init__(self, heads: tuple[int, int, int], lengths: list[int], dtype: torch.dtype) -> None:
        num_heads, kv_heads, dim = heads
        self.spec = AttentionSpec(1, num_heads, kv_heads, dim, 16, dtype, DEVICE)
        self.lengths, width = lengths, -(-max(lengths) // 16)
        rows = len(lengths)
        self.cache = random(2, rows * width + 1, 16, kv_heads, dim, dtype=dtype)
        self.tables = (torch.randperm(rows * width, device=DEVICE) + 1).view(rows, width).int()
        self.slots = torch.randperm(rows, device=DEVICE).int()  # row i of a step uses table slots[i]
        self.length = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        angles = torch.arange(max(lengths), device=DEVICE)[:, None] * 0.5 ** torch.arange(dim // 2, device=DEVICE)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), -1).float()

    def slot_of(self, row: int, position: int) -> int:
        return int(self.tables[int(self.slots[row]), position // 16]) * 16 + position % 16

    def context(self, cache: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a row, float32 [length, heads, dim], repeated for the query heads."""
        blocks = cache[:, self.tables[int(self.slots[row])].long()]
        k, v = blocks.flatten(1, 2)[:, : self.lengths[row]].float()
        repeat = self.spec.num_heads // self.spec.num_kv_heads
        return k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)

    def rotated(self, qkv: torch.Tensor, positions: list[int], norms: list[torch.Tensor] | None) -> torch.Tensor:
        """float32 [tokens, heads + 2 * kv_heads, dim] after QK-norm and RoPE of Q and K."""
        s = self.spec
        x = qkv.float().view(len(positions), -1, s.head_dim).clone()
        parts = [(0, s.num_heads), (s.num_heads, s.num_heads + s.num_kv_heads)]
        for index, (first, last) in enumerate(parts):
            part = x[:, first:last]
            if norms is not None:
                part = rms(part, norms[index], 1e-6)
            cos, sin = self.cos_sin[positions][:, None].chunk(2, -1)
            a, b = part.chunk(2, -1)
            x[:, first:last] = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        return x

    def attend(
        self, q: torch.Tensor, cache: torch.Tensor, row: int, position: int, window: int | None = None
    ) -> torch.Tensor:
        """q [heads, dim] at `position` over everything up to it, or the last `window` of it."""
        k, v = self.context(cache, row)
        seen = slice(0 if window is None else max(0, position + 1 - window), position + 1)
        k, v = k[seen], v[seen]
        scores = torch.einsum("hd,thd->ht", q, k) / math.sqrt(self.spec.head_dim)
        return torch.einsum("ht,thd->hd", scores.softmax(-1), v).flatten()


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("tokens", [5, 70])
def test_rope_and_kv_write(heads: tuple[int, int, int], norm: bool, tokens: int, dtype: torch.dtype) -> None:
    pool = Pool(heads, [20, 100], dtype)
    num_heads, kv_heads, dim = heads
    qkv = random(tokens, (num_heads + 2 * kv_heads) * dim, dtype=dtype)
    norms = [random(dim, dtype=dtype), random(dim, dtype=dtype)] if norm else None
    positions = torch.randint(0, 20, (tokens,)).tolist()
    slots = torch.randperm(120)[:tokens]
    expected = pool.rotated(qkv, positions, norms)
    cache = torch.full_like(pool.cache, NAN)
    where = torch.tensor(positions, dtype=torch.int32, device=DEVICE)
    q_norm, k_norm = norms or (None, None)
    at = slots.int().to(DEVICE)
    triton_pointwise.rope_write_kv(qkv, cache, pool.cos_sin, where, at, num_heads, q_norm, k_norm, 1e-6)
    close(qkv.view(tokens, -1, dim), expected, dtype)
    keys, values = cache.flatten(1, 2)[:, slots.to(DEVICE)]
    close(keys, expected[:, num_heads : num_heads + kv_heads], dtype)
    close(values, expected[:, num_heads + kv_heads :], dtype)
    assert int((~cache.isnan()).sum()) == 2 * tokens * kv_heads * dim  # nothing else was touched


def decode_cases() -> list[tuple[tuple[int, int, int], bool, int, int]]:
    """heads, QK-norm, rows, splits. 9 rows are above the number where the fused kernel gives way, for large groups of
    large heads 2 are. The interpreter gets three for each shape of heads, which cover every pair of choices that
    matters to a kernel."""
    if GPU:
        return list(itertools.product(HEADS, [False, True], [1, 5, 9], [1, 4]))
    cases = []
    for index, heads in enumerate(HEADS):
        odd = index % 2 == 1
        few = 3 if heads[0] // heads[1] * heads[2] <= 256 else 1
        cases += [(heads, odd, few, 2), (heads, not odd, few, 1), (heads, False, 9, 4 if odd else 1)]
    return cases


@pytest.mark.parametrize(("heads", "norm", "rows", "splits"), decode_cases(), ids=str)
def test_decode(heads: tuple[int, int, int], norm: bool, rows: int, splits: int, dtype: torch.dtype) -> None:
    check_decode(heads, norm, rows, splits, None, dtype)


# One token, less than a tile (16 and 64 tokens), on and off its borders, more than a tile, more than the context.
WINDOWS = (1, 7, 16, 17, 33, 64, 65, 200)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("rows", "splits"), [(3, 1), (3, 4), (9, 1), (9, 4)])
def test_decode_in_a_window(rows: int, splits: int, window: int, dtype: torch.dtype) -> None:
    check_decode((4, 2, 64), False, rows, splits, window, dtype)


def check_decode(
    heads: tuple[int, int, int], norm: bool, rows: int, splits: int, window: int | None, dtype: torch.dtype
) -> None:
    lengths = ([2, 15, 64, 33, 1, 16, 17, 70, 130] if GPU else [2, 15, 64, 33, 16, 20, 1, 17, 70])[-rows:]
    pool = Pool(heads, lengths, dtype)
    num_heads, kv_heads, dim = heads
    qkv = random(rows, (num_heads + 2 * kv_heads) * dim, dtype=dtype)
    norms = [random(dim, dtype=dtype), random(dim, dtype=dtype)] if norm else None
    positions = [length - 1 for length in lengths]
    turned = pool.rotated(qkv, positions, norms)
    cache = pool.cache.clone()
    for row, position in enumerate(positions):
        cache.flatten(1, 2)[:, pool.slot_of(row, position)] = turned[row, num_heads:].view(2, kv_heads, dim).to(dtype)
    q_norm, k_norm = norms or (None, None)
    order = torch.randperm(rows).int().to(DEVICE)
    out = triton_attention.decode(
        qkv, pool.cache, q_norm, k_norm, 1e-6, pool.cos_sin, pool.tables, pool.slots, pool.length, order,
        pool.spec, splits, window,
    )  # fmt: skip
    expected = [pool.attend(turned[row, :num_heads], cache, row, at, window) for row, at in enumerate(positions)]
    close(out, torch.stack(expected), dtype)
    close(pool.cache, cache, dtype)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)  # float32 has tiles of its own
def test_prefill_of_chunks(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    check_prefill(heads, [1, 5, 33, 40], [0, 16, 100, 3], None, dtype)


@pytest.mark.parametrize("window", WINDOWS)
def test_prefill_of_chunks_in_a_window(window: int, dtype: torch.dtype) -> None:
    """Chunks of one tile of queries and of several, at the start of a prompt and after contexts of several tiles."""
    check_prefill((4, 2, 64), [1, 5, 33, 150], [130, 16, 300, 0], window, dtype)


def check_prefill(
    heads: tuple[int, int, int], counts: list[int], contexts: list[int], window: int | None, dtype: torch.dtype
) -> None:
    pool = Pool(heads, [count + context for count, context in zip(counts, contexts, strict=True)], dtype)
    num_heads, kv_heads, dim = heads
    starts = [0, *itertools.accumulate(counts)]
    qkv = random(sum(counts), (num_heads + 2 * kv_heads) * dim, dtype=dtype)
    tile = triton_attention.query_tile(pool.spec)
    tiles = [(row, first) for row, count in enumerate(counts) for first in range(0, count, tile)]
    rows, firsts = (torch.tensor(part, dtype=torch.int32, device=DEVICE) for part in zip(*tiles, strict=True))
    out = torch.full((sum(counts), num_heads * dim), NAN, dtype=dtype, device=DEVICE)
    query_starts = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    triton_attention.paged_prefill(
        qkv, pool.cache, pool.tables, pool.slots, query_starts, pool.length, rows, firsts, out, pool.spec, window
    )
    q = qkv.float().view(sum(counts), -1, dim)[:, :num_heads]
    expected = [
        pool.attend(q[starts[row] + i], pool.cache, row, contexts[row] + i, window)
        for row, count in enumerate(counts)
        for i in range(count)
    ]
    close(out, torch.stack(expected), dtype)


def test_a_step_begins_with_last_tokens_or_given_ones(dtype: torch.dtype) -> None:
    table = random(50, 72, dtype=dtype)
    last = torch.randint(0, 50, (6,), device=DEVICE).int()
    tables = torch.arange(60, device=DEVICE).int().view(6, 10) + 100
    slots = torch.tensor([4, 0, 3], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([1, 33, 16], dtype=torch.int32, device=DEVICE)
    new = torch.tensor([-1, 7, -1], dtype=torch.int32, device=DEVICE)
    x = triton_step.begin_step(slots, lengths, new, tables, last, table, 16)
    assert torch.equal(x, table[last[slots.long()].long()])
    assert int(tables[0, 2]) == 7
    ids = torch.tensor([3, -1, 49, -1], dtype=torch.int32, device=DEVICE)
    owner = torch.tensor([0, 5, 0, 2], dtype=torch.int32, device=DEVICE)
    x = triton_step.embed(ids, owner, last, table)
    assert torch.equal(x, table[[3, int(last[5]), 49, int(last[2])]])
