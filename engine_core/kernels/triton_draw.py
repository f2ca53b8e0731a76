"""From logits to sampled tokens, on the device: argmax, or argmax with Gumbel noise among the tokens that are kept.

A row's token is the same whatever else is in the batch, and in every variant of the step that can draw it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine_core.kernels import triton_slots
from engine_core.kernels.triton_cut import Cut
from engine_core.kernels.triton_device import chained
from engine_core.kernels.triton_slots import (
    EDITED,
    FLAGS,
    GROUP,
    PENALISED,
    TEMPERATURE,
    TRUNCATED,
    cannot_be_sampled,
    float_of,
    integer_of,
    is_kept,
    seed_of,
)

BAD, MASKED = -1, -2  # in place of a token: NaN or +inf among the logits; no token is allowed
TILE = 1024
LOG2E = tl.constexpr(1.4426950408889634)
# Of Philox 4x32: the fewest that pass every known statistical test (Salmon et al., 2011); ten is its usual margin.
ROUNDS = tl.constexpr(7)
MOST_SEEN = tl.constexpr(32765)  # `seen` is int16 and goes up by 2: counts end at 16,382


@triton.jit
def _log2(x, CUDA: tl.constexpr):
    """Right to 2^-22, absolutely for x near 1 and relatively elsewhere, in one instruction where there is one."""
    if CUDA:
        return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return tl.log2(x)


@triton.jit
def _gumbel(bits, CUDA: tl.constexpr):
    """-log2(-log2(u)) for u uniform in (0, 1), up to a constant, from 32 random bits.

    What wins are the largest values, of u next to 1: there the inner logarithm is a series, exact in 1 - u.
    """
    w = ((bits >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - (1.0 - 2.0**-24)  # 1 - u
    small = w * (LOG2E + w * (0.5 * LOG2E + w * (LOG2E / 3.0)))
    return -_log2(tl.where(w < 0.015625, small, -_log2(1.0 - w, CUDA)), CUDA)


@triton.jit(do_not_specialize=["V", "per", "G"])
def _draw_part(
    logits,
    edited,
    slots,
    settings,
    lengths,
    groups,
    thresholds,
    last_ids,
    best_value,
    best_index,
    V,
    per,
    G,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    RANDOM: tl.constexpr,
    EDITS: tl.constexpr,
    TRUNCATES: tl.constexpr,
    CUDA: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    base = logits + row.to(tl.int64) * V
    threshold = float("-inf")
    last = 2147483647
    cut = False
    if RANDOM or EDITS:
        slot = tl.load(slots + row)
    if RANDOM:
        temperature = float_of(settings, slot, TEMPERATURE)
        steepness = LOG2E / tl.where(temperature > 0, temperature, 1.0)
        seed = seed_of(settings, slot)
        position = tl.load(lengths + row)
    if EDITS:
        if (integer_of(settings, slot, FLAGS) & EDITED) != 0:
            base = edited + row.to(tl.int64) * V
    if TRUNCATES:
        cut = (integer_of(settings, slot, FLAGS) & TRUNCATED) != 0
        if cut:
            threshold = tl.load(thresholds + row)
            last = tl.load(last_ids + row)
    LANES: tl.constexpr = TILE // 4
    lane = tl.arange(0, LANES)
    value = tl.full((LANES,), float("-inf"), tl.float32)
    index = tl.zeros((LANES,), tl.int32)
    bad = tl.zeros((LANES,), tl.int32)
    stop = tl.minimum((part + 1) * per, V)
    for start in range(part * per, stop, TILE):
        reach = True
        if TRUNCATES:
            if cut:  # most tiles hold no token that is kept: the survey knows
                group = start // GROUP + tl.arange(0, TILE // GROUP)
                tops = tl.load(groups + row * G + group, mask=group < G, other=float("-inf"))
                reach = tl.max(tops, 0) >= threshold
        if reach:
            if RANDOM:
                counter = (start // 4 + lane).to(tl.uint32)
                zero = counter * 0
                u = (zero, zero, zero, zero)
                if temperature > 0:  # four numbers at a time, one for each quarter of the tile
                    u = tl.philox(seed, counter, zero + position.to(tl.uint32), zero, zero, ROUNDS)
            for quarter in tl.static_range(4):
                at = start + quarter * LANES + lane
                v = tl.load(base + at, mask=at < stop, other=float("-inf")).to(tl.float32)
                bad = bad | cannot_be_sampled(v).to(tl.int32)
                if RANDOM:
                    if temperature > 0:
                        kept = is_kept(v, at, threshold, last)
                        v = v * steepness + _gumbel(u[quarter], CUDA)
                        v = tl.where(kept, v, float("-inf"))
                better = v > value
                value = tl.where(better, v, value)
                index = tl.where(better, at, index)
    top = tl.max(value, 0)
    # of equal values the lowest index, as torch.argmax and a plain loop do
    winner = tl.min(tl.where(value == top, index, 2147483647), 0)
    winner = tl.where(tl.max(bad, 0) > 0, -1, winner)
    tl.store(best_value + row * PARTS + part, top)
    tl.store(best_index + row * PARTS + part, winner)


@triton.jit(do_not_specialize=["V"])
def _draw_final(
    best_value,
    best_index,
    slots,
    settings,
    seen,
    last_tokens,
    ring,
    turn,
    stride,
    V,
    PARTS: tl.constexpr,
    EDITS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    p = tl.arange(0, PARTS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(best_value + row * PARTS + p)
    index = tl.load(best_index + row * PARTS + p)
    slot = tl.load(slots + row)
    top = tl.max(value, 0)
    winner = tl.min(tl.where(value == top, index, 2147483647), 0)
    winner = tl.where(top == float("-inf"), -2, winner)
    winner = tl.where(tl.min(index, 0) < 0, -1, winner)
    tl.store(ring + tl.load(turn) * stride + row, winner)
    tl.store(last_tokens + slot, tl.maximum(winner, 0))
    if EDITS:
        if winner >= 0:
            if (integer_of(settings, slot, FLAGS) & PENALISED) != 0:
                cell = seen + slot.to(tl.int64) * V + winner
                count = tl.load(cell)
                tl.store(cell, tl.where(count < MOST_SEEN, count + 2, count))


class Edits(NamedTuple):
    """Rows to sample from where a row edits its logits, and the counts that its penalties go by."""

    logits: torch.Tensor  # float32 [rows, vocabulary]
    seen: torch.Tensor  # int16 [slots, vocabulary]


class Truncation(NamedTuple):
    cut: Cut
    groups: torch.Tensor  # float32 [rows, groups]: the largest logit of each group


def draw(
    logits: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    settings: torch.Tensor | None,
    last_tokens: torch.Tensor,
    ring: torch.Tensor,
    turn: torch.Tensor,
    edits: Edits | None = None,
    truncation: Truncation | None = None,
) -> None:
    """One token per row of float32 logits [rows, vocabulary], into row `turn` of the int32 `ring`, into `last_tokens`,
    and into the counts of penalised rows.

    Gumbel-max: argmax of logits / T plus noise that is a pure function of (seed, length, token id); a temperature of 0
    is greedy. Without `settings`, int32 [slots, fields], all rows are greedy. A row with NaN or +inf gives `BAD`, one
    of -inf alone `MASKED`. No sort, no sync.
    """
    rows, vocabulary = logits.shape
    parts = triton_slots.PARTS
    best_value = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    best_index = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    pdl = chained(logits.device)
    groups = triton.cdiv(vocabulary, GROUP.value)
    per = triton.cdiv(triton.cdiv(vocabulary, TILE), parts) * TILE  # whole tiles: a token's noise is a matter of its id
    unused = logits
    _draw_part[(rows, parts)](
        logits,
        edits.logits if edits is not None else unused,
        slots,
        settings if settings is not None else unused,
        lengths,
        truncation.groups if truncation is not None else unused,
        truncation.cut.thresholds if truncation is not None else unused,
        truncation.cut.last_ids if truncation is not None else unused,
        best_value,
        best_index,
        vocabulary,
        per,
        groups,
        TILE,
        parts,
        settings is not None,
        edits is not None,
        truncation is not None,
        logits.device.type == "cuda",
        pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    _draw_final[(rows,)](
        best_value,
        best_index,
        slots,
        settings if settings is not None else unused,
        edits.seen if edits is not None else unused,
        last_tokens,
        ring,
        turn,
        ring.stride(0),
        vocabulary,
        parts,
        edits is not None,
        pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
