"""Small fused kernels around attention and the MLP. One launch each; every value is read once and written once.
Reductions and products are float32, results round once to the tensor's dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine_core.kernels.triton_device import chained


@triton.jit
def _rms_norm(x, weight, out, eps, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < K
    w = tl.load(weight + k, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    raw = tl.load(x + row * K + k, mask=inside, other=0.0)
    v = raw.to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, 0) / K + eps)
    tl.store(out + row * K + k, ((v * scale).to(raw.dtype).to(tl.float32) * w).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight; x [rows, hidden]."""
    rows, hidden = x.shape
    out = torch.empty_like(x)
    pdl = chained(out.device)
    block = triton.next_power_of_2(hidden)
    _rms_norm[(rows,)](x, weight, out, eps, hidden, block, pdl, num_warps=4 if block <= 2048 else 8, launch_pdl=pdl)
    return out


@triton.jit
def _silu_mul(gate_up, out, N, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    g = tl.load(gate_up + row * 2 * N + n, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gate_up + row * 2 * N + N + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + n, (g / (1 + tl.exp(-g)) * u).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [rows, 2 * n] laid out as gate then up; returns [rows, n]."""
    rows, n2 = gate_up.shape
    n = n2 // 2
    out = torch.empty(rows, n, dtype=gate_up.dtype, device=gate_up.device)
    pdl = chained(out.device)
    block = min(1024, triton.next_power_of_2(n))
    _silu_mul[(rows, triton.cdiv(n, block))](gate_up, out, n, block, pdl, num_warps=4, launch_pdl=pdl)
    return out


@triton.jit
def _rope_write_kv(
    qkv,
    key_cache,
    value_cache,
    q_norm,
    k_norm,
    cos_sin,
    positions,
    slots,
    eps,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    QK_NORM: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """`EARLY`: what does not depend on the QKV product is asked for before the wait for it, which helps where programs
    are few. Where there are waves of them, the wait is over, and QKV's own latency is what should begin at once."""
    HALF: tl.constexpr = D // 2
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    inside = (i < HALF) & (head < HQ + 2 * HKV)
    src = qkv + token * (HQ + 2 * HKV) * D + head * D + i
    if not EARLY:
        if PDL:
            gdc_launch_dependents()
            gdc_wait()
        a = tl.load(src, mask=inside, other=0.0)
        b = tl.load(src + HALF, mask=inside, other=0.0)
    slot = tl.load(slots + token).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    c = tl.load(cos_sin + position * D + i, mask=i < HALF, other=0.0)
    s = tl.load(cos_sin + position * D + HALF + i, mask=i < HALF, other=0.0)
    is_key = (head >= HQ) & (head < HQ + HKV)
    is_value = head >= HQ + HKV
    if QK_NORM:
        half = i < HALF
        qa = tl.load(q_norm + i, mask=half, other=0.0)
        qb = tl.load(q_norm + HALF + i, mask=half, other=0.0)
        ka = tl.load(k_norm + i, mask=half, other=0.0)
        kb = tl.load(k_norm + HALF + i, mask=half, other=0.0)
        wa = tl.where(is_key, ka, qa).to(tl.float32)
        wb = tl.where(is_key, kb, qb).to(tl.float32)
    if EARLY:
        if PDL:
            gdc_launch_dependents()
            gdc_wait()
        a = tl.load(src, mask=inside, other=0.0)
        b = tl.load(src + HALF, mask=inside, other=0.0)
    af = a.to(tl.float32)
    bf = b.to(tl.float32)
    if QK_NORM:
        scale = tl.rsqrt((tl.sum(af * af, 1) + tl.sum(bf * bf, 1)) / D + eps)[:, None]
        af = (af * scale).to(a.dtype).to(tl.float32) * wa
        bf = (bf * scale).to(a.dtype).to(tl.float32) * wb
    ra = tl.where(is_value, a, (af * c - bf * s).to(a.dtype))
    rb = tl.where(is_value, b, (bf * c + af * s).to(a.dtype))
    tl.store(src, ra, mask=inside & ~is_value)
    tl.store(src + HALF, rb, mask=inside & ~is_value)
    at = slot * HKV * D + i
    key = key_cache + at + (head - HQ) * D
    tl.store(key, ra, mask=inside & is_key)
    tl.store(key + HALF, rb, mask=inside & is_key)
    value = value_cache + at + (head - HQ - HKV) * D
    tl.store(value, ra, mask=inside & is_value)
    tl.store(value + HALF, rb, mask=inside & is_value)


def rope_write_kv(
    qkv: torch.Tensor,
    cache: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> None:
    """QK-norm (if given) and RoPE of Q and K in place, K and V into their slots: one pass over `qkv`.

    qkv [tokens, (heads + 2 * kv_heads) * head_dim]; cache [2, blocks, block_size, kv_heads, head_dim];
    cos_sin float32 [positions, head_dim], cosines then sines; positions, slots int32 [tokens].
    """
    tokens = qkv.shape[0]
    pdl = chained(qkv.device)
    kv_heads, dim = cache.shape[-2:]
    norm = q_norm is not None
    heads = 4 if tokens <= 64 else 16  # few tokens: many small programs; many tokens: fewer, larger ones
    _rope_write_kv[(tokens, triton.cdiv(num_heads + 2 * kv_heads, heads))](
        qkv,
        cache[0],
        cache[1],
        q_norm if norm else qkv,
        k_norm if norm else qkv,
        cos_sin,
        positions,
        slots,
        eps,
        num_heads,
        kv_heads,
        dim,
        triton.next_power_of_2(dim // 2),
        heads,
        norm,
        tokens <= 64,
        pdl,
        num_warps=1 if heads == 4 else 4,
        launch_pdl=pdl,
    )
