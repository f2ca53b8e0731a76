"""The beginning of a step on the device, from slots or ids to the first hidden states, and its end.

Because the next step's input ids are gathered here from the last sampled ids, no step waits for the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait, globaltimer

from engine_core.kernels.triton_device import chained


class Stamp(NamedTuple):
    """Where a step writes down when it began and ended, in ns of the device's clock."""

    times: torch.Tensor  # int64 [turns, 2]
    turn: torch.Tensor  # int32 [1]: the row to write to


@triton.jit
def _write_down(times, turn, times_stride, WHICH: tl.constexpr):
    tl.store(times + tl.load(turn) * times_stride + WHICH, globaltimer())


@triton.jit
def _begin(
    slots,
    lengths,
    new_blocks,
    tables,
    last_tokens,
    embedding,
    x,
    times,
    turn,
    table_stride,
    times_stride,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STAMP: tl.constexpr,
):
    i = tl.program_id(0)
    if STAMP:
        if i == 0:
            _write_down(times, turn, times_stride, 0)
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
    stamp: Stamp | None = None,
) -> torch.Tensor:
    """Hidden states [rows, hidden] of each slot's last token.

    slots, lengths (the new token included), new_blocks: int32 [rows]. A new block other than -1 is entered in the
    slot's block table.
    """
    times, turn = stamp or (last_tokens, last_tokens)
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
        times,
        turn,
        tables.stride(0),
        times.stride(0),
        hidden,
        triton.next_power_of_2(hidden),
        block_size,
        stamp is not None,
        num_warps=4,
    )
    return x


@triton.jit
def _embed(
    ids,
    token_slots,
    last_tokens,
    embedding,
    x,
    times,
    turn,
    times_stride,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    STAMP: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    if STAMP:
        if i == 0:
            _write_down(times, turn, times_stride, 0)
    token = tl.load(ids + i)
    if token < 0:
        token = tl.load(last_tokens + tl.load(token_slots + i))
    h = tl.arange(0, BLOCK)
    tl.store(x + i * H + h, tl.load(embedding + token.to(tl.int64) * H + h, mask=h < H, other=0.0), mask=h < H)


def embed(
    ids: torch.Tensor,
    token_slots: torch.Tensor,
    last_tokens: torch.Tensor,
    embedding: torch.Tensor,
    stamp: Stamp | None = None,
) -> torch.Tensor:
    """Hidden states [tokens, hidden]. An id of -1 stands for the last token sampled for its slot; int32 [tokens]."""
    tokens, hidden = ids.shape[0], embedding.shape[1]
    x = torch.empty(tokens, hidden, dtype=embedding.dtype, device=embedding.device)
    times, turn = stamp or (last_tokens, last_tokens)
    _embed[(tokens,)](
        ids,
        token_slots,
        last_tokens,
        embedding,
        x,
        times,
        turn,
        times.stride(0),
        hidden,
        triton.next_power_of_2(hidden),
        stamp is not None,
        num_warps=4,
    )
    return x


@triton.jit
def _end(times, turn, times_stride, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
    _write_down(times, turn, times_stride, 1)


def end_step(stamp: Stamp | None) -> None:
    """All of the step has been launched."""
    if stamp is not None:
        pdl = chained(stamp.times.device)
        _end[(1,)](stamp.times, stamp.turn, stamp.times.stride(0), pdl, num_warps=1, launch_pdl=pdl)
