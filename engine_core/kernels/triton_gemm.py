"""Weights times 2 to 256 rows on the tensor cores, with the neighbours of a linear layer fused in.

The weights are the left operand (their rows fill the tensor core's 64, the rows of x are its columns). The first
`PRELOAD` tiles of a program's weights are asked for before the wait for the kernel that makes x. Narrow layers split K
over programs; the program that arrives last adds the float32 parts in a fixed order, so results do not vary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine_core.kernels.triton_device import chained, shared_memory


@triton.jit(do_not_specialize=["M"])
def _skinny(
    x,
    weight,
    bias,
    residual,
    out,
    partial,
    counters,
    M,
    N,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    PRELOAD: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    CHUNKS: tl.constexpr = (K + BK - 1) // BK
    PER: tl.constexpr = (CHUNKS + SPLITS - 1) // SPLITS
    if PDL:
        gdc_launch_dependents()
    pn = tl.program_id(0)
    ps = tl.program_id(1)
    n = pn * BN + tl.arange(0, BN)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    k0 = ps * PER * BK
    kk = tl.arange(0, BK)
    rows = tl.minimum(n, N - 1).to(tl.int64)[:, None]
    w = ()
    u = ()
    for c in tl.static_range(PRELOAD):
        k = k0 + c * BK + kk
        w = w + (tl.load(weight + rows * K + k[None, :], mask=(k < K)[None, :], other=0.0),)
        if GATED:
            u = u + (tl.load(weight + (rows + N) * K + k[None, :], mask=(k < K)[None, :], other=0.0),)
    if PDL:
        gdc_wait()
    acc = tl.zeros((BN, BM), tl.float32)
    up = tl.zeros((BN, BM), tl.float32)
    for c in tl.static_range(PRELOAD):
        k = k0 + c * BK + kk
        xv = tl.load(x + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        xt = tl.trans(xv)
        acc = tl.dot(w[c], xt, acc, input_precision="ieee")
        if GATED:
            up = tl.dot(u[c], xt, up, input_precision="ieee")
    for c in tl.range(PRELOAD, PER, num_stages=STAGES):
        k = k0 + c * BK + kk
        wc = tl.load(weight + rows * K + k[None, :], mask=(k < K)[None, :], other=0.0)
        xv = tl.load(x + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        xt = tl.trans(xv)
        acc = tl.dot(wc, xt, acc, input_precision="ieee")
        if GATED:
            uc = tl.load(weight + (rows + N) * K + k[None, :], mask=(k < K)[None, :], other=0.0)
            up = tl.dot(uc, xt, up, input_precision="ieee")
    at = m[None, :] * N + n[:, None]
    inside = (m < M)[None, :] & (n < N)[:, None]
    last = True
    if SPLITS > 1:
        tl.store(partial + ps * M * N + at, acc, mask=inside)
        tl.debug_barrier()
        last = tl.atomic_add(counters + pn, 1, sem="acq_rel") == SPLITS - 1
        if last:
            acc = tl.zeros((BN, BM), tl.float32)
            for s in tl.static_range(SPLITS):
                acc += tl.load(partial + s * M * N + at, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(counters + pn, 0)
    if last:
        if BIAS:
            acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc = acc / (1 + tl.exp(-acc)) * up
        if RESIDUAL:
            acc += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


class _Shape(NamedTuple):
    """How a product is cut: rows of weights and columns of K per tile, programs that share K, tiles asked for early."""

    rows: int
    columns: int
    splits: int
    preload: int
    stages: int
    warps: int
    most: int = 64  # rows of x per program; with several programs for x, K is not split


def _shape(rows: int, n: int, k: int, gated: bool) -> _Shape | None:
    """The best of a sweep over the layers of 0.6B and 8B models on an H200; None where cuBLAS won."""
    megabytes = n * k * (2 if gated else 1) >> 19
    narrow = k <= 1024 and n < 32768
    if rows <= 8 and (k <= 2048 or n <= 2048):
        if gated:
            return _Shape(16, 256, 1, 1, 4, 1)
        if n <= 2048:
            return _Shape(64, 128, 8 if k <= 2048 else 4, 4, 3, 4)
        return _Shape(32, 256, 1, 0, 4, 4)
    if rows <= 32:
        if gated:
            return _Shape(64, 128, 1, 0, 4, 4) if k <= 2048 else _Shape(32, 128, 1, 1, 4, 2)
        return _Shape(64, 128, 4 if n <= 4096 and k >= 2048 else 1, 0, 6, 4)
    if rows <= 64:
        if gated:
            return _Shape(64, 64, 1, 0, 6 if megabytes <= 16 else 4, 4)
        if n >= 32768:  # the head
            return _Shape(64, 64, 1, 0, 6, 4) if k <= 1024 else _Shape(128, 128, 1, 0, 4, 8)
        if n <= 2048 and megabytes <= 16:
            return _Shape(32, 128, 4, 0, 6, 2)
        if narrow and megabytes <= 16:
            return _Shape(64, 64, 1, 0, 6, 4)
        if 2048 < n <= 4096 <= k:
            return _Shape(64, 128, 2, 0, 4, 4)
    if 128 < rows <= 256 and narrow and n > 2048:
        return _Shape(64, 128, 1, 0, 3, 8, 128) if gated else _Shape(64, 128, 1, 0, 4, 4, 128)
    return None


def _stages(shape: _Shape, tile: int, gated: bool, pdl: bool, room: int) -> int:
    """Those of the sweep, or fewer, as `room` bytes of shared memory can hold. `tile`: rows of x per program."""
    held = room // (2 * shape.columns * (shape.rows * (1 + gated) + tile))
    return min(shape.stages, max(1, held if pdl else held + 1))  # before Hopper a tile is in registers when multiplied


def suits(rows: int, weight: torch.Tensor, gated: bool = False) -> bool:
    """Whether this kernel is the faster one, against cuBLAS."""
    n, k = weight.shape
    return weight.dtype != torch.float32 and _shape(rows, n // 2 if gated else n, k, gated) is not None


class _Counters:
    """Arrival counters of split products, one block per device, which a tile's last program sets back to 0."""

    def __init__(self) -> None:
        self._zeros: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        if device not in self._zeros:
            self._zeros[device] = torch.zeros(4096, dtype=torch.int32, device=device)
        return self._zeros[device]


