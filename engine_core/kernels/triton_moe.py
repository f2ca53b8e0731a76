"""A mixture of experts on the device: route, sort by expert, multiply, add up. No step waits for the host, and shapes
depend on the number of tokens alone, so all of it can be part of a CUDA graph.

A pair is one token at one of its experts; pair p is of token p // top_k. Pairs are sorted by expert into tiles of rows,
each expert's last tile padded, and a program multiplies one tile by some rows of its expert's weights: weights of
experts without tokens are not read, those of others once (again from L2 for further tiles). With few tokens there is a
tile for each pair, and nothing to sort. The results of a token's pairs are added in the order of its experts: no
atomics, the same bits at each run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine_core.kernels.triton_device import chained

UNSORTED_TOKENS = 8  # up to here a tile per pair: experts are seldom shared, and sorting takes a launch


@triton.jit
def _route(
    logits,
    ids,
    weights,
    E: tl.constexpr,
    EP: tl.constexpr,
    TOP: tl.constexpr,
    TP: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0)
    e = tl.arange(0, EP)
    t = tl.arange(0, TP)
    raw = tl.load(logits + token * E + e, mask=e < E, other=float("-inf"))
    p = tl.exp(raw - tl.max(raw, 0))
    p = p / tl.sum(p, 0)
    left = tl.where(e < E, tl.where(p == p, p, 0.0), -1.0)  # a row of NaN must still name experts that exist
    chosen = tl.zeros((TP,), tl.int32)
    weight = tl.zeros((TP,), tl.float32)
    for i in tl.static_range(TOP):
        best = tl.argmax(left, 0)
        chosen = tl.where(t == i, best, chosen)
        weight = tl.where(t == i, tl.max(left, 0), weight)
        left = tl.where(e == best, -2.0, left)
    if NORMALIZE:
        weight = weight / tl.sum(weight, 0)
    tl.store(ids + token * TOP + t, chosen, mask=t < TOP)
    tl.store(weights + token * TOP + t, weight, mask=t < TOP)


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _sort(
    ids,
    order,
    tile_experts,
    pairs,
    tiles,
    E: tl.constexpr,
    EP: tl.constexpr,
    BM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program e finds how many tiles the experts before e take, and puts the pairs of expert e behind them."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0)
    e = tl.arange(0, 2 * EP)
    i = tl.arange(0, BLOCK)
    m = tl.arange(0, BM)
    counts = tl.zeros((2 * EP,), tl.int32)
    for start in range(0, pairs, BLOCK):
        counts += tl.histogram(tl.load(ids + start + i, mask=start + i < pairs, other=EP), 2 * EP)
    used = tl.where(e < E, (counts + BM - 1) // BM, 0)
    first = tl.sum(tl.where(e < expert, used, 0), 0)
    own = tl.sum(tl.where(e == expert, used, 0), 0)
    for tile in range(first, first + own):
        tl.store(tile_experts + tile, expert)
    for tile in range(tl.sum(used, 0) + expert, tiles, E):
        tl.store(tile_experts + tile, -1)
    at = first * BM
    for start in range(0, pairs, BLOCK):
        mine = tl.load(ids + start + i, mask=start + i < pairs, other=EP) == expert
        found = mine.to(tl.int32)
        tl.store(order + at + tl.cumsum(found, 0) - 1, start + i, mask=mine)
        at += tl.sum(found, 0)
    tl.store(order + at + m, pairs + m * 0, mask=at + m < (first + own) * BM)


@triton.jit(do_not_specialize=["pairs"])
def _multiply(
    x,
    weight,
    tile_experts,
    order,
    scales,
    out,
    pairs,
    N,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    SORTED: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of pairs times BN rows of its expert. GATED: the weight is gate above up, the result silu(gate) * up of
    the pair's token; else the pair's own row of x, times its routing weight."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(0)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if expert < 0:
        return
    m = tl.arange(0, BM)
    pair = tl.load(order + tile * BM + m) if SORTED else tl.where(m == 0, tile, pairs)
    live = pair < pairs
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    kk = tl.arange(0, BK)
    x_row = x + (pair // SHARED).to(tl.int64)[:, None] * K
    above: tl.constexpr = 2 if GATED else 1
    w_row = weight + (expert * (N * above) + tl.minimum(n, N - 1))[:, None] * K
    acc = tl.zeros((BN, BM), tl.float32)
    up = tl.zeros((BN, BM), tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        k = start + kk
        if K % BK == 0:
            w = tl.load(w_row + k[None, :])
            rows = tl.load(x_row + k[None, :], mask=live[:, None], other=0.0)
        else:
            w = tl.load(w_row + k[None, :], mask=(k < K)[None, :], other=0.0)
            rows = tl.load(x_row + k[None, :], mask=live[:, None] & (k < K)[None, :], other=0.0)
        columns = tl.trans(rows)
        acc = tl.dot(w, columns, acc, input_precision="ieee")
        if GATED:
            u_row = w_row + N.to(tl.int64) * K
            if K % BK == 0:
                u = tl.load(u_row + k[None, :])
            else:
                u = tl.load(u_row + k[None, :], mask=(k < K)[None, :], other=0.0)
            up = tl.dot(u, columns, up, input_precision="ieee")
    factor = up / (1 + tl.exp(-acc)) if GATED else tl.load(scales + pair, mask=live, other=0.0)[None, :]
    acc = acc * factor
    at = pair.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=live[None, :] & (n < N)[:, None])


@triton.jit
def _add_up(parts, residual, out, N, TOP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(residual + token * N + n, mask=n < N, other=0.0).to(tl.float32)
    for i in tl.static_range(TOP):
        total += tl.load(parts + (token * TOP + i) * N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + token * N + n, total.to(out.dtype.element_ty), mask=n < N)


class _Tile(NamedTuple):
    """How a product is cut: pairs and outputs of a program, columns of K at a time."""

    pairs: int
    outputs: int
    columns: int
    stages: int
    warps: int


def _tile(tokens: int, pairs: int, num_experts: int, dtype: torch.dtype, gated: bool) -> _Tile:
    """The best of a sweep over Qwen3-30B-A3B on an H200, of those with at most 96 KiB of shared memory, which every GPU
    from Ampere on has."""
    if dtype == torch.float32:
        return _Tile(16, 32, 32, 2, 4)
    if tokens == 1:
        return _Tile(16, 16, 256, 3, 1) if gated else _Tile(16, 32, 256, 3, 2)
    if tokens <= UNSORTED_TOKENS:
        return _Tile(16, 16, 128, 4, 1) if gated else _Tile(16, 32, 128, 4, 1)
    if pairs <= 8 * num_experts:
        return _Tile(16, 64, 64, 3, 4) if gated else _Tile(16, 128, 64, 3, 4)
    if pairs <= 32 * num_experts:
        return _Tile(32, 64, 64, 3, 4) if gated else _Tile(32, 64, 64, 4, 4)
    if pairs <= 64 * num_experts:
        return _Tile(64, 64, 64, 3, 4) if gated else _Tile(64, 128, 64, 3, 4)
    return _Tile(128, 64, 64, 3, 4) if gated else _Tile(128, 128, 64, 3, 4)


def route(logits: torch.Tensor, top_k: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token, the likeliest first, and their weights: softmax of float32 `logits` [tokens, experts],
    scaled to sum to one if `normalize`. int32 and float32 [tokens, top_k]."""
    tokens, num_experts = logits.shape
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    experts, top = triton.next_power_of_2(num_experts), triton.next_power_of_2(top_k)
    pdl = chained(logits.device)
    _route[(tokens,)](
        logits, ids, weights, num_experts, experts, top_k, top, normalize, pdl, num_warps=1, launch_pdl=pdl
    )
    return ids, weights


