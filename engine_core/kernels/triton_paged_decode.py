"""Paged decode attention: one query token per sequence against its block table, KV split over programs.

Bytes: K and V of each sequence once, from the tile where its window begins. The grid has the KV head fastest, so that
neighbouring programs read neighbouring memory. All query heads of a KV head share a program (padded to 16 rows for the
tensor cores). The number of splits is fixed by the grid, the share of a split follows the length on the device: a graph
captured at one length is right at any.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = math.log2(math.e)


@triton.jit(do_not_specialize=["table_stride", "splits", "window"])
def _attend(
    q,
    key_cache,
    value_cache,
    tables,
    table_rows,
    lengths,
    partial,
    log_sums,
    out,
    scale2,
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
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    G: tl.constexpr = HQ // HKV
    head = tl.program_id(0)
    split = tl.program_id(1)
    seq = tl.program_id(2)
    length = tl.load(lengths + seq)
    table = tables + tl.load(table_rows + seq).to(tl.int64) * table_stride
    first = 0
    if WINDOW:
        first = tl.maximum(length - window, 0) // TILE
    tiles = tl.cdiv(length, TILE) - first
    per_split = tl.cdiv(tiles, splits)
    t0 = first + split * per_split
    t1 = tl.minimum(t0 + per_split, first + tiles)
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    token = tl.arange(0, TILE)
    rows = seq * HQ + head * G + g
    live = (g < G)[:, None] & (d < D)[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    q_row = q + seq.to(tl.int64) * q_stride + (head * G + g)[:, None] * D
    qv = tl.load(q_row + d[None, :], mask=live, other=0.0)
    peak = tl.full((GP,), float("-inf"), tl.float32)
    total = tl.zeros((GP,), tl.float32)
    acc = tl.zeros((GP, DP), tl.float32)
    for t in tl.range(t0, t1, num_stages=STAGES):
        at = t * TILE + token
        ok = at < length
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
