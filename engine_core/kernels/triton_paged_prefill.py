"""Paged varlen attention for prompts: query chunks of several sequences against their block tables, causal.

A program owns BLOCK_M query rows of one KV head's group: the G query heads of a KV head are stacked as rows, so a K/V
tile is read once for all of them. Full tiles run without a mask; only the tiles on the diagonal, the last one and those
on the edge of a sliding window have it. Tiles before every row's window are not read.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2E = math.log2(math.e)


@triton.jit
def _tile(
    acc,
    total,
    peak,
    qv,
    key_cache,
    value_cache,
    tables,
    row_table,
    start_n,
    q_at,
    length,
    head,
    scale2,
    window,
    HKV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
):
    at = start_n + tl.arange(0, BLOCK_N)
    d = tl.arange(0, DP)
    if MASKED:
        block = tl.load(tables + row_table + at // BLOCK_SIZE, mask=at < length, other=0).to(tl.int64)
    else:
        block = tl.load(tables + row_table + at // BLOCK_SIZE).to(tl.int64)
    offset = ((block * BLOCK_SIZE + at % BLOCK_SIZE) * HKV + head) * D
    if MASKED or DP != D:
        inside = (at < length)[:, None] & (d < D)[None, :]
        k = tl.load(key_cache + offset[:, None] + d[None, :], mask=inside, other=0.0)
        v = tl.load(value_cache + offset[:, None] + d[None, :], mask=inside, other=0.0)
    else:
        k = tl.load(key_cache + offset[:, None] + d[None, :])
        v = tl.load(value_cache + offset[:, None] + d[None, :])
    score = tl.dot(qv, tl.trans(k), input_precision="ieee") * scale2
    if MASKED:
        keep = at[None, :] <= q_at[:, None]
        if WINDOW:
            keep = keep & (at[None, :] > q_at[:, None] - window)
        score = tl.where(keep, score, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(score, 1))
    safe = tl.where(new_peak > float("-inf"), new_peak, 0.0)
    alpha = tl.exp2(peak - safe)
    p = tl.exp2(score - safe[:, None])
    total = total * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return acc, total, new_peak


@triton.jit(do_not_specialize=["table_stride", "window"])
def _prefill(
    q,
    key_cache,
    value_cache,
    tables,
    table_rows,
    query_starts,
    lengths,
    tile_seq,
    tile_start,
    out,
    scale2,
    q_stride,
    table_stride,
    window,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QTILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    GP: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
):
    G: tl.constexpr = HQ // HKV
    BLOCK_M: tl.constexpr = QTILE * GP
    # long tiles first: the last programs to start are the short ones
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    head = tl.program_id(0)
    seq = tl.load(tile_seq + tile)
    q0 = tl.load(query_starts + seq)
    num_q = tl.load(query_starts + seq + 1) - q0
    length = tl.load(lengths + seq)
    context = length - num_q  # tokens before the chunk
    t0 = tl.load(tile_start + tile)
    m = tl.arange(0, BLOCK_M)
    qi = t0 + m // GP
    g = m % GP
    d = tl.arange(0, DP)
    live = (qi < num_q) & (g < G)
    q_at = context + qi
    row = (q0 + qi).to(tl.int64) * HQ + head * G + g
    q_row = q + (q0 + qi).to(tl.int64) * q_stride + (head * G + g) * D
    qv = tl.load(q_row[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, DP), tl.float32)
    end = tl.minimum(context + t0 + QTILE, length)
    full = (context + t0 + 1) // BLOCK_N * BLOCK_N  # keys every row of the tile may see
    begin = 0
    table = tl.load(table_rows + seq).to(tl.int64) * table_stride
    if WINDOW:
        edge = tl.maximum(context + t0 + 1 - window, 0) // BLOCK_N * BLOCK_N  # where the first row's window begins
        # The last row's window holds every key from here on.
        begin = tl.minimum(tl.cdiv(tl.maximum(end - window, 0), BLOCK_N) * BLOCK_N, full)
        for n in tl.range(edge, begin, BLOCK_N, num_stages=STAGES):
            acc, total, peak = _tile(
                acc,
                total,
                peak,
                qv,
                key_cache,
                value_cache,
                tables,
                table,
                n,
                q_at,
                length,
                head,
                scale2,
                window,
                HKV,
                BLOCK_SIZE,
                BLOCK_N,
                D,
                DP,
                True,
                True,
            )
    for n in tl.range(begin, full, BLOCK_N, num_stages=STAGES):
        acc, total, peak = _tile(
            acc,
            total,
            peak,
            qv,
            key_cache,
            value_cache,
            tables,
            table,
            n,
            q_at,
            length,
            head,
            scale2,
            window,
            HKV,
            BLOCK_SIZE,
            BLOCK_N,
            D,
            DP,
            False,
            False,
        )
    for n in tl.range(full, end, BLOCK_N, num_stages=STAGES):
        acc, total, peak = _tile(
            acc,
            total,
            peak,
            qv,
            key_cache,
            value_cache,
            tables,
            table,
            n,
            q_at,
            length,
            head,
            scale2,
            window,
            HKV,
            BLOCK_SIZE,
            BLOCK_N,
            D,
            DP,
            True,
            WINDOW,
        )
    value = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + row[:, None] * D + d[None, :], value.to(out.dtype.element_ty), mask=live[:, None] & (d < D)[None, :])