def sort_by_expert(ids: torch.Tensor, num_experts: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs in tiles of `rows`: int32 [tiles * rows] pairs, the number of pairs where there is none, and int32 [tiles]
    experts, -1 for the tiles left over, whose pairs are undefined."""
    pairs = ids.numel()
    tiles = min(pairs, pairs // rows + num_experts)
    order = torch.empty(tiles * rows, dtype=torch.int32, device=ids.device)
    tile_experts = torch.empty(tiles, dtype=torch.int32, device=ids.device)
    experts, block = triton.next_power_of_2(num_experts), min(2048, triton.next_power_of_2(pairs))
    pdl = chained(ids.device)
    _sort[(num_experts,)](
        ids, order, tile_experts, pairs, tiles, num_experts, experts, rows, block, pdl, num_warps=4, launch_pdl=pdl
    )
    return order, tile_experts


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    residual: torch.Tensor,
) -> torch.Tensor:
    """residual + the weighted sum of what each token's experts make of x [tokens, hidden].

    ids, weights [tokens, top_k] as `route` gives them; gate_up [experts, 2 * intermediate, hidden], down [experts,
    hidden, intermediate].
    """
    tokens, top_k = ids.shape
    hidden, intermediate = down.shape[1:]
    inner = _tile(tokens, ids.numel(), len(down), x.dtype, True)
    outer = _tile(tokens, ids.numel(), len(down), x.dtype, False)
    is_sorted = tokens > UNSORTED_TOKENS
    order, tile_experts = sort_by_expert(ids, len(down), inner.pairs) if is_sorted else (ids, ids.flatten())
    h = torch.empty(ids.numel(), intermediate, dtype=x.dtype, device=x.device)
    parts = torch.empty(ids.numel(), hidden, dtype=x.dtype, device=x.device)
    _run(x, gate_up, tile_experts, order, weights, h, inner, top_k, is_sorted, gated=True)
    _run(h, down, tile_experts, order, weights, parts, outer, 1, is_sorted, gated=False)
    out = torch.empty_like(x)
    pdl = chained(x.device)
    block = min(1024, triton.next_power_of_2(hidden))
    grid = (tokens, triton.cdiv(hidden, block))
    _add_up[grid](parts, residual, out, hidden, top_k, block, pdl, num_warps=4, launch_pdl=pdl)
    return out


def _run(
    x: torch.Tensor,
    weight: torch.Tensor,
    tile_experts: torch.Tensor,
    order: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    tile: _Tile,
    shared: int,
    is_sorted: bool,
    gated: bool,
) -> None:
    """Every `shared` pairs have one row of x."""
    pairs, n = out.shape
    pdl = chained(x.device)
    _multiply[(tile_experts.shape[0], triton.cdiv(n, tile.outputs))](
        x,
        weight,
        tile_experts,
        order,
        scales,
        out,
        pairs,
        n,
        x.shape[1],
        shared,
        tile.pairs,
        tile.outputs,
        tile.columns,
        tile.stages,
        is_sorted,
        gated,
        pdl,
        num_warps=tile.warps,
        launch_pdl=pdl,
    )
