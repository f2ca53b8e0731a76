"""Paged decode attention: one query token per sequence against its block table, KV split over programs.

Bytes: K and V of each sequence once, from the tile where its window begins. The grid has the KV head fastest, so that
neighbouring programs read neighbouring memory. All query heads of a KV head share a program (padded to 16 rows for the
tensor cores). The number of splits is fixed by the grid, the share of a split follows the length on the device: a graph
captured at one length is right at any. Programs start in the order of the grid: `order` puts the longest sequences
first, so that the last ones to end are short.

`ROPE`: q, k, v come straight from the QKV product. The kernel norms and rotates them, writes the new token's K and V,
and joins them from registers.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = math.log2(math.e)


@triton.jit
def turn(a, b, wa, wb, cos, sin, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Heads [rows, D] after RMSNorm and RoPE, rounded to the input's dtype. `b` and `wb` are `a` and `wa` half a head
    further on; `sin` is negative in the first half."""
    dtype = a.dtype
    af = a.to(tl.float32)
    bf = b.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(af * af, 1) / D + eps)[:, None]
        af = (af * scale).to(dtype).to(tl.float32) * wa.to(tl.float32)
        bf = (bf * scale).to(dtype).to(tl.float32) * wb.to(tl.float32)
    return (af * cos + bf * sin).to(dtype)


@triton.jit(do_not_specialize=["table_stride", "splits", "window"])
def _attend(
    q,
    key_cache,
    value_cache,
    q_norm,
    k_norm,
    cos_sin,
    tables,
    table_rows,
    lengths,
    order,
    partial,
    log_sums,
    out,
    scale2,
    eps,
    q_stride,
    table_stride,
    splits,
    window,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    GP: tl.constexpr,
    FINAL: tl.constexpr,
    WINDOW: tl.constexpr,
    ORDERED: tl.constexpr,
    ROPE: tl.constexpr,
    QK_NORM: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    G: tl.constexpr = HQ // HKV
    H: tl.constexpr = D // 2
    head = tl.program_id(0)
    split = tl.program_id(1)
    seq = tl.program_id(2)
    if ORDERED:
        seq = tl.load(order + seq)
    length = tl.load(lengths + seq)
    table = tables + tl.load(table_rows + seq).to(tl.int64) * table_stride
    first = 0
    if WINDOW:
        first = tl.maximum(length - window, 0) // TILE
    cached = length - 1 if ROPE else length  # tokens that are read from the cache
    tiles = tl.cdiv(cached, TILE) - first
    per_split = tl.cdiv(tiles, splits)
    t0 = first + split * per_split
    t1 = tl.minimum(t0 + per_split, first + tiles)
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    token = tl.arange(0, TILE)
    rows = seq * HQ + head * G + g
    live = (g < G)[:, None] & (d < D)[None, :]
    if ROPE:
        one = tl.arange(0, 1)[:, None]
        same = one + d[None, :]
        partner = one + ((d + H) % D)[None, :]
        within = same < D
        angle = cos_sin + (length - 1).to(tl.int64) * D + (same % H)
        cos = tl.load(angle, mask=within, other=0.0)
        sin = tl.load(angle + H, mask=within, other=0.0) * tl.where(same < H, -1.0, 1.0)
        qa, qb, ka, kb = cos, cos, cos, cos  # not read without QK-norm
        if QK_NORM:
            qa = tl.load(q_norm + same, mask=within, other=0.0)
            qb = tl.load(q_norm + partner, mask=within, other=0.0)
            ka = tl.load(k_norm + same, mask=within, other=0.0)
            kb = tl.load(k_norm + partner, mask=within, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = q + seq.to(tl.int64) * q_stride
    q_row = row + (head * G + g)[:, None] * D
    qv = tl.load(q_row + d[None, :], mask=live, other=0.0)
    peak = tl.full((GP,), float("-inf"), tl.float32)
    total = tl.zeros((GP,), tl.float32)
    acc = tl.zeros((GP, DP), tl.float32)
    if ROPE:
        qv = turn(qv, tl.load(q_row + partner, mask=live, other=0.0), qa, qb, cos, sin, eps, D, QK_NORM)
        if split == 0:  # the new token belongs to the first split
            k_row = row + (HQ + head) * D
            k_new = tl.load(k_row + same, mask=within, other=0.0)
            k_new = turn(k_new, tl.load(k_row + partner, mask=within, other=0.0), ka, kb, cos, sin, eps, D, QK_NORM)
            v_new = tl.load(k_row + HKV * D + same, mask=within, other=0.0)
            block = tl.load(table + cached // BLOCK_SIZE).to(tl.int64)
            at_new = ((block * BLOCK_SIZE + cached % BLOCK_SIZE) * HKV + head) * D + same
            tl.store(key_cache + at_new, k_new, mask=within)
            tl.store(value_cache + at_new, v_new, mask=within)
            peak = tl.sum(qv.to(tl.float32) * k_new.to(tl.float32), 1) * scale2
            total += 1.0
            acc += v_new.to(tl.float32)
    for t in tl.range(t0, t1, num_stages=STAGES):
        at = t * TILE + token
        ok = at < cached
        if WINDOW:
            ok = ok & (at >= length - window)
        block = tl.load(table + at // BLOCK_SIZE, mask=ok, other=0).to(tl.int64)
        offset = ((block * BLOCK_SIZE + at % BLOCK_SIZE) * HKV + head) * D
        inside = ok[:, None] & (d < D)[None, :]
        k = tl.load(key_cache + offset[:, None] + d[None, :], mask=inside, other=0.0)
        v = tl.load(value_cache + offset[:, None] + d[None, :], mask=inside, other=0.0)
        score = tl.dot(qv, tl.trans(k), input_precision="ieee") * scale2
        score = tl.where(ok[None, :], score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        safe = tl.where(new_peak > float("-inf"), new_peak, 0.0)
        keep = tl.exp2(peak - safe)
        p = tl.exp2(score - safe[:, None])
        total = total * keep + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
        peak = new_peak
    some = total > 0
    safe_total = tl.where(some, total, 1.0)
    value = acc / safe_total[:, None]
    if FINAL:
        tl.store(out + rows[:, None] * D + d[None, :], value.to(out.dtype.element_ty), mask=live)
    else:
        tl.store(
            log_sums + rows * splits + split, tl.where(some, peak + tl.log2(safe_total), float("-inf")), mask=g < G
        )
        tl.store(partial + (rows * splits + split)[:, None] * D + d[None, :], value, mask=live & some[:, None])


@triton.jit(do_not_specialize=["splits"])
def _combine(partial, log_sums, out, splits, SP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    s = tl.arange(0, SP)
    d = tl.arange(0, DP)
    ls = tl.load(log_sums + row * splits + s, mask=s < splits, other=float("-inf"))
    peak = tl.max(ls, 0)
    weight = tl.exp2(ls - tl.where(peak > float("-inf"), peak, 0.0))
    some = (ls > float("-inf"))[:, None] & (d < D)[None, :]
    value = tl.load(partial + (row * splits + s)[:, None] * D + d[None, :], mask=some, other=0.0)
    total = tl.sum(weight, 0)
    result = tl.sum(value * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * D + d, result.to(out.dtype.element_ty), mask=d < D)
