"""Attention on paged KV with our own kernels: which one runs, in which shape, and over how many programs."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton

from engine_core.attention.base import AttentionSpec
from engine_core.kernels.triton_device import chained
from engine_core.kernels.triton_fused_decode import _attend_fused
from engine_core.kernels.triton_paged_decode import _attend, _combine
from engine_core.kernels.triton_paged_prefill import _prefill

LOG2E = math.log2(math.e)
NO_WINDOW = 1 << 30


def is_fused(rows: int, spec: AttentionSpec) -> bool:
    """Whether latency counts more than bytes, and the fused kernel wins: at fewer rows the more its one warp has to do
    for each token, which is the query heads of a KV head."""
    return rows <= (8 if spec.num_heads // spec.num_kv_heads * spec.head_dim <= 256 else 1)


def _splits(tiles: int, programs: int, wanted: int) -> int:
    return 1 << (max(1, min(tiles, wanted // programs, 128)).bit_length() - 1)


def decode_splits(rows: int, longest: int, spec: AttentionSpec, window: int | None = None) -> int:
    """Over how many programs `decode` spreads the KV of a sequence, a power of two: enough to fill the card, none
    empty."""
    if is_fused(rows, spec):
        return _splits(-(-min(longest, window or longest) // 16), rows * spec.num_kv_heads, 1024)
    return paged_splits(rows, longest, spec, window)


def paged_splits(rows: int, longest: int, spec: AttentionSpec, window: int | None = None) -> int:
    """The same for `paged_decode`."""
    return _splits(-(-min(longest, window or longest) // 64), rows * spec.num_kv_heads, 528)


def decode(
    qkv: torch.Tensor,
    cache: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    order: torch.Tensor,
    spec: AttentionSpec,
    splits: int,
    window: int | None = None,
) -> torch.Tensor:
    """One new token per row: QK-norm, RoPE, the KV write and attention to all before it, or to the last `window` tokens
    with itself. Returns [rows, heads * head_dim].

    `order`: int32 [rows], the rows from the longest to the shortest. Any order is right, this one is the fastest.
    """
    rows = qkv.shape[0]
    out = torch.empty(rows, spec.num_heads * spec.head_dim, dtype=qkv.dtype, device=qkv.device)
    if not is_fused(rows, spec):
        rope = Rope(q_norm, k_norm, eps, cos_sin)
        paged_decode(qkv, cache, tables, slots, lengths, out, spec, splits, window, order, rope)
        return out
    dim = triton.next_power_of_2(spec.head_dim)
    partial, log_sums = _workspace(rows, splits, spec)
    pdl = chained(out.device)
    norm = q_norm is not None
    _attend_fused[(spec.num_kv_heads * splits, rows)](
        qkv,
        cache[0],
        cache[1],
        q_norm if norm else qkv,
        k_norm if norm else qkv,
        cos_sin,
        tables,
        slots,
        lengths,
        partial,
        log_sums,
        out,
        spec.scale * LOG2E,
        eps,
        tables.stride(0),
        splits,
        window or NO_WINDOW,
        spec.num_heads,
        spec.num_kv_heads,
        spec.block_size,
        spec.head_dim,
        dim,
        max(1, 256 // dim),
        8,
        norm,
        splits == 1,
        pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    _merge(partial, log_sums, out, rows, splits, spec)
    return out


class Rope(NamedTuple):
    """What turns a QKV product into q, k, v."""

    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float
    cos_sin: torch.Tensor


def paged_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    spec: AttentionSpec,
    splits: int,
    window: int | None = None,
    order: torch.Tensor | None = None,
    rope: Rope | None = None,
) -> None:
    """q [rows, at least heads * head_dim]: rotated (a view of qkv will do), its K and V already in the cache; or with
    `rope` the QKV product itself. `order` as for `decode`."""
    rows = q.shape[0]
    dim = triton.next_power_of_2(spec.head_dim)
    partial, log_sums = _workspace(rows, splits, spec)
    pdl = chained(out.device)
    group = max(16, triton.next_power_of_2(spec.num_heads // spec.num_kv_heads))
    norm = rope is not None and rope.q_norm is not None
    _attend[(spec.num_kv_heads, splits, rows)](
        q,
        cache[0],
        cache[1],
        rope.q_norm if rope is not None and rope.q_norm is not None else q,
        rope.k_norm if rope is not None and rope.k_norm is not None else q,
        rope.cos_sin if rope is not None else log_sums,
        tables,
        slots,
        lengths,
        order if order is not None else slots,
        partial,
        log_sums,
        out,
        spec.scale * LOG2E,
        rope.eps if rope is not None else 0.0,
        q.stride(0),
        tables.stride(0),
        splits,
        window or NO_WINDOW,
        spec.num_heads,
        spec.num_kv_heads,
        spec.block_size,
        64,
        spec.head_dim,
        dim,
        group,
        splits == 1,
        window is not None,
        order is not None,
        rope is not None,
        norm,
        3 if dim <= 128 else 2,
        pdl,
        num_warps=2,
        launch_pdl=pdl,
    )
    _merge(partial, log_sums, out, rows, splits, spec)


def _workspace(rows: int, splits: int, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor]:
    parts = rows * spec.num_heads * splits if splits > 1 else 1
    device = spec.device
    return torch.empty(parts * spec.head_dim, dtype=torch.float32, device=device), torch.empty(
        parts, dtype=torch.float32, device=device
    )


def _merge(
    partial: torch.Tensor, log_sums: torch.Tensor, out: torch.Tensor, rows: int, splits: int, spec: AttentionSpec
) -> None:
    if splits > 1:
        pdl = chained(out.device)
        dim = triton.next_power_of_2(spec.head_dim)
        _combine[(rows * spec.num_heads,)](
            partial, log_sums, out, splits, splits, spec.head_dim, dim, pdl, num_warps=1, launch_pdl=pdl
        )


class _PrefillShape(NamedTuple):
    rows: int  # query tokens of a program times the heads of a group, padded
    keys: int  # per tile
    stages: int


def _prefill_shape(spec: AttentionSpec) -> _PrefillShape:
    small = spec.head_dim <= 128
    if spec.dtype == torch.float32:
        # Exact products are plain multiply-adds, unrolled: at the other sizes the compiler takes minutes.
        return _PrefillShape(32, 32, 2) if small else _PrefillShape(16, 32, 1)
    return _PrefillShape(128, 64, 3) if small else _PrefillShape(64, 64, 2)


def query_tile(spec: AttentionSpec) -> int:
    """Query tokens per program of the prefill kernel."""
    group: int = triton.next_power_of_2(spec.num_heads // spec.num_kv_heads)
    return max(1, _prefill_shape(spec).rows // group)


def paged_prefill(
    qkv: torch.Tensor,
    cache: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    query_starts: torch.Tensor,
    lengths: torch.Tensor,
    tile_rows: torch.Tensor,
    tile_starts: torch.Tensor,
    out: torch.Tensor,
    spec: AttentionSpec,
    window: int | None = None,
) -> None:
    """Rows with several query tokens each, causal over their context or a window of it; K and V already in the cache.

    Writes `out` [tokens, heads * head_dim] for the tokens of the rows that have tiles.
    """
    heads, kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    dim, shape = triton.next_power_of_2(head_dim), _prefill_shape(spec)
    _prefill[(kv_heads, tile_rows.shape[0])](
        qkv,
        cache[0],
        cache[1],
        tables,
        slots,
        query_starts,
        lengths,
        tile_rows,
        tile_starts,
        out,
        spec.scale * LOG2E,
        qkv.stride(0),
        tables.stride(0),
        window or NO_WINDOW,
        heads,
        kv_heads,
        spec.block_size,
        query_tile(spec),
        shape.keys,
        head_dim,
        dim,
        triton.next_power_of_2(heads // kv_heads),
        window is not None,
        shape.stages,
        num_warps=4,
    )