_counters = _Counters()


def gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """W x + bias [+ residual] for up to 256 rows; arguments as for `triton_gemv.gemv`."""
    rows, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty(rows, n, dtype=dtype or x.dtype, device=x.device)
    pdl = chained(out.device)
    shape = _shape(rows, n, k, gated)
    assert shape is not None  # the caller asked `suits`
    splits = shape.splits
    per_program = triton.cdiv(triton.cdiv(k, shape.columns), splits)
    partial = torch.empty(splits * rows * n if splits > 1 else 1, dtype=torch.float32, device=x.device)
    tile = 8 if rows <= 8 else min(shape.most, max(16, triton.next_power_of_2(rows)))
    assert splits == 1 or rows <= tile  # arrivals are counted by tile of the weights
    _skinny[(triton.cdiv(n, shape.rows), splits, triton.cdiv(rows, tile))](
        x,
        weight,
        bias if bias is not None else weight,
        residual if residual is not None else x,
        out,
        partial,
        _counters.on(x.device),
        rows,
        n,
        k,
        tile,
        shape.rows,
        shape.columns,
        splits,
        min(shape.preload, per_program),
        _stages(shape, tile, gated, pdl, shared_memory(x.device)),
        bias is not None,
        residual is not None,
        gated,
        pdl,
        num_warps=shape.warps,
        launch_pdl=pdl,
    )
    return out
