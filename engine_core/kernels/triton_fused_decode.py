"""Decode attention for few sequences, where latency counts and not bytes: QK-norm, RoPE, the KV write and split
attention in one kernel of one-warp programs, a small combine after it.

Cached K and V, page ids and RoPE rows are asked for before the wait for the QKV product: none of them depend on it. The
new token's K and V join from registers. Each row of a tile is its own softmax, merged at the end, so nothing crosses a
warp until then.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine_core.kernels.triton_paged_decode import turn


@triton.jit
def _head(base, norm, cos, sin, same, partner, inside, eps, D: tl.constexpr, NORM: tl.constexpr):
    """One head after RMSNorm and RoPE, the same in every row of a [rows, D] tile; rounded to the input's dtype."""
    a = tl.load(base + same, mask=inside, other=0.0)
    b = tl.load(base + partner, mask=inside, other=0.0)
    wa, wb = a, b  # not read without QK-norm
    if NORM:
        wa = tl.load(norm + same, mask=inside, other=0.0)
        wb = tl.load(norm + partner, mask=inside, other=0.0)
    return turn(a, b, wa, wb, cos, sin, eps, D, NORM).to(tl.float32)


@triton.jit
def _tile(
    key_cache,
    value_cache,
    table,
    t,
    r,
    d,
    stop,
    head,
    first,
    HKV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    ks = ()
    vs = ()
    for c in tl.static_range(C):
        at = t + c * R + r
        ok = (at < stop) & (at >= first)
        block = tl.load(table + at // BLOCK_SIZE, mask=ok, other=0).to(tl.int64)
        offset = (((block * BLOCK_SIZE + at % BLOCK_SIZE) * HKV + head) * D)[:, None] + d[None, :]
        inside = ok[:, None] & (d < D)[None, :]
        ks = ks + (tl.load(key_cache + offset, mask=inside, other=0.0),)
        vs = vs + (tl.load(value_cache + offset, mask=inside, other=0.0),)
    return ks, vs


@triton.jit(do_not_specialize=["table_stride", "splits", "window"])
def _attend_fused(
    qkv,
    key_cache,
    value_cache,
    q_norm,
    k_norm,
    cos_sin,
    tables,
    table_rows,
    lengths,
    partial,
    log_sums,
    out,
    scale2,
    eps,
    table_stride,
    splits,
    window,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    QK_NORM: tl.constexpr,
    FINAL: tl.constexpr,
    PDL: tl.constexpr,
):
    G: tl.constexpr = HQ // HKV
    H: tl.constexpr = D // 2
    BT: tl.constexpr = R * C
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0) % HKV
    split = tl.program_id(0) // HKV
    seq = tl.program_id(1)
    past = tl.load(lengths + seq) - 1  # tokens before the new one
    table = tables + tl.load(table_rows + seq) * table_stride
    r = tl.arange(0, R)
    d = tl.arange(0, DP)
    same = r[:, None] * 0 + d[None, :]
    partner = r[:, None] * 0 + ((d + H) % D)[None, :]
    inside = same < D
    half = r[:, None] * 0 + (d % H)[None, :]
    cos = tl.load(cos_sin + past.to(tl.int64) * D + half)
    sin = tl.load(cos_sin + past.to(tl.int64) * D + H + half) * tl.where(d < H, -1.0, 1.0)[None, :]
    first = tl.maximum(past + 1 - window, 0)
    tile0 = first // BT
    tiles = tl.cdiv(past, BT) - tile0
    per = tl.cdiv(tiles, splits)
    t0 = (tile0 + split * per) * BT
    t1 = tl.minimum(t0 + per * BT, past)
    ks, vs = _tile(key_cache, value_cache, table, t0, r, d, t1, head, first, HKV, BLOCK_SIZE, D, DP, R, C)
    if PDL:
        gdc_wait()
    new_block = tl.load(table + past // BLOCK_SIZE).to(tl.int64)  # this step may have just been given it
    row = qkv + seq.to(tl.int64) * (HQ + 2 * HKV) * D
    k_new = _head(row + (HQ + head) * D, k_norm, cos, sin, same, partner, inside, eps, D, QK_NORM)
    v_new = tl.load(row + (HQ + HKV + head) * D + same, mask=inside, other=0.0)
    mine = (r + split) == 0
    at_new = ((new_block * BLOCK_SIZE + past % BLOCK_SIZE) * HKV + head) * D
    tl.store(key_cache + at_new + same, k_new.to(v_new.dtype), mask=inside & mine[:, None])
    tl.store(value_cache + at_new + same, v_new, mask=inside & mine[:, None])
    qs = ()
    peaks = ()
    totals = ()
    accs = ()
    for g in tl.static_range(G):
        q = _head(row + (head * G + g) * D, q_norm, cos, sin, same, partner, inside, eps, D, QK_NORM) * scale2
        qs = qs + (q,)
        peaks = peaks + (tl.where(mine, tl.sum(q * k_new, 1), float("-inf")),)
        totals = totals + (tl.where(mine, 1.0, 0.0),)
        accs = accs + (tl.where(mine[:, None], v_new.to(tl.float32), 0.0),)
    for t in range(t0, tl.maximum(t1, t0 + 1), BT):
        if t > t0:
            ks, vs = _tile(key_cache, value_cache, table, t, r, d, t1, head, first, HKV, BLOCK_SIZE, D, DP, R, C)
        peaks2 = ()
        totals2 = ()
        accs2 = ()
        for g in tl.static_range(G):
            scores = ()
            peak = peaks[g]
            for c in tl.static_range(C):
                at = t + c * R + r
                s = tl.where((at < t1) & (at >= first), tl.sum(ks[c].to(tl.float32) * qs[g], 1), float("-inf"))
                scores = scores + (s,)
                peak = tl.maximum(peak, s)
            safe = tl.where(peak > float("-inf"), peak, 0.0)
            keep = tl.exp2(peaks[g] - safe)
            total = totals[g] * keep
            acc = accs[g] * keep[:, None]
            for c in tl.static_range(C):
                p = tl.exp2(scores[c] - safe)
                total += p
                acc += p[:, None] * vs[c].to(tl.float32)
            peaks2 = peaks2 + (peak,)
            totals2 = totals2 + (total,)
            accs2 = accs2 + (acc,)
        peaks = peaks2
        totals = totals2
        accs = accs2
    for g in tl.static_range(G):
        at_row = (seq * HQ + head * G + g).to(tl.int64)
        peak = tl.max(peaks[g], 0)
        safe = tl.where(peak > float("-inf"), peak, 0.0)
        weight = tl.exp2(peaks[g] - safe)
        total = tl.sum(totals[g] * weight, 0)
        value = tl.sum(accs[g] * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
        if FINAL:
            tl.store(out + at_row * D + d, value.to(out.dtype.element_ty), mask=d < D)
        else:
            log_sum = safe + tl.log2(tl.where(total > 0, total, 1.0))
            tl.store(log_sums + at_row * splits + split, tl.where(total > 0, log_sum, float("-inf")))
            tl.store(partial + (at_row * splits + split) * D + d, value, mask=d < D)
