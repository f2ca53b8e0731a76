"""Weights times a few rows, for decode: y = W f(x), with the neighbours of a linear layer fused in.

Bytes: the weight once, nothing else of size. A program owns `ROWS` output rows, one warp each, and asks for its weights
before it waits for the kernel that makes x (programmatic dependent launch), so the memory never idles between layers.
The sum of a row stays inside its warp. Norm scale is applied after the product, which is linear in it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine_core.kernels.triton_device import chained
from engine_core.layers.norm import RMSNorm


@triton.jit
def _gemv(
    x,
    weight,
    bias,
    norm,
    residual,
    out,
    eps,
    N,
    M: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    PRELOAD: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    CHUNKS: tl.constexpr = (K + 255) // 256
    RAGGED: tl.constexpr = K % 256 != 0
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    safe = tl.minimum(row, N - 1)  # a ragged last program repeats the last row and stores nothing
    k = tl.arange(0, 256)
    base = weight + safe[:, None].to(tl.int64) * K + k[None, :]
    same = row[:, None] * 0 + k[None, :]  # every warp reads all of x itself: nothing crosses shared memory
    w = ()
    u = ()
    for c in tl.static_range(PRELOAD):
        if RAGGED and c == CHUNKS - 1:
            w = w + (tl.load(base + c * 256, mask=k[None, :] < K - c * 256, other=0.0),)
            if GATED:
                u = u + (tl.load(base + N * K + c * 256, mask=k[None, :] < K - c * 256, other=0.0),)
        else:
            w = w + (tl.load(base + c * 256),)
            if GATED:
                u = u + (tl.load(base + N * K + c * 256),)
    if BIAS:
        b = tl.load(bias + safe).to(tl.float32)
    if PDL:
        gdc_wait()
    acc = ()
    up = ()
    ss = ()
    for m in tl.static_range(M):
        acc = acc + (tl.zeros((ROWS, 256), tl.float32),)
        if GATED:
            up = up + (tl.zeros((ROWS, 256), tl.float32),)
        if NORM:
            ss = ss + (tl.zeros((ROWS, 256), tl.float32),)
    for c in tl.static_range(CHUNKS):
        if c < PRELOAD:
            wc = w[c]
            if GATED:
                uc = u[c]
        elif RAGGED and c == CHUNKS - 1:
            wc = tl.load(base + c * 256, mask=k[None, :] < K - c * 256, other=0.0)
            if GATED:
                uc = tl.load(base + N * K + c * 256, mask=k[None, :] < K - c * 256, other=0.0)
        else:
            wc = tl.load(base + c * 256)
            if GATED:
                uc = tl.load(base + N * K + c * 256)
        wf = wc.to(tl.float32)
        if GATED:
            uf = uc.to(tl.float32)
        if NORM:
            if RAGGED and c == CHUNKS - 1:
                nf = tl.load(norm + c * 256 + same, mask=same < K - c * 256, other=0.0).to(tl.float32)
            else:
                nf = tl.load(norm + c * 256 + same).to(tl.float32)
        acc2 = ()
        up2 = ()
        ss2 = ()
        for m in tl.static_range(M):
            if RAGGED and c == CHUNKS - 1:
                xf = tl.load(x + m * K + c * 256 + same, mask=same < K - c * 256, other=0.0).to(tl.float32)
            else:
                xf = tl.load(x + m * K + c * 256 + same).to(tl.float32)
            if NORM:
                ss2 = ss2 + (ss[m] + xf * xf,)
                xf = xf * nf
            acc2 = acc2 + (acc[m] + wf * xf,)
            if GATED:
                up2 = up2 + (up[m] + uf * xf,)
        acc = acc2
        up = up2
        ss = ss2
    for m in tl.static_range(M):
        y = tl.sum(acc[m], 1)
        if NORM:
            scale = tl.rsqrt(tl.sum(ss[m], 1) / K + eps)
            y = y * scale
        if BIAS:
            y += b
        if GATED:
            g = tl.sum(up[m], 1)
            if NORM:
                g = g * scale
            y = y / (1 + tl.exp(-y)) * g
        if RESIDUAL:
            y += tl.load(residual + m * N + safe).to(tl.float32)
        tl.store(out + m * N + row, y.to(out.dtype.element_ty), mask=row < N)


MAX_ROWS = 2


def suits(rows: int, weight: torch.Tensor) -> bool:
    return rows <= MAX_ROWS


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: RMSNorm | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """W f(x) + bias [+ residual]: x [rows, k], weight [n, k] -> [rows, n].

    norm: f is that RMSNorm. gated: the weight is gate above up, [2 * n, k], and the result silu(gate) * up.
    """
    rows, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty(rows, n, dtype=dtype or x.dtype, device=x.device)
    pdl = chained(out.device)
    chunks = triton.cdiv(k, 256)
    if gated:
        own, preload = (1, 8) if k >= 4096 else (2, 2)
    else:
        own, preload = 8, (16 if k >= 2048 else 2)
    _gemv[(triton.cdiv(n, own),)](
        x,
        weight,
        bias if bias is not None else weight,
        norm.weight if norm is not None else weight,
        residual if residual is not None else x,
        out,
        norm.eps if norm is not None else 0.0,
        n,
        rows,
        k,
        own,
        min(preload, chunks),
        norm is not None,
        bias is not None,
        residual is not None,
        gated,
        pdl,
        num_warps=own,
        launch_pdl=pdl,
    )
    return out
