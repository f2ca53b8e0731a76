"""Weights times a few rows, for decode: y = W f(x), with the neighbours of a linear layer fused in.

Bytes: the weight once, nothing else of size. A warp owns `OWN` output rows and asks for their weights before it waits
for the kernel that makes x (programmatic dependent launch), so the memory never idles between layers. The sum of a row
stays inside its warp. Norm scale is applied after the product, which is linear in it.

Tiles are [OWN, warps, 256], those of x and of the norm's weight [1, warps, 256] with a stride of 0 over warps: so
Triton gives each warp its own copy of x, read once for all its rows, and nothing crosses shared memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine_core.kernels.triton_device import chained
from engine_core.layers.norm import RMSNorm


@triton.jit
def _weights(base, c: tl.constexpr, k, K: tl.constexpr):
    """Chunk `c` of 256 columns; zeros beyond the last column."""
    if c * 256 + 256 <= K:
        return tl.load(base + c * 256)
    return tl.load(base + c * 256, mask=k < K - c * 256, other=0.0)


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
    OWN: tl.constexpr,
    WARPS: tl.constexpr,
    PRELOAD: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    CHUNKS: tl.constexpr = (K + 255) // 256
    if PDL:
        gdc_launch_dependents()
    warp = tl.arange(0, WARPS)
    row = (tl.program_id(0) * WARPS + warp[None, :]) * OWN + tl.arange(0, OWN)[:, None]
    safe = tl.minimum(row, N - 1)  # a ragged last program repeats the last row and stores nothing
    k = tl.arange(0, 256)[None, None, :]
    base = weight + safe.to(tl.int64)[:, :, None] * K + k
    same = warp[None, :, None] * 0 + k
    w = ()
    u = ()
    for c in tl.static_range(PRELOAD):
        w = w + (_weights(base, c, k, K),)
        if GATED:
            u = u + (_weights(base + N * K, c, k, K),)
    if BIAS:
        b = tl.load(bias + safe).to(tl.float32)
    if PDL:
        gdc_wait()
    acc = ()
    up = ()
    ss = ()
    rest = ()
    for m in tl.static_range(M):
        if RESIDUAL:
            rest = rest + (tl.load(residual + m * N + safe).to(tl.float32),)
        acc = acc + (tl.zeros((OWN, WARPS, 256), tl.float32),)
        if GATED:
            up = up + (tl.zeros((OWN, WARPS, 256), tl.float32),)
        if NORM:
            ss = ss + (tl.zeros((1, WARPS, 256), tl.float32),)
    for c in tl.static_range(CHUNKS):
        if c < PRELOAD:
            wf = w[c].to(tl.float32)
            if GATED:
                uf = u[c].to(tl.float32)
        else:
            wf = _weights(base, c, k, K).to(tl.float32)
            if GATED:
                uf = _weights(base + N * K, c, k, K).to(tl.float32)
        if NORM:
            nf = _weights(norm + same, c, same, K).to(tl.float32)
        acc2 = ()
        up2 = ()
        ss2 = ()
        for m in tl.static_range(M):
            xf = _weights(x + m * K + same, c, same, K).to(tl.float32)
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
        y = tl.sum(acc[m], 2)
        if NORM:
            scale = tl.rsqrt(tl.sum(ss[m], 2) / K + eps)
            y = y * scale
        if BIAS:
            y += b
        if GATED:
            g = tl.sum(up[m], 2)
            if NORM:
                g = g * scale
            y = y / (1 + tl.exp(-y)) * g
        if RESIDUAL:
            y += rest[m]
        tl.store(out + m * N + row, y.to(out.dtype.element_ty), mask=row < N)


def suits(rows: int, weight: torch.Tensor) -> bool:
    """Whether this kernel is the fastest: for one row always, for up to four where the rows of weights are short."""
    n, k = weight.shape
    return rows == 1 or (rows <= 4 and k < 4096 and (rows == 2 or n < 32768))


class _Shape(NamedTuple):
    """Output rows of a warp, warps of a program, chunks of 256 columns asked for early."""

    own: int
    warps: int
    preload: int


def _shape(rows: int, n: int, k: int, gated: bool) -> _Shape:
    """The best of a sweep over the layers of 0.6B and 8B models on an H200."""
    if n >= 32768:
        return _Shape(1, 8, 16 if k >= 2048 else 2)
    if rows == 1:
        return _Shape(2, 1, 4) if k >= 4096 else _Shape(1, 8, 2 if k <= 1024 else 8)
    if rows == 2:
        return _Shape(2, 1, 4) if gated or k > 2048 else _Shape(2, 2, 2) if k <= 1024 else _Shape(1, 8, 8)
    if gated:
        return _Shape(1, 2, 2)
    return _Shape(4, 1, 2) if k <= 1024 else _Shape(2, 1, 8)


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
    shape = _shape(rows, n, k, gated)
    _gemv[(triton.cdiv(n, shape.own * shape.warps),)](
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
        shape.own,
        shape.warps,
        min(shape.preload, triton.cdiv(k, 256)),
        norm is not None,
        bias is not None,
        residual is not None,
        gated,
        pdl,
        num_warps=shape.warps,
        launch_pdl=pdl,
    )
    return out
