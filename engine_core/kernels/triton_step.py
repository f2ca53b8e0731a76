"""The ends of a decode step on the device: from slots to the first hidden states, and from logits to sampled tokens.

Because the next step's input ids are gathered here from the last sampled ids, no step waits for the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine_core.kernels.triton_device import chained

PARTS = 32  # programs that share a row of logits


@triton.jit
def _begin(
    slots,
    lengths,
    new_blocks,
    tables,
    last_tokens,
    embedding,
    x,
    table_stride,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    i = tl.program_id(0)
    slot = tl.load(slots + i)
    block = tl.load(new_blocks + i)
    if block >= 0:
        tl.store(tables + slot * table_stride + (tl.load(lengths + i) - 1) // BLOCK_SIZE, block)
    token = tl.load(last_tokens + slot).to(tl.int64)
    h = tl.arange(0, BLOCK)
    tl.store(x + i * H + h, tl.load(embedding + token * H + h, mask=h < H, other=0.0), mask=h < H)


def begin_step(
    slots: torch.Tensor,
    lengths: torch.Tensor,
    new_blocks: torch.Tensor,
    tables: torch.Tensor,
    last_tokens: torch.Tensor,
    embedding: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """Hidden states [rows, hidden] of each slot's last token.

    slots, lengths (the new token included), new_blocks: int32 [rows]. A new block other than -1 is entered in the
    slot's block table.
    """
    rows, hidden = slots.shape[0], embedding.shape[1]
    x = torch.empty(rows, hidden, dtype=embedding.dtype, device=embedding.device)
    _begin[(rows,)](
        slots,
        lengths,
        new_blocks,
        tables,
        last_tokens,
        embedding,
        x,
        tables.stride(0),
        hidden,
        triton.next_power_of_2(hidden),
        block_size,
        num_warps=4,
    )
    return x


@triton.jit
def _embed(ids, token_slots, last_tokens, embedding, x, H: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    token = tl.load(ids + i)
    if token < 0:
        token = tl.load(last_tokens + tl.load(token_slots + i))
    h = tl.arange(0, BLOCK)
    tl.store(x + i * H + h, tl.load(embedding + token.to(tl.int64) * H + h, mask=h < H, other=0.0), mask=h < H)


def embed(
    ids: torch.Tensor, token_slots: torch.Tensor, last_tokens: torch.Tensor, embedding: torch.Tensor
) -> torch.Tensor:
    """Hidden states [tokens, hidden]. An id of -1 stands for the last token sampled for its slot; int32 [tokens]."""
    tokens, hidden = ids.shape[0], embedding.shape[1]
    x = torch.empty(tokens, hidden, dtype=embedding.dtype, device=embedding.device)
    _embed[(tokens,)](ids, token_slots, last_tokens, embedding, x, hidden, triton.next_power_of_2(hidden), num_warps=4)
    return x


@triton.jit(do_not_specialize=["V", "per"])
def _draw_part(
    logits,
    slots,
    temperatures,
    seeds,
    lengths,
    best_value,
    best_index,
    V,
    per,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    RANDOM: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    base = logits + row.to(tl.int64) * V
    if RANDOM:
        slot = tl.load(slots + row)
        temperature = tl.load(temperatures + slot)
        seed = tl.load(seeds + slot)
        position = tl.load(lengths + row)
    n = tl.arange(0, BLOCK)
    value = tl.full((BLOCK,), float("-inf"), tl.float32)
    index = tl.zeros((BLOCK,), tl.int32)
    bad = tl.zeros((BLOCK,), tl.int32)
    stop = tl.minimum((part + 1) * per, V)
    for start in range(part * per, stop, BLOCK):
        at = start + n
        v = tl.load(base + at, mask=at < stop, other=float("-inf")).to(tl.float32)
        bad = bad | ((v != v) | (v == float("inf"))).to(tl.int32)
        if RANDOM:
            if temperature > 0:
                u0, _, _, _ = tl.philox(
                    seed,
                    at.to(tl.uint32),
                    position.to(tl.uint32) + tl.zeros_like(at).to(tl.uint32),
                    at.to(tl.uint32) * 0,
                    at.to(tl.uint32) * 0,
                )
                u = ((u0 >> 8).to(tl.float32) + 0.5) * (1.0 / 16777216.0)
                v = v / temperature - tl.log(-tl.log(u))
        better = v > value
        value = tl.where(better, v, value)
        index = tl.where(better, at, index)
    top = tl.max(value, 0)
    # of equal values the lowest index, as torch.argmax and a plain loop do
    winner = tl.min(tl.where(value == top, index, 2147483647), 0)
    winner = tl.where(tl.max(bad, 0) > 0, -1, winner)
    tl.store(best_value + row * PARTS + part, top)
    tl.store(best_index + row * PARTS + part, winner)


@triton.jit
def _draw_final(best_value, best_index, slots, last_tokens, ring, turn, stride, PARTS: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0)
    p = tl.arange(0, PARTS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(best_value + row * PARTS + p)
    index = tl.load(best_index + row * PARTS + p)
    top = tl.max(value, 0)
    winner = tl.min(tl.where(value == top, index, 2147483647), 0)
    winner = tl.where((tl.min(index, 0) < 0) | (top == float("-inf")), -1, winner)
    tl.store(ring + tl.load(turn) * stride + row, winner)
    tl.store(last_tokens + tl.load(slots + row), tl.maximum(winner, 0))


def draw(
    logits: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    temperatures: torch.Tensor | None,
    seeds: torch.Tensor | None,
    last_tokens: torch.Tensor,
    ring: torch.Tensor,
    turn: torch.Tensor,
) -> None:
    """One token per row of logits [rows, vocabulary], into row `turn` of the int32 `ring` and into `last_tokens`.

    Gumbel-max: argmax of logits / T plus noise that is a pure function of (seed, length, token id); a temperature of 0
    is greedy. temperatures float32 and seeds int64 are per slot; without them all rows are greedy. A row with NaN or
    +inf gives -1. No sort, no sync.
    """
    rows, vocabulary = logits.shape
    best_value = torch.empty(rows, PARTS, dtype=torch.float32, device=logits.device)
    pdl = chained(logits.device)
    best_index = torch.empty(rows, PARTS, dtype=torch.int32, device=logits.device)
    per = triton.cdiv(vocabulary, PARTS)
    unused = logits
    random = temperatures is not None
    _draw_part[(rows, PARTS)](
        logits,
        slots,
        temperatures if random else unused,
        seeds if random else unused,
        lengths,
        best_value,
        best_index,
        vocabulary,
        per,
        1024,
        PARTS,
        random,
        pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    _draw_final[(rows,)](
        best_value, best_index, slots, last_tokens, ring, turn, ring.stride(0), PARTS, pdl, num_warps=1, launch_pdl=pdl
    )
